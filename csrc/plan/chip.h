// What the cost model knows of a GPU beyond DeviceInfo: rates of one generation, from data sheets.
#pragma once
#include "core/device.h"

namespace pyquant {

struct Chip {
  double clocks_per_us;  // sustained under tensor-core load
  double mma_macs;       // int8 multiply-adds a clock and multiprocessor, mma.sync
  double wgmma_macs;     // the same by wgmma; 0: the chip has none
  double int4_rate;      // s4 x s4 by mma.sync, as a multiple of int8
  double dram_bytes_per_us, l2_bytes_per_us;
  double latency_us;  // of a first byte from memory, address to register
};

Chip chip_of(const DeviceInfo& device);

}  // namespace pyquant
