// The epilogue that nearly all layers run, as straight-line code: zero points, scales, a bias, an activation, a
// residual of 16 bits; f16, bf16, f32 or s8 out. The operations of finish_row (epilogue.cuh) in their order, so the
// same bits; what differs is what surrounds them: scales are fetched ahead, values are converted and packed before
// lanes exchange them, and every lane stores 16 bytes of a row at a time (f32: whole sectors, as they lie).
//   plain90_straight.cuh: tokens are the rows of the accumulator.  plain90_swapped.cuh: channels are.  Here: what both
//   do to a thread's values.
//   Zero points come first and on their own, one operation a sum, so that launches without them pay one branch; so do
//   those without an activation and without a residual, which the way of results, gone backwards, brings to the sums.
// EpilogueParams::plain90 says whether a launch may come here.
#pragma once
#include <cute/tensor.hpp>

#include "cuda/gemm/at_step.cuh"
#include "cuda/gemm/guarded.cuh"
#include "cuda/gemm/plain_out.cuh"
#include "cuda/gemm/transpose.cuh"

namespace pyquant::cuda {

// The values of a tile in pairs, all at a time, so that one branch chooses between 16-bit types and the rest of the
// code stands once for both.
struct TileHalves {
  static constexpr int kBytes = 2;
  bool is_f16;
  template <int kCount>
  __device__ __forceinline__ void pairs(const float (&t)[2 * kCount], uint32_t (&pair)[kCount]) const {
    if (is_f16) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) pair[i] = pair_of_floats<true>(t[2 * i], t[2 * i + 1]);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) pair[i] = pair_of_floats<false>(t[2 * i], t[2 * i + 1]);
    }
  }
};

struct TileCodes {
  static constexpr int kBytes = 1;
  PlainCodes codes;
  template <int kCount>
  __device__ __forceinline__ void pairs(const float (&t)[2 * kCount], uint32_t (&pair)[kCount]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) pair[i] = codes.pair(t[2 * i], t[2 * i + 1]);
  }
};

struct TileFloats {
  static constexpr int kBytes = 4;
};

class PlainTile90 {
 public:
  // Whether straight tiles have registers for float32 results, and for what it takes to reach over an N that is a
  // multiple of 16: a predicate for every load and store of columns.
  template <class Fragment>
  static constexpr bool kHasRoom = cute::size(Fragment{}) <= 64;

  // Whether the code of activations stands once: swapped tiles with more sums are converted by parts.
  template <class Fragment>
  static constexpr bool kHasCurves = cute::size(Fragment{}) <= 96;

  // Whether there are registers for activations and residuals: beside widened weights and 80 sums ptxas spills.
  template <class Fragment, int kShift>
  static constexpr bool kTakesMore = kShift == 0 || cute::size(Fragment{}) < 80 || cute::size(Fragment{}) > 96;

 protected:
  __device__ __forceinline__ PlainTile90(const EpilogueParams& p, const CodeLimits& limits)
      : p_(p),
        limits_(limits),
        quad_(static_cast<int32_t>(threadIdx.x) & 3),
        row_(static_cast<int32_t>(threadIdx.x) / 4 % 8) {}

  // In place. The shortest one as straight-line code, as everything here; of the others, whose code would be most of a
  // kernel, one copy, to which a loop brings a few values at a time.
  template <bool kWithCurves = true, int kCount>
  __device__ __forceinline__ void activate_tile(float (&t)[kCount]) const {
    constexpr int kOfStep = 4 << (kCount % 8 == 0), kSteps = kCount / kOfStep;
    static_assert(kCount % kOfStep == 0 && kSteps <= kMostSteps);
    switch (p_.activation) {
      case Activation::none: return;
      case Activation::relu: return activate_as<activations::relu>(t, p_);
      default: break;
    }
    if constexpr (kWithCurves) {  // store90.cuh sends others another way
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        float v[kOfStep];
        at_step(step, [&](auto s) {
          if constexpr (s() < kSteps) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kOfStep; ++i) v[i] = t[kOfStep * s() + i];
          }
        });
        activate_all(v, p_);
        at_step(step, [&](auto s) {
          if constexpr (s() < kSteps) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kOfStep; ++i) t[kOfStep * s() + i] = v[i];
          }
        });
      }
    }
  }

  // t[2 i], t[2 i + 1] += the two half words of pair[i].
  template <int kCount>
  __device__ __forceinline__ void add_pairs(float* t, const uint32_t (&pair)[kCount]) const {
    const auto add = [&](auto is_f16) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const float2 v = floats_of_pair<decltype(is_f16)::value>(pair[i]);
        t[2 * i] = fadd(t[2 * i], v.x);
        t[2 * i + 1] = fadd(t[2 * i + 1], v.y);
      }
    };
    if (p_.residual_type == DType::f16)
      add(std::true_type{});
    else
      add(std::false_type{});
  }

  // The arithmetic of both kinds of results stands once, in front of this.
  template <class Store>
  __device__ __forceinline__ void store_as(const Store& store) const {
    if (p_.plain90 == PlainOut::codes)
      store(TileCodes{PlainCodes(limits_)});
    else if (p_.plain90 == PlainOut::f32)
      store(TileFloats{});
    else
      store(TileHalves{p_.plain90 == PlainOut::f16});
  }

  __device__ __forceinline__ static size_t global(const void* at) { return __cvta_generic_to_global(at); }
  template <class Out>
  __device__ __forceinline__ size_t address(int32_t m, int32_t n) const {
    return global(p_.out) + (static_cast<int64_t>(m) * p_.ldo + n) * Out::kBytes;
  }

  const EpilogueParams& p_;
  const CodeLimits& limits_;
  int32_t quad_, row_;  // lane = 4 * row + quad
};

}  // namespace pyquant::cuda
