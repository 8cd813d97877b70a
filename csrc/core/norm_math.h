// The operations before a quantiser in a transformer, for host and device alike (docs/numerics.md 9): RMSNorm,
// LayerNorm and the gated SiLU. Sums have one order, whatever the block size, vector width or instruction set.
#pragma once
#include <cstdint>

#include "core/activation_math.h"
#include "core/arith.h"

namespace pyquant {

// A row is summed in lanes: element k belongs to lane k % kSumLanes, a lane adds its elements in ascending order to
// +0, and tree_sum adds the lanes. 2048 = 256 threads x 8 elements: a thread owns whole lanes, so it needs no
// other thread's result before the tree. Lanes beyond the row hold +0 and change no bit, so a short row needs only its
// own part.
constexpr int kSumLanes = 2048;

// Neighbours first: ((s0 + s1) + (s2 + s3)) + ...; count is a power of two.
PYQ_HD inline float tree_sum(float* s, int count) {
  for (int width = 1; width < count; width *= 2)
    for (int i = 0; i < count; i += 2 * width) s[i] = fadd(s[i], s[i + width]);
  return s[0];
}

PYQ_HD inline float mean_of(float sum, int64_t count) { return fdiv(sum, static_cast<float>(count)); }

// 1 / sqrt(mean_square + eps). A sum that is not finite in float32 (overflow, NaN, infinity) gives NaN: the row is
// poisoned rather than made plausible by a factor of 0.
PYQ_HD inline float norm_factor(float mean_square, float eps) {
  const float shifted = fadd(mean_square, eps);
  return shifted < kInfinity ? fdiv(1.f, fsqrt(shifted)) : kNaN;
}

}  // namespace pyquant
