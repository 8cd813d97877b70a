#include "plan/cost.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "plan/chip.h"
#include "plan/cost_parts.h"
#include "plan/expert_tiles.h"
#include "plan/split_k.h"

namespace pyquant {

namespace {

constexpr double kSharedBytes = 128;  // of shared memory a clock and multiprocessor
// Instructions of the epilogue for one output, 128 lanes: those of wgmma kernels counted in machine code, straight
// tiles and swapped ones with sums of integers (docs/kernels.md, 'The epilogue'; tests/gpu/test_machine_code.py).
constexpr double kEpilogueSteps = 12, kStraightSteps = 8.8, kSwappedSteps = 11.3;

// What follows is measured: `python -m bench.rows` on an H200 (docs/kernels.md, 'What is measured').
// Of the peak by a main loop whose pipeline is full: mma.sync; wgmma, at whose full rate power leaves less than the
// highest clock (0.71 where 0.7 ms of int8 are multiplied, 0.87 where 15 us are).
constexpr double kReached = 0.88, kWgmmaReached = 0.82;
constexpr double kStoredBytes = 24;  // by an epilogue to L2, a clock and multiprocessor, while all of them store
// A step of eight sums a thread in the general epilogue of wgmma kernels, where the ends of N may go (store90.cuh): 544
// us for 802816 x 16 x 16 in tiles of 128 x 128, pingpong.
constexpr double kGeneralStepClocks = 2600;
// int4 weights of wgmma: a step of 128 codes is loaded, widened into registers and waited for one after another, in 440
// to 570 clocks at 16 to 64 tokens, under which no multiplication falls.
constexpr double kWidenedStepClocks = 440;
// Group scales of wgmma kernels: for every group of K what the next product does not hide of its scaled sums (an addend
// of 230 to 400 clocks for 128 codes, the most for 32 tokens).
constexpr double kGroupWaitClocks = 280;
// The same of mma.sync, whose warps scale between their products, on a chip that has wgmma (others: not measured).
constexpr double kMmaGroupWaitClocks = 900;
// Integer weights under floats by wgmma: a step of 128 codes (int4, int8), and for each token of the tile. The tensor
// cores take 8 of the latter; the former is what weights wait for, one after another, between loads and products.
constexpr double kInt4StepClocks = 1130, kInt8StepClocks = 1290, kStepTokenClocks = 7.6;
// The same where the warps that multiply widen int4 weights in their registers, steps of 256 codes. Integer
// instructions for a weight, counted in machine code (tests/gpu/test_step_budgets.py), and what the end of a product of
// 128 codes adds: measured, tiles of 16 to 128 tokens take 7.6 to 13.3 clocks a code.
constexpr double kRegisterSteps = 1.8, kProductWaitClocks = 480;
// And where weights are rounded before they are multiplied: instructions of any kind for a weight, of which a
// multiprocessor starts 128 lanes' a clock, with a scale a channel and in groups (counted; no GPU has timed them). Of
// the peak, what operands from registers reach in tiles of 256 tokens: int8 under blocked int4 weights, 57 and 191 us
// for 256 and 1024 x 4096 x 28672.
constexpr double kChannelSteps = 5.2, kGroupSteps = 6.6, kStartedLanes = 128, kFragmentsReached = 0.72;
// Sums of stream-K: once, for every further block of a tile, and of a tile's float32 bytes a clock. Products of 1 to
// 256 tokens whose tiles two to four blocks share take 4 to 7 us more than their steps.
constexpr double kStreamMeetUs = 1.3, kStreamLinkUs = 0.8, kFixupBytes = 10;
// Integer weights under floats by mma.sync: how much longer a step takes with one warp a scheduler than with more.
constexpr double kLoneWarps = 1.3;

enum class Split { none, blocks, stream };  // how K is divided: not at all, among grid.z blocks, by CUTLASS's stream-K

// A row's words, read once.
struct Plan {
  bool swapped = false, pingpong = false, persistent = false;
  double threads = 256;  // of wgmma kernels: that share the outputs of a tile
  Split split = Split::none;

