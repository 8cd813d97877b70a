// How many blocks share one output tile when K is divided (schedule splitk): the launch and the cost model ask here, so
// that what is predicted is what runs.
#pragma once
#include <algorithm>
#include <cstdint>

namespace pyquant {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The number of shares, 1 to 16, whose busiest multiprocessor has the fewest steps of tile_k codes. Filling and
// draining a block's pipeline counts as two steps, clearing and adding up sums as eight. Every share has at least one
// step.
constexpr int64_t k_splits(int64_t m, int64_t n, int64_t k, int64_t tile_m, int64_t tile_n, int64_t tile_k,
                           int64_t sm_count) {
  const int64_t tiles = std::max<int64_t>(ceil_div(m, tile_m) * ceil_div(n, tile_n), 1);
  const int64_t steps = ceil_div(k, tile_k);
  int64_t best = 1, fewest = 0;
  for (int64_t splits = 1; splits <= 16 && splits <= std::max<int64_t>(steps, 1); ++splits) {
    const int64_t share = ceil_div(steps, splits);
    if (splits > 1 && ceil_div(steps, share) != splits) continue;  // a share would be empty
    const int64_t busiest =
        ceil_div(tiles * splits, std::max<int64_t>(sm_count, 1)) * (share + 2) + (splits > 1 ? 8 : 0);
    if (splits > 1 && busiest >= fewest) continue;
    best = splits;
    fewest = busiest;
  }
  return best;
}

}  // namespace pyquant
