#include "plan/cost.h"

#include <algorithm>

namespace pyquant {

namespace {

constexpr double kLaunchUs = 3.0;

// Sustained clock, GHz, by generation (data sheets; Hopper below its boost because int8 at full rate is power-bound).
double clock_ghz(const DeviceInfo& device) {
  if (device.sm >= 100) return 1.85;
  if (device.sm >= 90) return 1.7;
  if (device.sm >= 89) return 2.5;
  return device.sm >= 86 ? 1.7 : 1.41;
}

// int8 multiply-adds per clock of one multiprocessor. wgmma: 1979 TOPS / 132 / 1.83 GHz / 2 (H100 data sheet);
// mma.sync: 624 TOPS / 108 / 1.41 GHz / 2 (A100), half of it on the sm_8x chips that carry half the tensor cores.
double macs_per_clock(const Row& row, const DeviceInfo& device) {
  switch (row.facts().engine) {
    case Engine::wgmma: return 4096;
    case Engine::mma: return device.sm >= 86 && device.sm < 90 ? 1024 : 2048;
    default: return 40;  // dp4a behind byte-wise loads
  }
}

// Share of the peak that a tile reaches once its pipeline is full: shared-memory traffic per multiply-add grows as
// the tile shrinks.
double efficiency(const Row& row) {
  const double m = row.tile_m, n = row.tile_n;
  return 1.0 / (1.0 + 24.0 * (1.0 / m + 1.0 / n));
}

double bytes_per_us(const DeviceInfo& device) {
  // HBM or GDDR by generation: H200 4.8 TB/s, A100 1.6, sm_86/89 0.9, later chips 6.
  if (device.sm >= 100) return 6.0e6;
  if (device.sm >= 90) return 4.3e6;
  return device.sm == 80 ? 1.5e6 : 0.9e6;
}

int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }

}  // namespace

double cost_us(const Row& row, const GemmProblem& p, const DeviceInfo& device) {
  const int64_t tiles_m = tiles_of(p.m, int64_t{row.tile_m} * row.cluster_m) * row.cluster_m;
  const int64_t tiles_n = tiles_of(p.n, int64_t{row.tile_n} * row.cluster_n) * row.cluster_n;
  const double tiles = static_cast<double>(tiles_m) * static_cast<double>(tiles_n);
  const double sms = std::max(device.sm_count, 1);
  // One tile keeps one multiprocessor busy; a started wave is paid for by the longest of its tiles.
  const double waves = std::max(1.0, tiles / sms);
  const double depth = static_cast<double>(tiles_of(p.k, row.tile_k) * row.tile_k);
  // Fill and drain of the pipeline and the store: about four k tiles and one pass over the output tile.
  const double tile_macs = row.tile_m * row.tile_n * (depth + 4.0 * row.tile_k) / efficiency(row);
  const double compute_us = waves * tile_macs / macs_per_clock(row, device) / (clock_ghz(device) * 1e3);
  const double m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  const double bytes = (m * k * bits_of(p.x) + n * k * bits_of(p.w) + m * n * bits_of(p.out)) / 8.0;
  return kLaunchUs + std::max(compute_us, bytes / bytes_per_us(device)) + 0.02 * compute_us;
}

}  // namespace pyquant
