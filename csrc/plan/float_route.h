// Who multiplies where activations are floats: a row of ours, or the framework's own product. Pure, like the rest of
// plan/.
#pragma once
#include "core/problem.h"
#include "plan/row.h"
#include "plan/tuned.h"

namespace pyquant {

// Whether the rows need to be asked at all. A framework's product of float weights is tuned for its device, so that
// only a measurement (`pyquant tune`) puts a row of ours in its place.
inline bool asks_own_rows(const GemmProblem& problem, const DeviceInfo& device) {
  if (!is_float(problem.w)) return true;
  const Tuned* tuned = find_tuned(problem, device);
  return tuned != nullptr && tuned->row != nullptr;
}

// True: run the chosen row. Integer weights a framework cannot read: it needs them dequantised, twice the layer's bytes
// in 16 bits written and read again, which for few rows is most of the time; a decode row reads the codes once.
inline bool prefers_own_row(const GemmProblem& problem, const Row* choice) {
  return choice != nullptr && (is_float(problem.w) || choice->facts().engine == Engine::decode);
}

}  // namespace pyquant
