// The cheapest row that accepts a problem, or every row's refusal.
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
  std::vector<RowRefusal> refusals;  // of the rows looked at that refuse; complete when row is null
};

// only_compiled: rows that have machine code in this build; false asks the whole table (tests, planning elsewhere).
Selection select(const GemmProblem& problem, bool has_residual, const DeviceInfo& device, bool only_compiled = true);

// One line per refusal: "gemm_...: K must be a multiple of 16, got K = 520".
std::string text_of(const Selection& selection);

}  // namespace pyquant
