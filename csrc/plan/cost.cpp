#include "plan/cost.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/decode_split.h"
#include "plan/accept.h"
#include "plan/chip.h"
#include "plan/expert_tiles.h"
#include "plan/split_k.h"

namespace pyquant {

namespace {

constexpr double kClearUs = 1.0;      // a launch that only clears counters
constexpr double kReached = 0.88;     // of the peak by a main loop whose pipeline is full
constexpr double kSharedBytes = 128;  // of shared memory a clock and multiprocessor
constexpr double kPortBytes = 48;     // from L2 into one multiprocessor a clock
constexpr double kLanes = 64;         // conversions and integer operations a clock and multiprocessor
// Instructions of the epilogue for one output, 128 lanes: those of wgmma kernels counted in machine code, straight
// tiles and swapped ones with sums of integers (docs/kernels.md, 'The epilogue'; tests/gpu/test_machine_code.py).
constexpr double kEpilogueSteps = 12, kStraightSteps = 8.8, kSwappedSteps = 11.3;

enum class Split { none, blocks, stream };  // how K is divided: not at all, among grid.z blocks, by CUTLASS's stream-K

// A row's words, read once.
struct Plan {
  bool swapped = false, pingpong = false, persistent = false;
  Split split = Split::none;

  explicit Plan(const Row& row) {
    const auto has = [&](const char* word) { return std::strstr(row.schedule, word) != nullptr; };
    swapped = has("swapped");
    pingpong = has("pingpong");
    persistent = row.facts().engine == Engine::wgmma;
    split = has("streamk") ? Split::stream : (has("splitk") ? Split::blocks : Split::none);
  }
};

// Blocks that shared memory of one multiprocessor holds at a time, of so many bytes each. Warps never bound them: 48,
// the fewest that a multiprocessor of these generations holds, are those of the most blocks that any row fits.
double blocks_held(double bytes, const DeviceInfo& device) {
  return std::max(1.0, std::floor(static_cast<double>(shared_of(device) + kBlockReserve) / (bytes + kBlockReserve)));
}

// Sum of things that overlap, though not perfectly: the larger, and a part of the other where they are close.
double overlapped(double a, double b, double c = 0) {
  const auto fourth = [](double v) { return v * v * v * v; };
  return std::sqrt(std::sqrt(fourth(a) + fourth(b) + fourth(c)));
}

// Bytes of `count` elements.
double bytes_of(double count, DType type, bool packed = true) { return count * stored_bits(type, packed) / 8.0; }

// Instructions that widen one weight for the tensor cores; 0 when they take it as it is.
double widening(const GemmProblem& p) {
  if (p.w == p.x && (!is_packed(p.w) || p.x_packed)) return 0;
  if (p.step_size > 0) return p.w_layout == WeightLayout::natural ? 1.1 : 0.9;  // seven for eight codes, and the steps
  if (is_packed(p.w)) return p.w_layout == WeightLayout::natural ? 1.6 : 0.5;
  return is_float(p.x) ? 1.0 : 0.0;
}

// int8 multiply-adds of one multiprocessor a clock, for this problem's operands.
double macs_per_clock(Engine engine, const GemmProblem& p, const Chip& chip) {
  if (engine == Engine::byte_wise) return 40;  // dp4a behind byte-wise loads
  const double macs = engine == Engine::wgmma ? chip.wgmma_macs : chip.mma_macs;
  if (is_float(p.x)) return engine == Engine::wgmma ? macs / 2 : chip.mma_float_macs;
  return engine == Engine::mma && p.x == DType::s4 && p.w == DType::s4 && p.x_packed ? macs * chip.int4_rate : macs;
}

// Clocks of one multiprocessor for one code of K of one tile.
double clocks_per_code(const Row& row, const Plan& plan, const GemmProblem& p, const Chip& chip) {
  const Engine engine = row.facts().engine;
  const double m = row.tile_m, n = row.tile_n, multiply = m * n / macs_per_clock(engine, p, chip);
  if (engine == Engine::byte_wise) return multiply;
  const double x_bytes = bytes_of(1, p.x, p.x_packed), w_bytes = bytes_of(1, p.w);
  double shared = 0;
  if (engine == Engine::wgmma) {
    // 64 rows of the left operand at a time, each reading the whole right one.
    const double left = plan.swapped ? n : m, right = plan.swapped ? m : n;
    shared = left * (plan.swapped ? w_bytes : x_bytes) + left / 64 * right * (plan.swapped ? x_bytes : w_bytes);
  } else {
    // Written once, then read by every warp that needs it: by two, or by one where a warp holds all rows of the tile.
    shared = (row.tile_m % 32 == 0 ? 3 : 2) * (m * x_bytes + n * w_bytes);
  }
  double clocks = std::max(multiply, shared / kSharedBytes) / kReached;
  // Done by every warp that holds other rows of the tile, concurrently with the tensor cores, on all engines.
  const double widen = widening(p) * n * (engine == Engine::wgmma ? 1 : std::max(1.0, m / 64)) / kLanes;
  clocks = overlapped(clocks, widen);
  if (p.group_size > 0) clocks += m * n / (kLanes / 2 * static_cast<double>(p.group_size));
  return clocks;
}

// Microseconds to store one tile: its arithmetic, then its bytes.
double epilogue_us(const Row& row, const Plan& plan, const GemmProblem& p, const Chip& chip) {
  const double outputs = double{1} * row.tile_m * row.tile_n;
  const bool is_counted = row.facts().engine == Engine::wgmma;
  const double steps = is_counted ? (plan.swapped ? kSwappedSteps : kStraightSteps) : kEpilogueSteps;
  return (outputs * steps / 128 + bytes_of(outputs, p.out) / kPortBytes) / chip.clocks_per_us;
}

// Rows of weights that a launch reads: those of every expert that has tokens.
double channels_read(const GemmProblem& p) {
  const int64_t matrices = p.experts > 0 ? experts_at_work(p.m, p.experts) : 1;
  return static_cast<double>(p.n) * static_cast<double>(matrices);
}

double main_memory_us(const GemmProblem& p, const Chip& chip) {
  const double m = static_cast<double>(p.m), n = channels_read(p), k = static_cast<double>(p.k);
  const double scales = p.group_size > 0  ? 4 * n * k / static_cast<double>(p.group_size)
                        : p.step_size > 0 ? n * k / static_cast<double>(p.step_size)
                                          : 0;
  return (bytes_of(m * k, p.x, p.x_packed) + bytes_of(n * k, p.w) + bytes_of(m * static_cast<double>(p.n), p.out) +
          scales) /
         chip.dram_bytes_per_us;
}

// Until the last of the blocks that share a tile is determined. What writes the codes of x clears their counters too;
// of float activations nothing is written, so that a launch of its own does.
double meeting_us(const GemmProblem& p, const Chip& chip) { return (is_float(p.x) ? kClearUs : 0) + chip.latency_us; }

// Decode rows stream weights through all multiprocessors: bandwidth, unless too few blocks or their arithmetic are
// slower.
CostTerms decode_terms(const Row& row, const GemmProblem& p, const DeviceInfo& device, const Chip& chip) {
  const bool has_clusters = row.facts().sm_min >= 90;  // which add their sums without a way through memory
  const bool is_ordered = p.group_size > 0 && !is_float(p.x);
  const int64_t tiles = std::max<int64_t>(ceil_div(p.m, row.tile_m) * ceil_div(p.n, row.tile_n), 1);
  const int32_t sums_units = decode_sums_units(is_float(p.x), is_packed(p.w));
  const int64_t split = is_ordered ? 1
                                   : decode_split(tiles, ceil_div(p.k, row.tile_k), row.tile_n, device.sm_count,
                                                  has_clusters, sums_units);
  const double sms = std::max(device.sm_count, 1), blocks = static_cast<double>(tiles * split);
  // The busiest multiprocessor has `rounds` blocks, as many at a time as shared memory and registers hold.
  const double rounds = std::ceil(blocks / sms), active = blocks / rounds;
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
  // The eight warps of one block reach two thirds of the lanes' rate, those of two blocks more.
  const double lanes = 1 + 0.5 / held;
  const double arithmetic =
      (overlapped(multiply * (1 + 1 / busy), widen * lanes) + close * lanes) / active / chip.clocks_per_us;

  // Every block of channels asks L2 for its tokens again: on the same way as the weights.
  const double again = bytes_of(static_cast<double>(p.m) * static_cast<double>(p.k), p.x, p.x_packed) *
                       static_cast<double>(ceil_div(p.n, row.tile_n));
  const double fetched = bytes_of(read, p.w) + again, port = kPortBytes * chip.clocks_per_us;
  const double flying = held * kDecodeWarps * row.stages * row.tile_k * bytes_of(kDecodeWarpChannels, p.w);
  const double streamed = std::max({bytes_of(read, p.w) / active / (flying / chip.latency_us), fetched / active / port,
                                    fetched / chip.l2_bytes_per_us});
  CostTerms t;
  if (split > 1 && !has_clusters)
    t.sums = meeting_us(p, chip) + 8.0 * blocks * row.tile_m * row.tile_n / chip.l2_bytes_per_us;
  t.launch = kLaunchUs;
  t.latency = 2 * chip.latency_us;
  t.arithmetic = arithmetic;
  t.loads = streamed;
  t.memory = main_memory_us(p, chip);
  return t;
}

// Tiles over multiprocessors, steps of K over the blocks that share a tile.
struct Waves {
  double blocks = 1;   // that run
  double waves = 1;    // tiles that the busiest multiprocessor works through, one after another
  double steps = 1;    // of K in each of them
  double sums_us = 0;  // of adding the partial sums of a divided K
};

Waves waves_of(const Row& row, Split split, const GemmProblem& p, const DeviceInfo& device, const Chip& chip) {
  const double sms = std::max(device.sm_count, 1);
  const double tiles_m =
      static_cast<double>(p.experts > 0 ? expert_tiles_even(p.m, p.experts, row.tile_m)
                                        : ceil_div(p.m, int64_t{row.tile_m} * row.cluster_m) * row.cluster_m);
  const double tiles_n = static_cast<double>(ceil_div(p.n, int64_t{row.tile_n} * row.cluster_n) * row.cluster_n);
  const double tiles = std::max(1.0, tiles_m * tiles_n), steps = static_cast<double>(ceil_div(p.k, row.tile_k));
  const double sums_us =
      3 * 4.0 * row.tile_m * row.tile_n / chip.l2_bytes_per_us;  // added, read, or cleared: a block's
  if (split == Split::blocks) {
    const int64_t splits = k_splits(p.m, p.n, p.k, row.tile_m, row.tile_n, row.tile_k, device.sm_count);
    const double blocks = tiles * static_cast<double>(splits);
    const double share = std::ceil(steps / static_cast<double>(splits));
    return {blocks, std::ceil(blocks / sms), share, splits > 1 ? meeting_us(p, chip) + blocks * sums_us : 0};
  }
  if (split == Split::stream) {
    // CUTLASS's rule: whole tiles where they fill their waves, or half of the last one at least; else the last full
    // wave and what is beyond it are shared out evenly, eight steps or more to a block.
    const double full = std::floor(tiles / sms), tail = tiles - full * sms;
    if (tail > 0 && steps > 8 && 2 * tail < sms) {
      const double whole = std::max(0.0, full - 1), shared = tiles - whole * sms;
      const double share = std::max(8.0, std::ceil(shared * steps / sms));
      const double blocks = std::min(sms, std::ceil(shared * steps / share));
      return {blocks, 1, whole * steps + share, meeting_us(p, chip) + std::min(blocks, shared) * sums_us};
    }
  }
  return {tiles, std::ceil(tiles / sms), steps, 0};
}

// Microseconds of fetching tiles: by the busiest multiprocessor, as fast as its port and its loads in flight allow, and
// by all of them from L2.
double loads_us(const Row& row, const GemmProblem& p, const Waves& w, const DeviceInfo& device, const Chip& chip) {
  const double x_bytes = row.tile_k * bytes_of(row.tile_m, p.x, p.x_packed);
  const double w_bytes = row.tile_k * bytes_of(row.tile_n, p.w), stage = x_bytes + w_bytes;
  const double waiting = std::ceil(w.blocks / std::max(device.sm_count, 1));  // blocks that a multiprocessor could hold
  double flying = 0.75 * static_cast<double>(shared_of(device));
  if (row.stages > 0) {
    const double fit = blocks_held(stage * row.stages, device);
    flying = stage * std::max(1.0, row.stages - 1.0) * std::min(fit, waiting);
  }
  // Blocks of a cluster share what they load.
  const double step = x_bytes / row.cluster_n + w_bytes / row.cluster_m;
  const double rate = std::min(kPortBytes * chip.clocks_per_us, flying / chip.latency_us);
  return w.steps * step * std::max(w.waves / rate, w.blocks / chip.l2_bytes_per_us);
}

}  // namespace

double CostTerms::total() const { return launch + latency + stores + sums + overlapped(arithmetic, loads, memory); }

CostTerms cost_terms(const Row& row, const GemmProblem& p, const DeviceInfo& device) {
  const Chip chip = chip_of(device);
  if (row.facts().engine == Engine::decode) return decode_terms(row, p, device, chip);
  const Plan plan(row);
  const Waves w = waves_of(row, plan.split, p, device, chip);
  // A tile's store hides behind the next one's main loop where two tiles are at work at once.
  const double exposed = plan.pingpong ? 1 : (plan.persistent ? w.waves : 1 + 0.5 * (w.waves - 1));
  const double started = plan.persistent ? 1 : 1 + 0.3 * (w.waves - 1);  // every further wave fills the pipeline again
  CostTerms t;
  t.launch = kLaunchUs;
  t.latency = started * chip.latency_us;
  t.stores = exposed * epilogue_us(row, plan, p, chip);
  t.sums = w.sums_us;
  t.arithmetic = w.waves * w.steps * row.tile_k * clocks_per_code(row, plan, p, chip) / chip.clocks_per_us;
  t.loads = loads_us(row, p, w, device, chip);
  t.memory = main_memory_us(p, chip);
  return t;
}

double cost_us(const Row& row, const GemmProblem& p, const DeviceInfo& device) {
  return cost_terms(row, p, device).total();
}

}  // namespace pyquant
