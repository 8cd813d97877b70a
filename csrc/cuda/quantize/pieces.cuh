// Neighbours of a row as they come from memory, fewer or more than a unit.
#pragma once
#include "cuda/quantize/unit.cuh"

namespace pyquant::cuda {

// Width neighbours of a row of T: words of a pair of 16-bit elements or of one float.
template <class T, int Width>
struct Piece {
  static constexpr int kWords = Width * static_cast<int>(sizeof(T)) / 4;
  uint32_t word[kWords];
  // from: aligned to the piece, or to 16 bytes where it is larger.
  __device__ __forceinline__ void load(const T* from) {
    if constexpr (kWords >= 4) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const uint4 all = reinterpret_cast<const uint4*>(from)[i / 4];
        word[i] = all.x, word[i + 1] = all.y, word[i + 2] = all.z, word[i + 3] = all.w;
      }
    } else if constexpr (kWords == 2) {
      const uint2 all = *reinterpret_cast<const uint2*>(from);
      word[0] = all.x, word[1] = all.y;
    } else {
      word[0] = *reinterpret_cast<const uint32_t*>(from);
    }
  }
  // The same element by element: `count` of them exist, the others read as 0.
  __device__ __forceinline__ void load_some(const T* from, int count) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
#pragma unroll
    for (int j = 0; j < Width; ++j)
      if (j < count) word[j * kWords / Width] |= bits_of(from[j]) << (8 * sizeof(T) * j % 32);
  }
  __device__ __forceinline__ void widen(float (&v)[Width]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) widen_word<T>(word[i], v + i * (Width / kWords));
  }
};

}  // namespace pyquant::cuda