  explicit Plan(const Row& row) {
    const auto has = [&](const char* word) { return std::strstr(row.schedule, word) != nullptr; };
    swapped = has("swapped");
    pingpong = has("pingpong");
    persistent = row.facts().engine == Engine::wgmma;
    if (pingpong || has("plain")) threads = 128;
    split = has("streamk") ? Split::stream : (has("splitk") ? Split::blocks : Split::none);
  }
};

// Integer weights under floats, whose kernels by mma.sync widen them in the warps that multiply.
bool is_weight_only(const GemmProblem& p) { return is_float(p.x) && !is_float(p.w); }

// Instructions for a weight there, those that fetch its fragments and reorder the activations for it included. Measured
// with bf16 (what tiles of 64, 96 and 128 tokens take beyond their multiplications); f16 takes int8 without float32.
double weight_only_steps(const GemmProblem& p) { return is_packed(p.w) ? 2.65 : p.x == DType::bf16 ? 3.1 : 2.0; }

// Clocks of one multiprocessor for one code of K of one tile; `held` blocks work there at a time.
double clocks_per_code(const Row& row, const Plan& plan, const GemmProblem& p, const Chip& chip, double held) {
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
  const bool is_wgmma = engine == Engine::wgmma;
  const double clocks = std::max(multiply, shared / kSharedBytes) / (is_wgmma ? kWgmmaReached : kReached);
  if (row.facts().rounds_weights)
    return overlapped(clocks * kWgmmaReached / kFragmentsReached,
                      (p.group_size > 0 ? kGroupSteps : kChannelSteps) * n / kStartedLanes);
  if (is_wgmma && is_weight_only(p) && row.tile_k == 256) {
    const double product = p.group_size > 0 ? std::min<double>(static_cast<double>(p.group_size), 128) : 128;  // codes
    return overlapped(clocks, kRegisterSteps * n / kLanes) + kProductWaitClocks / product;
  }
  if (is_wgmma && is_weight_only(p)) {
    const double groups =
        p.group_size > 0 ? std::max(1.0, static_cast<double>(row.tile_k) / static_cast<double>(p.group_size)) : 1;
    return ((is_packed(p.w) ? kInt4StepClocks : kInt8StepClocks) + kStepTokenClocks * m +
            (groups - 1) * (kGroupWaitClocks + m)) /
           row.tile_k;
  }
  const double groups = p.group_size > 0 ? 1 / static_cast<double>(p.group_size) : 0;  // of a code
  const double scaling = m * n / (kLanes / 2) * groups;
  if (is_weight_only(p)) {
    // Two warps hold other rows of the tile (of 16 rows: one), and what each widens its own multiplications wait for.
    const double rows = m > 16 ? 2 : 1, warps = rows * n / 32, alone = warps * held < 8 ? kLoneWarps : 1;
    return (clocks + scaling + weight_only_steps(p) * n * rows / kLanes) * alone;
  }
  // Done by every warp that holds other rows of the tile, concurrently with the tensor cores.
  const double widen = widening(p) * n * (is_wgmma ? 1 : std::max(1.0, m / 64)) / kLanes;
  const double step = is_wgmma && is_packed(p.w) && p.group_size == 0 ? kWidenedStepClocks / 128 : 0;
  // Other blocks of a multiprocessor work meanwhile.
  const double wait = is_wgmma ? kGroupWaitClocks : chip.wgmma_macs > 0 ? kMmaGroupWaitClocks / held : 0;
  return overlapped(clocks, std::max(widen, step)) + scaling + wait * groups;
}

// Microseconds to store one tile: its arithmetic, then its bytes.
double epilogue_us(const Row& row, const Plan& plan, const GemmProblem& p, const Chip& chip) {
  const double outputs = double{1} * row.tile_m * row.tile_n;
  const bool is_counted = row.facts().engine == Engine::wgmma;
  const double steps = is_counted ? (plan.swapped ? kSwappedSteps : kStraightSteps) : kEpilogueSteps;
  const double stored = is_counted ? kStoredBytes * chip.clocks_per_us : chip.port_bytes_per_us;
  return outputs * steps / 128 / chip.clocks_per_us + bytes_of(outputs, p.out) / stored;
}

// Microseconds that the tiles over the last column of N add where wgmma kernels have no straight-line epilogue for
// them; main_us: of a tile's main loop, under which pingpong hides as much of another tile's epilogue.
double general_us(const Row& row, const Plan& plan, const GemmProblem& p, double stored, double main_us,
                  const Chip& chip) {
  if (row.facts().engine != Engine::wgmma) return 0;
  const double sums = double{1} * row.tile_m * row.tile_n / plan.threads;  // of a thread
  const bool is_general = plan.swapped ? p.n % 16 != 0 : p.n % row.tile_n != 0 && (p.n % 16 != 0 || sums > 64);
  if (!is_general) return 0;
  const double tiles = plan.swapped ? stored : stored / static_cast<double>(ceil_div(p.n, row.tile_n));
  const double one = sums / 8 * kGeneralStepClocks / chip.clocks_per_us;
  return tiles * (plan.pingpong ? std::max(0.0, one - main_us) / 2 : one);
}

// Stream-K's blocks add to a tile one after another, each to what the one before it left in L2: a chain of as many
// links as blocks share a tile, whose first and last wait for the slowest block, store and fetch a tile.
double stream_sums_us(const Row& row, const GemmProblem& p, double sharers, const Chip& chip) {
  const double tile = 4.0 * row.tile_m * row.tile_n;
  const double links = std::clamp(sharers - 1, 0.0, 7.0);  // more were not measured
  return (is_float(p.x) ? kClearUs : 0) + kStreamMeetUs + links * kStreamLinkUs +
         tile / (kFixupBytes * chip.clocks_per_us);
}

// Tiles over multiprocessors, steps of K over the blocks that share a tile.
struct Waves {
  double blocks = 1;   // that run
  double waves = 1;    // tiles that the busiest multiprocessor works through, one after another
  double steps = 1;    // of K in each of them
  double sums_us = 0;  // of adding the partial sums of a divided K
  double stored = 0;   // tiles that the busiest multiprocessor stores
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
    const int64_t splits =
        k_splits(p.m, p.n, p.k, int64_t{row.tile_m} * row.cluster_m, int64_t{row.tile_n} * row.cluster_n, row.tile_k,
                 device.sm_count / (row.cluster_m * row.cluster_n));
    const double blocks = tiles * static_cast<double>(splits);
    const double share = std::ceil(steps / static_cast<double>(splits));
    const double waves = std::ceil(blocks / sms);
    return {blocks, waves, share, splits > 1 ? meeting_us(p, chip) + blocks * sums_us : 0, waves};
  }
  if (split == Split::stream) {
    // CUTLASS's rule: whole tiles where they fill their waves, or half of the last one at least; else the last full
    // wave and what is beyond it are shared out evenly, eight steps or more to a block.
    const double full = std::floor(tiles / sms), tail = tiles - full * sms;
    if (tail > 0 && steps > 8 && 2 * tail < sms) {
      const double whole = std::max(0.0, full - 1), shared = tiles - whole * sms;
      const double share = std::max(8.0, std::ceil(shared * steps / sms));
      const double blocks = std::min(sms, std::ceil(shared * steps / share));
      return {blocks, 1, whole * steps + share, stream_sums_us(row, p, blocks / shared, chip),
              whole + std::ceil(shared / sms)};
    }
  }
  return {tiles, std::ceil(tiles / sms), steps, 0, std::ceil(tiles / sms)};
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
  const double rate = std::min(chip.port_bytes_per_us, flying / chip.latency_us);
  return w.steps * step * std::max(w.waves / rate, w.blocks / chip.l2_bytes_per_us);
}

}  // namespace

