// Loops that are no loops: what tiles of registers are written with.
#pragma once
#include <type_traits>
#include <utility>

#define PYQ_INLINE __attribute__((always_inline)) inline

namespace pyquant::cpu {
namespace {  // each instruction set compiles its own

// f(0) to f(N - 1), each number a constant: accumulators that a loop would index become registers at once, and not only
// where g++ 12 happens to unroll that loop before it looks at the one around it.
template <class F, int... kNumbers>
PYQ_INLINE void each_of(F f, std::integer_sequence<int, kNumbers...>) {
  (f(std::integral_constant<int, kNumbers>{}), ...);
}
template <int N, class F>
PYQ_INLINE void each(F f) {
  each_of(f, std::make_integer_sequence<int, N>{});
}
#define PYQ_EACH(i) [&](auto i) __attribute__((always_inline))

}  // namespace
}  // namespace pyquant::cpu
