#include "plan/select.h"

#include <cstring>

#include "plan/cost.h"
#include "plan/tuned.h"

namespace pyquant {

namespace {

constexpr Row kRows[] = {
#define PYQUANT_KERNEL(NAME, FAMILY, TM, TN, TK, CM, CN, STAGES, SCHEDULE, SELECTABLE, COMPILED) \
  {#NAME, Family::FAMILY, TM, TN, TK, CM, CN, STAGES, #SCHEDULE, SELECTABLE != 0, COMPILED != 0},
#include "kernels.inc"
#undef PYQUANT_KERNEL
};

}  // namespace

const Row* rows() { return kRows; }

int row_count() { return static_cast<int>(sizeof(kRows) / sizeof(kRows[0])); }

const Row* find_row(const char* name) {
  for (const Row& row : kRows)
    if (std::strcmp(row.name, name) == 0) return &row;
  return nullptr;
}

namespace {

// Why a measured row cannot be followed here; empty when it can.
std::string obstacle(const Row& row, const GemmProblem& problem, bool has_residual, const DeviceInfo& device,
                     bool only_compiled) {
  if (!row.selectable) return "is a benchmark row, which is never selected";
  if (only_compiled && !row.compiled) return "has no machine code in this build";
  const Refusal refusal = accept(row, problem, has_residual, device);
  return refusal.ok() ? "" : text_of(refusal);
}

}  // namespace

Cheapest cheapest(const GemmProblem& problem, bool has_residual, const DeviceInfo& device, bool only_compiled) {
  Cheapest best;
  for (const Row& row : kRows) {
    if (!row.selectable || (only_compiled && !row.compiled)) continue;
    if (!accept(row, problem, has_residual, device).ok()) continue;
    const double cost = cost_us(row, problem, device);
    if (best.row == nullptr || cost < best.cost_us) best = {&row, cost};
  }
  return best;
}

Selection select(const GemmProblem& problem, bool has_residual, const DeviceInfo& device, bool only_compiled) {
  Selection selection;
  for (const Row& row : kRows) {
    if (!row.selectable || (only_compiled && !row.compiled)) continue;
    const Refusal refusal = accept(row, problem, has_residual, device);
    if (!refusal.ok()) selection.refusals.push_back({&row, refusal});
  }
  const Cheapest best = cheapest(problem, has_residual, device, only_compiled);
  selection.row = best.row;
  selection.cost_us = best.cost_us;
  if (const Tuned* tuned = find_tuned(problem, has_residual, device); tuned != nullptr && tuned->row != nullptr) {
    const std::string why_not = obstacle(*tuned->row, problem, has_residual, device, only_compiled);
    if (why_not.empty()) {
      selection.row = tuned->row;
      selection.cost_us = tuned->us;
      selection.is_measured = true;
    } else {
      remark_tuned(std::string(tuned->row->name) + ", measured as quickest for M " + std::to_string(problem.m) +
                   ", N " + std::to_string(problem.n) + ", K " + std::to_string(problem.k) +
                   ", is not used: " + why_not);
    }
  }
  return selection;
}

std::string text_of(const Selection& selection) {
  std::string text;
  for (const RowRefusal& r : selection.refusals) text += std::string(r.row->name) + ": " + text_of(r.refusal) + "\n";
  return text;
}

}  // namespace pyquant
