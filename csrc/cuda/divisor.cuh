// Quotients without a division, which of 64-bit numbers is a hundred instructions on the device.
#pragma once
#include <cstdint>

namespace pyquant::cuda {

// By a multiplication and a shift (Hacker's Delight, 10-9), of numbers that are not negative.
struct Divisor {
  int64_t by;
  uint64_t factor;
  uint32_t shift = 0;
  explicit Divisor(int64_t divisor) : by(divisor) {
    while (shift < 63 && uint64_t{1} << shift < static_cast<uint64_t>(by)) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - static_cast<uint64_t>(by);
    // excess * 2^64 / by in two halves of 32 bits: excess < by < 2^63, so that each half is below 2^32.
    const auto half = [this](uint64_t& rest) {
      uint64_t digits = 0;
      for (int bit = 0; bit < 32; ++bit) {
        rest <<= 1;
        digits <<= 1;
        if (rest >= static_cast<uint64_t>(by)) {
          rest -= static_cast<uint64_t>(by);
          digits |= 1;
        }
      }
      return digits;
    };
    uint64_t rest = excess;
    const uint64_t high = half(rest);
    factor = (high << 32 | half(rest)) + 1;
  }
  __device__ __forceinline__ int64_t quotient(int64_t n) const {
    const auto number = static_cast<uint64_t>(n);
    return static_cast<int64_t>((__umul64hi(number, factor) + number) >> shift);
  }
};

}  // namespace pyquant::cuda
