// Divisor (csrc/cuda/divisor.cuh) against the machine's own division: numbers below 2^63 around multiples of the
// divisor, around powers of two, and at random. Prints how many it has compared; fails on the first difference.
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <random>

#define __device__
#define __forceinline__ inline
static uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
#include "cuda/divisor.cuh"

static long compared = 0;

static bool is_right(const pyquant::cuda::Divisor& by, uint64_t number) {
  const auto n = static_cast<int64_t>(number & INT64_MAX);
  ++compared;
  if (by.quotient(n) == n / by.by) return true;
  std::printf("%lld / %lld: %lld, not %lld\n", static_cast<long long>(n), static_cast<long long>(by.by),
              static_cast<long long>(by.quotient(n)), static_cast<long long>(n / by.by));
  return false;
}

static bool all_right(int64_t divisor, std::mt19937_64& random) {
  const pyquant::cuda::Divisor by(divisor);
  for (int power = 0; power < 64; ++power)
    for (uint64_t near : {0, 1, 2})
      if (!is_right(by, (uint64_t{1} << power) - near) || !is_right(by, (uint64_t{1} << power) + near)) return false;
  for (int i = 0; i < 200; ++i) {
    const uint64_t number = random() >> 1 >> random() % 63;
    const uint64_t multiple = number / static_cast<uint64_t>(divisor) * static_cast<uint64_t>(divisor);
    for (uint64_t near : {multiple, multiple - 1, multiple + 1, number})
      if (!is_right(by, near)) return false;
  }
  return true;
}

int main() {
  std::mt19937_64 random(1);
  for (int64_t divisor = 1; divisor <= 5000; ++divisor)
    if (!all_right(divisor, random)) return 1;
  for (int power = 0; power < 63; ++power)
    for (int64_t near : {-1, 0, 1}) {
      const int64_t divisor = (int64_t{1} << power) + near;
      if (divisor > 0 && !all_right(divisor, random)) return 1;
    }
  for (int i = 0; i < 3000; ++i)
    if (!all_right(static_cast<int64_t>(random() >> 1 >> random() % 62) | 1, random)) return 1;
  if (!all_right(INT64_MAX, random)) return 1;
  std::printf("compared=%ld\n", compared);
}
