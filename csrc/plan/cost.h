// Predicted time of a row for a problem: good enough to rank rows of one device, not a forecast.
#pragma once
#include "core/device.h"
#include "core/problem.h"
#include "plan/row.h"

namespace pyquant {

// Microseconds: launch, plus the larger of memory traffic and the tensor cores' waves.
double cost_us(const Row& row, const GemmProblem& problem, const DeviceInfo& device);

}  // namespace pyquant
