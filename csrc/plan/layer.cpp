#include "plan/layer.h"

#include <algorithm>
#include <limits>

#include "plan/chip.h"
#include "plan/cost.h"
#include "plan/select.h"
#include "plan/tuned.h"

namespace pyquant {

namespace {

constexpr double kLanes = 128;         // instructions of a multiprocessor a clock
constexpr double kQuantizeSteps = 14;  // for an element: docs/kernels.md, the dearest quantiser without a norm in front
constexpr double kReached = 0.88;      // of the peak by a main loop whose pipeline is full, as in plan/cost.cpp
constexpr double kStreamed = 64;       // rows up to which the framework streams weights like the decode rows

// A launch that passes over memory: its bytes or its instructions. The bytes are those of device memory, as the model
// has it for both products' operands: caches would help the framework's as much.
double pass_us(double bytes, double instructions, const DeviceInfo& device) {
  const Chip chip = chip_of(device);
  const double lanes = kLanes * std::max(device.sm_count, 1) * chip.clocks_per_us;
  return kPassUs + std::max(bytes / chip.dram_bytes_per_us, instructions / lanes);
}

// Whether the framework multiplies by instructions that these kernels do not have.
bool outruns(const Chip& chip) { return chip.framework_macs > std::max(chip.mma_float_macs, chip.wgmma_macs / 2); }

// The framework at its best: weights stream once through all multiprocessors, whose matrix units take eight rows at a
// time at least.
double streamed_us(const GemmProblem& p, const DeviceInfo& device) {
  const Chip chip = chip_of(device);
  const double macs = outruns(chip) ? chip.framework_macs * kReached : chip.mma_float_macs;
  const double m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  const double multiply = std::max(m, 8.0) * n * k / (macs * device.sm_count * chip.clocks_per_us);
  return kLaunchUs + 2 * chip.latency_us + std::max(2 * (m * k + n * k + m * n) / chip.dram_bytes_per_us, multiply);
}

// In which the framework multiplies a layer's activations.
DType framework_type(const GemmProblem& p) { return is_float(p.x) && p.x != DType::f32 ? p.x : DType::f16; }

template <bool kOnlyCompiled>
const Row* select_row(const GemmProblem& problem, bool has_residual, const DeviceInfo& device) {
  return select(problem, has_residual, device, kOnlyCompiled).row;
}

}  // namespace

LayerTime framework_time(int64_t m, int64_t n, int64_t k, DType type, const DeviceInfo& device) {
  GemmProblem p;
  p.m = m, p.n = n, p.k = p.ldx = p.ldw = k, p.ldo = n;
  p.x = p.w = p.out = type;
  if (const Tuned* tuned = find_tuned(p, false, device)) return {tuned->us, true, nullptr};
  // Rows of floats are written as the framework's are, and refuse nothing here: it pads what they would.
  const Cheapest best = cheapest(p, false, device, false);
  double us = best.row ? best.cost_us : std::numeric_limits<double>::infinity();
  if (static_cast<double>(m) <= kStreamed || outruns(chip_of(device))) us = std::min(us, streamed_us(p, device));
  return {us, false, nullptr};
}

double dequantised_us(const GemmProblem& p, const DeviceInfo& device) {
  const double w = static_cast<double>(p.n) * static_cast<double>(p.k);
  return framework_time(p.m, p.n, p.k, framework_type(p), device).us +
         pass_us(w * (stored_bits(p.w, true) / 8.0 + 2), 0, device);
}

LayerTime layer_time(const Request& request, const DeviceInfo& device, bool only_compiled) {
  const GemmProblem& p = request.problem;
  const double x = static_cast<double>(p.m) * static_cast<double>(p.k);
  const Route r = route(request, device, only_compiled ? select_row<true> : select_row<false>);
  if (r.form == Form::framework) {
    if (const Tuned* tuned = find_tuned(p, request.has_residual, device)) return {tuned->us, true, nullptr};
    const LayerTime time = framework_time(p.m, p.n, p.k, framework_type(p), device);
    return is_float(p.w) ? time : LayerTime{dequantised_us(p, device), time.is_measured, nullptr};
  }
  if (r.row == nullptr) return {std::numeric_limits<double>::infinity(), false, nullptr};
  const Selection s = select(r.problem, request.has_residual, device, only_compiled);
  double us = s.cost_us;
  if (request.entry == Entry::linear && is_float(p.x))
    us += pass_us(x * (stored_bits(p.x, false) / 8.0 + 1), x * kQuantizeSteps, device);
  if (r.form == Form::nibbles) us += kPassUs;
  if (r.form == Form::sorted) us += sorting_us(r.problem, device);
  return {us, s.is_measured, r.row};
}

}  // namespace pyquant
