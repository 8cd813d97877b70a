// quotient_of_half against the machine's own division: every half from 2^-29 to 1/2, and each 211th below, where the
// sum is 1/2; with estimates that are wrong in their last places. Prints how many it has compared; fails on the first
// difference.
#include <cstdio>

#include "core/activation_math.h"

int main() {
  using namespace pyquant;
  long compared = 0;
  for (uint32_t exponent = 2; exponent <= 126; ++exponent) {
    for (uint32_t mantissa = 0; mantissa < 1u << 23; mantissa += exponent >= 98 ? 1 : 211) {
      const float half = float_from_bits(exponent << 23 | mantissa);
      if (half > 0.5f) break;
      const float sum = 0.5f + half, want = half / sum, reciprocal = 1.f / sum;
      for (uint32_t off = 0; off <= 4; ++off) {
        const float estimate = float_from_bits(bits_from_float(reciprocal) + off - 2);
        const float got = activation_detail::quotient_of_half(half, sum, estimate);
        ++compared;
        if (bits_from_float(got) == bits_from_float(want)) continue;
        std::printf("%a / %a by %a: %a, not %a\n", half, sum, estimate, got, want);
        return 1;
      }
    }
  }
  std::printf("compared=%ld\n", compared);
}
