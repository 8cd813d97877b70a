// The operands of a gate: what a gated feed-forward layer has between its first two products and its last one.
#pragma once
#include "core/activation_math.h"

namespace pyquant {

// What multiplies activation(x) in front of a quantiser (docs/numerics.md 9), element by element.
struct GateOperands {
  const void* up = nullptr;  // of x's type and shape, row stride ldu
  int64_t ldu = 0;
  Activation activation = Activation::silu;
  float clamp_min = 0.f, clamp_max = 0.f;  // used by Activation::clamp
};

}  // namespace pyquant
