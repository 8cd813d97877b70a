// What the terms of all engines are made of: plan/cost.cpp, plan/decode_cost.cpp.
#pragma once
#include <algorithm>
#include <cmath>

#include "plan/chip.h"
#include "plan/cost.h"
#include "plan/expert_tiles.h"

namespace pyquant {

constexpr double kClearUs = 1.0;  // a launch that only clears counters
constexpr double kLanes = 64;     // conversions and integer operations a clock and multiprocessor

// Blocks that shared memory of one multiprocessor holds at a time, of so many bytes each. Warps never bound them: 48,
// the fewest that a multiprocessor of these generations holds, are those of the most blocks that any row fits.
inline double blocks_held(double bytes, const DeviceInfo& device) {
  return std::max(1.0, std::floor(static_cast<double>(shared_of(device) + kBlockReserve) / (bytes + kBlockReserve)));
}

// Sum of things that overlap, though not perfectly: the larger, and a part of the other where they are close.
inline double overlapped(double a, double b, double c = 0) {
  const auto fourth = [](double v) { return v * v * v * v; };
  return std::sqrt(std::sqrt(fourth(a) + fourth(b) + fourth(c)));
}

// Bytes of `count` elements.
inline double bytes_of(double count, DType type, bool packed = true) { return count * stored_bits(type, packed) / 8.0; }

// Instructions that widen one weight for the tensor cores; 0 when they take it as it is.
inline double widening(const GemmProblem& p) {
  if (p.w == DType::s8 && p.x == DType::bf16) return 3.3;  // by way of float32 (cuda/gemm/decode_math.cuh)
  if (p.w == p.x && (!is_packed(p.w) || p.x_packed)) return 0;
  if (p.step_size > 0) return p.w_layout == WeightLayout::natural ? 1.1 : 0.9;  // seven for eight codes, and the steps
  if (is_packed(p.w)) return p.w_layout == WeightLayout::natural ? (is_float(p.x) ? 1.9 : 1.6) : 0.5;
  return is_float(p.x) ? 1.0 : 0.0;
}

// int8 multiply-adds of one multiprocessor a clock, for this problem's operands.
inline double macs_per_clock(Engine engine, const GemmProblem& p, const Chip& chip) {
  if (engine == Engine::byte_wise) return 40;  // dp4a behind byte-wise loads
  const double macs = engine == Engine::wgmma ? chip.wgmma_macs : chip.mma_macs;
  if (is_float(p.x)) return engine == Engine::wgmma ? macs / 2 : chip.mma_float_macs;
  return engine == Engine::mma && p.x == DType::s4 && p.w == DType::s4 && p.x_packed ? macs * chip.int4_rate : macs;
}

// Rows of weights that a launch reads: those of every expert that has tokens.
inline double channels_read(const GemmProblem& p) {
  const int64_t matrices = p.experts > 0 ? experts_at_work(p.m, p.experts) : 1;
  return static_cast<double>(p.n) * static_cast<double>(matrices);
}

// Codes of x in memory: those of images are read for several rows.
inline double x_codes(const GemmProblem& p) {
  const double m = static_cast<double>(p.m);
  if (p.image.channels == 0) return m * static_cast<double>(p.k);
  return m / static_cast<double>(p.image.out_height * p.image.out_width) * static_cast<double>(p.image.image_step);
}

inline double main_memory_us(const GemmProblem& p, const Chip& chip) {
  const double m = static_cast<double>(p.m), n = channels_read(p), k = static_cast<double>(p.k);
  const double scales = p.group_size > 0  ? 4 * n * k / static_cast<double>(p.group_size)
                        : p.step_size > 0 ? n * k / static_cast<double>(p.step_size)
                                          : 0;
  return (bytes_of(x_codes(p), p.x, p.x_packed) + bytes_of(n * k, p.w) + bytes_of(m * static_cast<double>(p.n), p.out) +
          scales) /
         chip.dram_bytes_per_us;
}

// Until the last of the blocks that share a tile is determined and has read their sums: three ways through memory. What
// writes the codes of x clears their counters too; of float activations nothing is written, so that a launch of its own
// does.
inline double meeting_us(const GemmProblem& p, const Chip& chip) {
  return (is_float(p.x) ? kClearUs : 0) + 3 * chip.latency_us;
}

// Rows that hold few tokens (decode_cost.cpp).
CostTerms decode_terms(const Row& row, const GemmProblem& p, const DeviceInfo& device);

}  // namespace pyquant
