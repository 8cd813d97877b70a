// Measured choices, which come before the cost model: for a GPU, types, N, K and a bucket of M, the row that was the
// quickest. Read from files by pyquant/ops/tuned.py, handed over as text.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/problem.h"
#include "plan/row.h"

namespace pyquant {

// The bucket of M that shares one measurement, named by its largest M: 1, 2, 4, 8, 16, 32, then 48, 64, 96, 128, ...
int64_t m_bucket(int64_t m);

struct Tuned {
  const Row* row = nullptr;  // null: torch's own product was the quickest (float types)
  double us = 0;
};

// Replaces the table. text: a line for each choice, fields separated by tabs:
//   GPU name, x, w, out, x packed (0, 1), weight layout, group size, N, K, M, name of the row or "torch", microseconds,
//   and, or it holds with and without them: zero points of activations (0, 1), residual (0, 1).
// -> a line for every choice that is ignored, with the reason (an unknown row). std::invalid_argument: no such line.
// Selections that start later see the new table; replaced tables stay in memory, because others may be reading them.
std::vector<std::string> set_tuned(const std::string& text);

// The measured choice for a problem, null when there is none; of a problem with a residual that was measured only
// without, that one. Takes no lock.
const Tuned* find_tuned(const GemmProblem& problem, bool has_residual, const DeviceInfo& device);

// Incremented whenever the table is replaced, so that caches of choices can see that they are stale.
uint64_t tuned_generation();

// Remembers, once, why a measured choice was not followed; doctor() shows the list.
void remark_tuned(const std::string& text);
std::vector<std::string> tuned_remarks();

}  // namespace pyquant
