// A rolled loop over registers: they have numbers that no loop computes, so a jump leads to the copies of the step that
// is due.
#pragma once
#include <type_traits>

namespace pyquant::cuda {

constexpr int kMostSteps = 16;

// use(std::integral_constant<int, step>) for 0 <= step < kMostSteps; steps beyond those that exist must do nothing.
template <class Use>
__device__ __forceinline__ void at_step(int step, const Use& use) {
  switch (step) {
#define PYQUANT_STEP(S) \
  case S: use(std::integral_constant<int, S>{}); break
    PYQUANT_STEP(0);
    PYQUANT_STEP(1);
    PYQUANT_STEP(2);
    PYQUANT_STEP(3);
    PYQUANT_STEP(4);
    PYQUANT_STEP(5);
    PYQUANT_STEP(6);
    PYQUANT_STEP(7);
    PYQUANT_STEP(8);
    PYQUANT_STEP(9);
    PYQUANT_STEP(10);
    PYQUANT_STEP(11);
    PYQUANT_STEP(12);
    PYQUANT_STEP(13);
    PYQUANT_STEP(14);
    PYQUANT_STEP(15);
#undef PYQUANT_STEP
    default: __builtin_unreachable();
  }
}

}  // namespace pyquant::cuda
