// Predicted time of a row for a problem: good enough to rank rows of one device, not a forecast. The formulas are
// explained in docs/kernels.md.
#pragma once
#include "core/device.h"
#include "core/problem.h"
#include "plan/row.h"

namespace pyquant {

constexpr double kLaunchUs = 2.5;  // an empty kernel on an idle stream
constexpr double kPassUs = 3.0;    // of a launch over the activations alone

// Microseconds of one launch whose weights are in device memory, not in a cache, by what they are spent on. Three
// overlap; the others add up.
struct CostTerms {
  double launch = 0, latency = 0, stores = 0, sums = 0;
  double arithmetic = 0, loads = 0, memory = 0;
  double total() const;
};
CostTerms cost_terms(const Row& row, const GemmProblem& problem, const DeviceInfo& device);
double cost_us(const Row& row, const GemmProblem& problem, const DeviceInfo& device);

}  // namespace pyquant
