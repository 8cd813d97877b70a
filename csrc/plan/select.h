// The row for a problem: the one measured as quickest (plan/tuned.h), else the cheapest by the cost model among those
// that accept it; or every row's refusal.
#pragma once
#include <string>
#include <vector>

#include "plan/accept.h"

namespace pyquant {

struct RowRefusal {
  const Row* row;
  Refusal refusal;
};

struct Selection {
  const Row* row = nullptr;  // null: nothing accepts the problem
  double cost_us = 0;
  bool is_measured = false;          // row and cost_us come from a measurement, not from the model
  std::vector<RowRefusal> refusals;  // of the rows looked at that refuse; complete when row is null
};

// only_compiled: rows that have machine code in this build; false asks the whole table (tests, planning elsewhere).
Selection select(const GemmProblem& problem, bool has_residual, const DeviceInfo& device, bool only_compiled = true);

// The cheapest row by the cost model alone, null when nothing accepts the problem: select() without reasons.
struct Cheapest {
  const Row* row = nullptr;
  double cost_us = 0;
};
Cheapest cheapest(const GemmProblem& problem, bool has_residual, const DeviceInfo& device, bool only_compiled = true);

// One line per refusal: "gemm_...: K must be a multiple of 16, got K = 520".
std::string text_of(const Selection& selection);

}  // namespace pyquant
