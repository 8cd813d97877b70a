// What the cost model knows of a GPU beyond DeviceInfo: rates of one generation, each with its source (chip.cpp).
#pragma once
#include "core/device.h"

namespace pyquant {

struct Chip {
  double clocks_per_us;   // the highest clock that a chip keeps under load, but for wgmma's (kWgmmaReached)
  double mma_macs;        // int8 multiply-adds a clock and multiprocessor, mma.sync
  double mma_float_macs;  // 16-bit ones with float32 sums, mma.sync
  double wgmma_macs;      // int8 by wgmma, 16-bit ones at half of it; 0: the chip has none
  double framework_macs;  // 16-bit ones with float32 sums by the instruction that the framework's products use
  double int4_rate;       // s4 x s4 by mma.sync, as a multiple of int8
  double dram_bytes_per_us;
  double l2_bytes_per_us;    // read by all multiprocessors together
  double port_bytes_per_us;  // of one multiprocessor, from L2
  double latency_us;         // of a first byte from memory, address to register
};

Chip chip_of(const DeviceInfo& device);

// Opt-in shared memory of one block: what the driver says, else what the generation has. A multiprocessor has a KiB
// more, and every block takes one for itself (CUDA C++ programming guide, technical specifications and 'Shared
// memory').
int64_t shared_of(const DeviceInfo& device);
constexpr int64_t kBlockReserve = 1024;

}  // namespace pyquant
