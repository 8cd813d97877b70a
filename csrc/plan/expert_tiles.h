// Tiles of a product of many experts, each of which has rows of its own: the launch and the cost model ask here. How
// many rows an expert has is known on the device alone.
#pragma once
#include <algorithm>
#include <cstdint>

#include "plan/split_k.h"

namespace pyquant {

// The most tiles of tile_m rows that any distribution of the rows makes: every expert that has some, and the rows of no
// expert, may leave one tile with a single row. The grid has so many; blocks beyond the tiles there are end at once.
constexpr int64_t expert_tiles_most(int64_t rows, int64_t experts, int64_t tile_m) {
  return (rows + std::min(experts + 1, rows) * (tile_m - 1)) / tile_m;
}

// Experts that have rows, and the tiles of all, where rows are spread evenly: what the cost model expects.
constexpr int64_t experts_at_work(int64_t rows, int64_t experts) {
  return std::max<int64_t>(std::min(rows, experts), 1);
}
constexpr int64_t expert_tiles_even(int64_t rows, int64_t experts, int64_t tile_m) {
  const int64_t at_work = experts_at_work(rows, experts);
  return at_work * std::max<int64_t>(ceil_div(ceil_div(rows, at_work), tile_m), 1);
}

}  // namespace pyquant
