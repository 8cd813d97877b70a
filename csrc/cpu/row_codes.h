// One dynamic range: statistics -> scale and zero point -> codes.
#pragma once
#include <algorithm>
#include <cstring>

#include "core/epilogue_math.h"
#include "cpu/kernels.h"

namespace pyquant::cpu {

struct RowParams {
  float scale;
  int32_t zero_point;
};

PYQ_HD inline RowParams params_of(const RowStats& s, bool symmetric, int32_t qmin, int32_t qmax) {
  if (symmetric) return {scale_from_amax(s.amax, qmax), 0};
  const float scale = scale_from_range(s.low, s.high, qmin, qmax);
  return {scale, zero_point_from_range(s.low, scale_recip(scale), qmin, qmax)};
}

// Of two parts of one range; what is poisoned stays so.
inline RowStats merged(const RowStats& a, const RowStats& b) {
  if (!(a.amax < kInfinity)) return a;
  if (!(b.amax < kInfinity)) return b;
  return {std::max(a.amax, b.amax), std::min(a.low, b.low), std::max(a.high, b.high)};
}

// n neighbouring elements that share one scale.
inline RowParams quantize_row(const Kernels& in_use, const void* x, DType type, int64_t n, bool symmetric, int32_t qmin,
                              int32_t qmax, int8_t* q) {
  const RowParams p = params_of(in_use.stats(x, type, n, !symmetric), symmetric, qmin, qmax);
  if (p.scale == p.scale)
    in_use.quantize({x, type, n, scale_recip(p.scale), p.zero_point, qmin, qmax, true, 0, q});
  else
    std::memset(q, p.zero_point, static_cast<size_t>(n));
  return p;
}

}  // namespace pyquant::cpu
