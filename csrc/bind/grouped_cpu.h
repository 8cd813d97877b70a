// Calls for several layers on the CPU, where the host can look at whose rows are whose.
#pragma once
#include <string>
#include <vector>

#include "bind/check.h"

namespace pyquant::bind {

// The number of rows of each layer; refuses ends that descend or lie beyond the rows, and rows that x does not have.
inline std::vector<int64_t> counts_of(const GroupedRows& g, size_t layers, int64_t rows_of_x) {
  std::vector<int64_t> counts;
  int64_t begin = 0;
  for (size_t i = 0; i < layers; ++i) {
    if (g.ends[i] < begin || g.ends[i] > g.count)
      refuse("ends", std::to_string(g.ends[i]),
             std::to_string(begin) + " to " + std::to_string(g.count) + " at that place");
    counts.push_back(g.ends[i] - begin);
    begin = g.ends[i];
  }
  for (int64_t i = 0; g.rows && i < g.count; ++i)
    if (g.rows[i] < 0 || g.rows[i] >= rows_of_x)
      refuse("rows", std::to_string(g.rows[i]), "rows of x, below " + std::to_string(rows_of_x));
  return counts;
}

}  // namespace pyquant::bind
