// Range of values -> scale and zero point, on the device (docs/numerics.md 2.1).
// NaN and infinity: the largest |x| is reduced as a bit pattern, where NaN > infinity > every finite value, so a
// poisoned range is seen without a flag of its own. Maxima do not depend on the order: any reduction gives the same.
#pragma once
#include "core/epilogue_math.h"

namespace pyquant::cuda {

constexpr int kBlock = 256;  // most threads of a block here

struct Range {
  uint32_t amax = 0;  // bits of the largest |x|
  float low = 0.f, high = 0.f;
};

__device__ __forceinline__ void widen_range(Range& r, float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  r.amax = bits > r.amax ? bits : r.amax;
  r.low = x < r.low ? x : r.low;
  r.high = x > r.high ? x : r.high;
}

__device__ __forceinline__ Range merged(const Range& a, const Range& b) {
  return {a.amax > b.amax ? a.amax : b.amax, a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

// Over `lanes` neighbouring threads of a warp, a power of two; every one of them gets the result.
__device__ __forceinline__ Range reduce_lanes(Range r, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    const Range other = {__shfl_xor_sync(0xffffffffu, r.amax, step), __shfl_xor_sync(0xffffffffu, r.low, step),
                         __shfl_xor_sync(0xffffffffu, r.high, step)};
    r = merged(r, other);
  }
  return r;
}

__device__ __forceinline__ int32_t sum_lanes(int32_t v, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

// Over the block; every thread gets the result. per_warp: shared, one entry a warp, not in use by anything else.
__device__ __forceinline__ Range reduce_block(Range r, Range* per_warp) {
  r = reduce_lanes(r, 32);
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  if (threadIdx.x % 32 == 0) per_warp[warp] = r;
  __syncthreads();
  r = per_warp[0];
  for (int i = 1; i < warps; ++i) r = merged(r, per_warp[i]);
  return r;
}

__device__ __forceinline__ int32_t sum_block(int32_t v, int32_t* per_warp) {
  v = sum_lanes(v, 32);
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  if (threadIdx.x % 32 == 0) per_warp[warp] = v;
  __syncthreads();
  v = per_warp[0];
  for (int i = 1; i < warps; ++i) v += per_warp[i];
  return v;
}

// What turns values into codes.
struct Step {
  float scale, recip;
  int32_t zero_point;
};

__device__ __forceinline__ Step step_of(const Range& range, bool symmetric, int32_t qmin, int32_t qmax) {
  const float amax = float_from_bits(range.amax);
  Step s;
  if (symmetric)
    s.scale = scale_from_amax(amax, qmax);
  else
    s.scale = amax < kInfinity ? scale_from_range(range.low, range.high, qmin, qmax) : kNaN;
  s.recip = scale_recip(s.scale);
  s.zero_point = symmetric ? 0 : zero_point_from_range(range.low, s.recip, qmin, qmax);
  return s;
}

__device__ __forceinline__ Step step_at(const float* scale, const int32_t* zero_point, int64_t index) {
  return {scale[index], scale_recip(scale[index]), zero_point ? zero_point[index] : 0};
}

}  // namespace pyquant::cuda
