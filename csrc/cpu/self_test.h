// What the parts of the self-test share (self_test.cpp).
#pragma once
#include <cstdint>

#include "cpu/kernels.h"

namespace pyquant::cpu {

struct Random {
  uint64_t state = 0x9e3779b97f4a7c15u;
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 32);
  }
};

// Products of pairs of bfloat16, where a table has them (self_test_pairs.cpp).
bool multiplies_pairs(const Kernels& candidate, Random& random);

}  // namespace pyquant::cpu
