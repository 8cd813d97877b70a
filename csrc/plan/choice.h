// The chosen row of a problem, or the framework in its place, cached per thread; read by every launch. No lock, no
// allocation after the first call.
#pragma once
#include "core/device.h"
#include "core/problem.h"
#include "plan/row.h"

namespace pyquant {

// select(problem, has_residual, device).row among the compiled rows; null: nothing takes it, ask select() why.
// Choices are forgotten when measured tables change.
const Row* choose(const GemmProblem& problem, bool has_residual, const DeviceInfo& device);

// Whether the framework's product of dequantised weights, the pass that dequantises them counted, is predicted to take
// less time than `row` takes for these integer weights under 16-bit activations. Remembered likewise.
bool framework_is_quicker(const Row& row, const GemmProblem& problem, const DeviceInfo& device);

}  // namespace pyquant
