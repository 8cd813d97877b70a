// Floating bins of magnitudes (docs/numerics.md 14): exponent and first fraction bits of the float32 pattern. The twin
// of pyquant/numerics/histogram.py.
#pragma once
#include "core/arith.h"

namespace pyquant {

constexpr int32_t kHistogramFractionBits = 10;
constexpr int32_t kHistogramOctaves = 20;
constexpr int32_t kHistogramBins = (kHistogramOctaves << kHistogramFractionBits) + 1;
constexpr int32_t kHistogramExponentMin = -100, kHistogramExponentMax = 128;

// Exponent and fraction bits of 2^(exponent - octaves), the smallest number in the window.
PYQ_HD inline int32_t histogram_first_key(int32_t exponent) {
  return (exponent - kHistogramOctaves + 127) << kHistogramFractionBits;
}

// 0 for what is below the window, the last bin also for what is above it, infinities and NaN.
PYQ_HD inline int32_t histogram_bin(uint32_t pattern, int32_t first_key) {
  const int32_t key = static_cast<int32_t>((pattern & 0x7fffffffu) >> (23 - kHistogramFractionBits));
  const int32_t bin = key - (first_key - 1);
  return bin < 0 ? 0 : bin < kHistogramBins ? bin : kHistogramBins - 1;
}

}  // namespace pyquant
