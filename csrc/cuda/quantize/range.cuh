// Range of values -> scale and zero point, on the device (docs/numerics.md 2.1).
// NaN and infinity: the ends of a range are kept as the bits of magnitudes, where NaN > infinity > every finite value,
// so a poisoned range is seen without a flag of its own. Maxima do not depend on the order: any reduction gives the
// same.
#pragma once
#include "core/epilogue_math.h"
#include "cuda/quantize/unit.cuh"

namespace pyquant::cuda {

constexpr int kBlock = 256;         // threads of a block, where it is not chosen by the shape
constexpr int kMostThreads = 1024;  // of any block

// Bits of the largest magnitude on either side of 0. Symmetric: `above` alone, of all values.
struct Range {
  uint32_t below, above;  // no initialisers: shared memory has none
};

__device__ __forceinline__ Range merged(const Range& a, const Range& b) {
  return {a.below > b.below ? a.below : b.below, a.above > b.above ? a.above : b.above};
}

// Maximum and minimum of which NaN is the result when either value is NaN, of one float or two 16-bit values.
template <class T>
struct Extremes;
#define PYQUANT_EXTREMES(TYPE, SUFFIX)                                         \
  template <>                                                                  \
  struct Extremes<TYPE> {                                                      \
    static __device__ __forceinline__ uint32_t most(uint32_t a, uint32_t b) {  \
      asm("max.NaN." SUFFIX " %0, %0, %1;" : "+r"(a) : "r"(b));                \
      return a;                                                                \
    }                                                                          \
    static __device__ __forceinline__ uint32_t least(uint32_t a, uint32_t b) { \
      asm("min.NaN." SUFFIX " %0, %0, %1;" : "+r"(a) : "r"(b));                \
      return a;                                                                \
    }                                                                          \
  };
PYQUANT_EXTREMES(__half, "f16x2")
PYQUANT_EXTREMES(__nv_bfloat16, "bf16x2")
#undef PYQUANT_EXTREMES
template <>
struct Extremes<float> {
  static __device__ __forceinline__ uint32_t most(uint32_t a, uint32_t b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
    return __float_as_uint(result);
  }
  static __device__ __forceinline__ uint32_t least(uint32_t a, uint32_t b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(__uint_as_float(a)), "f"(__uint_as_float(b)));
    return __float_as_uint(result);
  }
};

// The range of units as they lie in memory: 16-bit elements two at a time.
template <class T>
class RangeOf {
 public:
  __device__ __forceinline__ void widen(const Unit<T>& unit, bool symmetric) {
#pragma unroll
    for (int i = 0; i < 4; ++i) widen(unit.word[i], symmetric);
  }
  __device__ __forceinline__ void widen(uint32_t word, bool symmetric) {
    if (!symmetric) low_ = Extremes<T>::least(low_, word);
    high_ = Extremes<T>::most(high_, symmetric ? magnitudes(word) : word);
  }
  // This or the other range, over this lane and the one `step` away, which keeps the other of the two: `upper` says
  // which lane this is.
  __device__ __forceinline__ void exchange(const RangeOf& other, bool upper, int step, bool symmetric) {
    const uint32_t from_high = __shfl_xor_sync(0xffffffffu, upper ? high_ : other.high_, step);
    high_ = Extremes<T>::most(upper ? other.high_ : high_, from_high);
    if (symmetric) return;
    const uint32_t from_low = __shfl_xor_sync(0xffffffffu, upper ? low_ : other.low_, step);
    low_ = Extremes<T>::least(upper ? other.low_ : low_, from_low);
  }
  __device__ __forceinline__ Range ends() const { return {magnitude(low_), magnitude(high_)}; }

 private:
  static __device__ __forceinline__ uint32_t magnitudes(uint32_t word) {
    if constexpr (sizeof(T) == 2) return word & 0x7fff7fffu;
    return __float_as_uint(fabsf(__uint_as_float(word)));  // free: a modifier of the operand
  }
  // Bits, as a float, of the larger of them.
  static __device__ __forceinline__ uint32_t magnitude(uint32_t word) {
    float v[kVector<T> / 4];
    widen_word<T>(word, v);
    uint32_t bits = __float_as_uint(v[0]) & 0x7fffffffu;
    if constexpr (sizeof(T) == 2) {
      const uint32_t other = __float_as_uint(v[1]) & 0x7fffffffu;
      bits = other > bits ? other : bits;
    }
    return bits;
  }
  uint32_t low_ = 0, high_ = 0;
};

// Over `lanes` neighbouring threads of a warp, a power of two; every one of them gets the result.
__device__ __forceinline__ uint32_t most_of_lanes(uint32_t v, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) v = max(v, __shfl_xor_sync(0xffffffffu, v, step));
  return v;
}
__device__ __forceinline__ Range reduce_lanes(const Range& r, int lanes, bool symmetric) {
  return {symmetric ? 0 : most_of_lanes(r.below, lanes), most_of_lanes(r.above, lanes)};
}

__device__ __forceinline__ int32_t sum_lanes(int32_t v, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

__device__ __forceinline__ Range reduce_warp(const Range& r) {
  return {__reduce_max_sync(0xffffffffu, r.below), __reduce_max_sync(0xffffffffu, r.above)};
}

// Over the block; every thread gets the result. per_warp: shared, one entry a warp, not in use by anything else.
__device__ __forceinline__ Range reduce_block(Range r, Range* per_warp) {
  r = reduce_warp(r);
  if (blockDim.x == 32) return r;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) per_warp[threadIdx.x / 32] = r;
  __syncthreads();
  return reduce_warp(lane * 32 < static_cast<int>(blockDim.x) ? per_warp[lane] : Range{});
}

// The same of sums.
__device__ __forceinline__ int32_t sum_block(int32_t v, int32_t* per_warp) {
  v = __reduce_add_sync(0xffffffffu, v);
  if (blockDim.x == 32) return v;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane == 0) per_warp[threadIdx.x / 32] = v;
  __syncthreads();
  return __reduce_add_sync(0xffffffffu, lane * 32 < static_cast<int>(blockDim.x) ? per_warp[lane] : 0);
}

// What turns values into codes.
struct Step {
  float scale, recip;
  int32_t zero_point;
};

__device__ __forceinline__ Step step_of(const Range& range, bool symmetric, int32_t qmin, int32_t qmax) {
  Step s;
  if (symmetric) {
    s.scale = scale_from_amax(float_from_bits(range.above), qmax);
    s.recip = scale_recip(s.scale);
    s.zero_point = 0;
    return s;
  }
  const float low = -float_from_bits(range.below), high = float_from_bits(range.above);
  s.scale = scale_from_range(low, high, qmin, qmax);
  s.recip = scale_recip(s.scale);
  s.zero_point = zero_point_from_range(low, s.recip, qmin, qmax);
  return s;
}

__device__ __forceinline__ Step step_at(const float* scale, const int32_t* zero_point, int64_t index) {
  return {scale[index], scale_recip(scale[index]), zero_point ? zero_point[index] : 0};
}

}  // namespace pyquant::cuda
