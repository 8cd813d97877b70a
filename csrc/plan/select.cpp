#include "plan/select.h"

#include <cstring>

#include "plan/cost.h"

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

Selection select(const GemmProblem& problem, bool has_residual, const DeviceInfo& device, bool only_compiled) {
  Selection selection;
  for (const Row& row : kRows) {
    if (!row.selectable || (only_compiled && !row.compiled)) continue;
    const Refusal refusal = accept(row, problem, has_residual, device);
    if (!refusal.ok()) {
      selection.refusals.push_back({&row, refusal});
      continue;
    }
    const double cost = cost_us(row, problem, device);
    if (selection.row == nullptr || cost < selection.cost_us) {
      selection.row = &row;
      selection.cost_us = cost;
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
