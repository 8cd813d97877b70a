// Two 16-bit floats that share a word, in one instruction where there is one.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace pyquant::cuda {

// The half words of a word as floats. bf16 is the upper half of a float: no conversion is needed.
template <bool kF16>
__device__ __forceinline__ float2 floats_of_pair(uint32_t word) {
  if constexpr (!kF16) return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  __half2 pair;
  memcpy(&pair, &word, sizeof pair);
  return __half22float2(pair);
}

// Two floats as the half words of a word.
template <bool kF16>
__device__ __forceinline__ uint32_t pair_of_floats(float low, float high) {
  uint32_t word;
  if constexpr (kF16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

}  // namespace pyquant::cuda
