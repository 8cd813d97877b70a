// From the accumulators of a quad of lanes to rows: what a lane stores in one piece.
#pragma once
#include <cuda_runtime.h>

namespace pyquant::cuda {

// Tells the compiler what it cannot see where warps have jobs of their own: without an instruction that all lanes of a
// warp run together, every exchange between lanes, and what follows it, is compiled a second time for lanes apart.
__device__ __forceinline__ void lanes_are_together() {
  uint32_t word = 0;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(word));
}

// Pair q of every block of 8 columns -> the 8 columns of block q, q = lane % 4.
template <class Acc>
__device__ __forceinline__ void transpose_quad(const Acc (&pair)[4][2], Acc (&row)[8]) {
  const int lane = static_cast<int>(threadIdx.x) & 3;
  const bool odd = lane & 1, upper = lane & 2;
  Acc couple[2][4];  // blocks (odd, 2 + odd): pairs of both lanes of the couple, in their order
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const Acc keep = odd ? pair[2 * j + 1][v] : pair[2 * j][v];
      const Acc got = __shfl_xor_sync(0xffffffffu, odd ? pair[2 * j][v] : pair[2 * j + 1][v], 1);
      couple[j][v] = odd ? got : keep;
      couple[j][2 + v] = odd ? keep : got;
    }
  }
#pragma unroll
  for (int v = 0; v < 4; ++v) {
    const Acc keep = upper ? couple[1][v] : couple[0][v];
    const Acc got = __shfl_xor_sync(0xffffffffu, upper ? couple[0][v] : couple[1][v], 2);
    row[v] = upper ? got : keep;
    row[4 + v] = upper ? keep : got;
  }
}

// Word j of every lane of a quad -> word of each lane, in their order, at index j = lane % 4.
__device__ __forceinline__ uint4 transpose_words(const uint32_t (&word)[4]) {
  const int lane = static_cast<int>(threadIdx.x) & 3;
  const bool odd = lane & 1, upper = lane & 2;
  const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? word[0] : word[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? word[2] : word[3], 1);
  const uint32_t low[2] = {odd ? a : word[0], odd ? word[1] : a}, high[2] = {odd ? b : word[2], odd ? word[3] : b};
  const uint32_t c = __shfl_xor_sync(0xffffffffu, upper ? low[0] : high[0], 2);
  const uint32_t d = __shfl_xor_sync(0xffffffffu, upper ? low[1] : high[1], 2);
  return upper ? make_uint4(c, d, high[0], high[1]) : make_uint4(low[0], low[1], c, d);
}

// Lane 4r + q holds columns 2q, 2q + 1 of row r of an 8 x 8 matrix of half words: the same of its transpose.
__device__ __forceinline__ uint32_t turned(uint32_t word) {
  uint32_t r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(word));
  return r;
}

}  // namespace pyquant::cuda