double CostTerms::total() const { return launch + latency + stores + sums + overlapped(arithmetic, loads, memory); }

CostTerms cost_terms(const Row& row, const GemmProblem& p, const DeviceInfo& device) {
  const Chip chip = chip_of(device);
  if (row.facts().engine == Engine::decode) return decode_terms(row, p, device);
  const Plan plan(row);
  const Waves w = waves_of(row, plan.split, p, device, chip);
  // A tile's store hides behind the next one's main loop where two tiles are at work at once.
  const double exposed = plan.pingpong ? 1 : (plan.persistent ? w.stored : 1 + 0.5 * (w.stored - 1));
  const double started = plan.persistent ? 1 : 1 + 0.3 * (w.waves - 1);  // every further wave fills the pipeline again
  const double stage = row.tile_k * (bytes_of(row.tile_m, p.x, p.x_packed) + bytes_of(row.tile_n, p.w));
  const double held = std::min(w.waves, row.stages > 0 ? blocks_held(stage * row.stages, device) : 1.0);
  CostTerms t;
  t.launch = kLaunchUs;
  t.latency = started * chip.latency_us;
  t.stores = exposed * epilogue_us(row, plan, p, chip);
  t.sums = w.sums_us;
  const double step_us = row.tile_k * clocks_per_code(row, plan, p, chip, held) / chip.clocks_per_us;
  t.arithmetic = w.waves * w.steps * step_us;
  t.stores += general_us(row, plan, p, w.stored, w.steps * step_us, chip);
  t.loads = loads_us(row, p, w, device, chip);
  t.memory = main_memory_us(p, chip);
  return t;
}

double cost_us(const Row& row, const GemmProblem& p, const DeviceInfo& device) {
  return cost_terms(row, p, device).total();
}

}  // namespace pyquant
