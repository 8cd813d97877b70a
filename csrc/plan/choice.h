// The chosen row of a problem, cached per thread; read by every launch. No lock, no allocation after the first call.
#pragma once
#include "core/device.h"
#include "core/problem.h"
#include "plan/row.h"

namespace pyquant {

// select(problem, has_residual, device).row among the compiled rows; null: nothing takes it, ask select() why.
// Choices are forgotten when measured tables change.
const Row* choose(const GemmProblem& problem, bool has_residual, const DeviceInfo& device);

}  // namespace pyquant
