// How many blocks share one output tile when K is divided (schedule splitk): the launch and the cost model ask here, so
// that what is predicted is what runs.
#pragma once
#include <algorithm>
#include <cstdint>

namespace pyquant {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What divided sums cost, in what the tensor cores of one multiprocessor do meanwhile (A40 to B200). For every block:
// codes of K, while L2 clears, adds and reads 12 bytes for each of its outputs; that is 420 to 920, whatever the tile.
// Once: products, while the last block is determined; 1 to 3 million. What writes the codes of x clears the sums.
constexpr int64_t kSumsCodes = 640, kSumsProducts = int64_t{1} << 21;

// The number of shares, 1 to 16, whose busiest multiprocessor has the fewest steps of tile_k codes. Filling and
// draining a block's pipeline counts as two steps. Steps of the smallest tiles wait for their loads, so that no more
// than four of them pass meanwhile. Every share has at least one step.
constexpr int64_t k_splits(int64_t m, int64_t n, int64_t k, int64_t tile_m, int64_t tile_n, int64_t tile_k,
                           int64_t sm_count) {
  const int64_t tiles = std::max<int64_t>(ceil_div(m, tile_m) * ceil_div(n, tile_n), 1);
  const int64_t steps = ceil_div(k, tile_k);
  const int64_t sums = ceil_div(kSumsCodes, tile_k);
  const int64_t once = std::min<int64_t>(ceil_div(kSumsProducts, tile_m * tile_n * tile_k), 4);
  int64_t best = 1, fewest = 0;
  for (int64_t splits = 1; splits <= 16 && splits <= std::max<int64_t>(steps, 1); ++splits) {
    const int64_t share = ceil_div(steps, splits);
    if (splits > 1 && ceil_div(steps, share) != splits) continue;  // a share would be empty
    const int64_t block = share + 2 + (splits > 1 ? sums : 0);
    const int64_t busiest = ceil_div(tiles * splits, std::max<int64_t>(sm_count, 1)) * block + (splits > 1 ? once : 0);
    if (splits > 1 && busiest >= fewest) continue;
    best = splits;
    fewest = busiest;
  }
  return best;
}

}  // namespace pyquant
