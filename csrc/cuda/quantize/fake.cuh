// One element of a fake quantiser, and the bits of its mask.
#pragma once
#include "cuda/elements.cuh"
#include "cuda/quantize/range.cuh"

namespace pyquant::cuda {

struct FakeStep {
  float scale, recip, low, high;  // limits of rint(x * recip)
};

__device__ __forceinline__ FakeStep fake_step(const Step& s, int32_t qmin, int32_t qmax) {
  return {s.scale, s.recip, static_cast<float>(qmin - s.zero_point), static_cast<float>(qmax - s.zero_point)};
}

// The code less its zero point, 0 for NaN and never -0; whether it was not clipped.
__device__ __forceinline__ float fake_code(float v, const FakeStep& s, bool* inside) {
  const float r = fround_even(v);
  *inside = r >= s.low && r <= s.high;
  float c = r < s.low ? s.low : r;
  c = c > s.high ? s.high : c;
  return r == r ? fadd(c, 0.f) : 0.f;
}

// Replaces a unit by its fake-quantised values; the first `valid` bits of the result say what was not clipped.
template <int Width>
__device__ __forceinline__ uint32_t fake_unit(float (&v)[Width], int64_t valid, const FakeStep& s) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < Width; ++j) {
    bool inside;
    v[j] = fmul(fake_code(fmul(v[j], s.recip), s, &inside), s.scale);
    if (inside && j < valid) bits |= 1u << j;
  }
  return bits;
}

// The byte of eight neighbours: a unit's own, or of two neighbouring threads with four each, where the even one has it.
// Every thread of the warp calls this.
template <int Width>
__device__ __forceinline__ uint32_t byte_of(uint32_t bits) {
  return Width == 8 ? bits : bits | __shfl_xor_sync(0xffffffffu, bits, 1) << 4;
}

}  // namespace pyquant::cuda
