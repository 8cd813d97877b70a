#include <algorithm>
#include <cmath>

#include "core/decode_split.h"
#include "plan/accept.h"
#include "plan/cost_parts.h"
#include "plan/split_k.h"

namespace pyquant {

namespace {

// Measured: `python -m bench.rows` on an H200 (docs/kernels.md, 'What is measured').
// In latencies: until a block that follows others has its pipeline full, has added its sums and stored
// them, 2.6 us where it is alone on its multiprocessor, half of it beside another.
constexpr double kRefill = 3.7;
constexpr double kRoundClocks = 1400;  // the barriers around the scaled sums of a round of groups of integers
constexpr double kCopiedBytes = 27;    // from L2 into a multiprocessor a clock, by loads and copies of 16 bytes
constexpr double kRowsLatency = 1.45;  // as a multiple of memory's, where every 64 bytes come from another row
constexpr double kClusterUs = 0.7;     // of adding a cluster's sums: two barriers, a neighbour's memory between them

}  // namespace

// Decode rows stream weights through all multiprocessors: bandwidth, unless too few blocks or their arithmetic are
// slower.
CostTerms decode_terms(const Row& row, const GemmProblem& p, const DeviceInfo& device) {
  const Chip chip = chip_of(device);
  const bool has_clusters = row.facts().sm_min >= 90;  // which add their sums without a way through memory
  const bool is_ordered = p.group_size > 0 && !is_float(p.x);
  const int64_t tiles = std::max<int64_t>(ceil_div(p.m, row.tile_m) * ceil_div(p.n, row.tile_n), 1);
  const int32_t sums_units = decode_sums_units(is_float(p.x), is_packed(p.w));
  const int64_t split = is_ordered ? 1
                                   : decode_split(tiles, ceil_div(p.k, row.tile_k), row.tile_n, device.sm_count,
                                                  has_clusters, sums_units);
  const double sms = std::max(device.sm_count, 1), blocks = static_cast<double>(tiles * split);
  // The busiest multiprocessor has `rounds` blocks, as many at a time as shared memory and registers hold.
  const double at_once = has_clusters ? cluster_slots(device.sm_count, static_cast<int32_t>(split)) : sms;
  const double rounds = std::ceil(blocks / at_once), active = blocks / rounds;
  const double fit = blocks_held(static_cast<double>(shared_bytes(row)), device);
  const double held = std::min({rounds, fit, row.tile_m > 16 || (is_float(p.x) && p.m > 8) ? 1.0 : 2.0});
  const double weights = static_cast<double>(p.n) * static_cast<double>(p.k);
  const double read = weights * static_cast<double>(ceil_div(p.m, row.tile_m));  // by every tile of tokens

  // A step of a warp waits for its fragments about as long as one column of eight tokens takes to multiply; other
  // columns and blocks work meanwhile.
  const double columns = static_cast<double>(decode_columns(p.m, row.tile_m)), busy = columns * held;
  const double tokens = 8 * columns * static_cast<double>(ceil_div(std::max<int64_t>(p.m, 1), row.tile_m));
  const double multiply = weights * tokens / macs_per_clock(Engine::decode, p, chip);
  const double widen = read * (widening(p) + 0.25) / kLanes;
  // Scaled sums of groups, whole tiles of them, pass through shared memory between two barriers: eight instructions.
  const double sums_tokens = p.m <= 8 ? 8 : static_cast<double>(ceil_div(p.m, row.tile_m) * row.tile_m);
  const double close = is_ordered ? 8 * sums_tokens * weights / static_cast<double>(p.group_size) / kLanes : 0;
  const double unit = static_cast<double>(std::max<int64_t>(p.group_size, row.tile_k)) * decode_depth_warps(row.tile_n);
  const double met = is_ordered ? std::ceil(static_cast<double>(p.k) / unit) * rounds / held * kRoundClocks : 0;
  // The eight warps of one block reach two thirds of the lanes' rate, those of two blocks more.
  const double lanes = 1 + 0.5 / held;
  const double arithmetic =
      ((overlapped(multiply * (1 + 1 / busy), widen * lanes) + close * lanes) / active + met) / chip.clocks_per_us;

  // Every block of channels asks L2 for its tokens again: on the same way as the weights.
  const double again = bytes_of(static_cast<double>(p.m) * static_cast<double>(p.k), p.x, p.x_packed) *
                       static_cast<double>(ceil_div(p.n, row.tile_n));
  const double fetched = bytes_of(read, p.w) + again, port = kCopiedBytes * chip.clocks_per_us;
  const double flying = held * kDecodeWarps * (row.stages - 1) * row.tile_k * bytes_of(kDecodeWarpChannels, p.w);
  const double latency = chip.latency_us * (p.w_layout == WeightLayout::natural ? kRowsLatency : 1);
  const double streamed = std::max(
      {bytes_of(read, p.w) / active / (flying / latency), fetched / active / port, fetched / chip.l2_bytes_per_us});
  CostTerms t;
  if (split > 1 && has_clusters) t.sums = kClusterUs * std::ceil(rounds / held);
  if (split > 1 && !has_clusters)
    t.sums = meeting_us(p, chip) + 8.0 * blocks * row.tile_m * row.tile_n / chip.l2_bytes_per_us;
  t.launch = kLaunchUs;
  t.latency = chip.latency_us * (1 + kRefill / held * (rounds / held - 1));
  t.arithmetic = arithmetic;
  t.loads = streamed;
  t.memory = main_memory_us(p, chip);
  return t;
}

}  // namespace pyquant
