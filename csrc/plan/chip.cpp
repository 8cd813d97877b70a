#include "plan/chip.h"

namespace pyquant {

// Rates are data-sheet peaks divided by multiprocessors and clock: A100 624 TOPS / 108 / 1.41 GHz / 2 = 2048; A40 299 /
// 84 / 1.74 / 2 = 1024; L40S 733 / 142 / 2.52 / 2 = 1024; H100 1979 / 132 / 1.83 / 2 = 4096. Hopper runs mma.sync at
// about half the rate of wgmma; for later chips, whose own instructions these kernels do not use, Ampere's rate is
// assumed. Clocks are below boost on Hopper and later, where tensor cores at full rate are bound by power. Bandwidth: a
// part of the peak that a copy reaches.
Chip chip_of(const DeviceInfo& device) {
  Chip chip;
  if (device.sm >= 100)
    chip = {1850, 2048, 0, 1, 8000, 14e6, 0.8};
  else if (device.sm >= 90)
    chip = {1700, 2048, 4096, 1, 4000, 7.0e6, 0.7};
  else if (device.sm >= 89)
    chip = {2400, 1024, 0, 2, 864, 4.0e6, 0.6};
  else if (device.sm >= 86)
    chip = {1700, 1024, 0, 2, 768, 2.5e6, 0.6};
  else
    chip = {1410, 2048, 0, 2, 1750, 4.5e6, 0.6};
  if (device.dram_gbps > 0) chip.dram_bytes_per_us = static_cast<double>(device.dram_gbps);
  chip.dram_bytes_per_us *= 0.9e3;  // GB/s to bytes a microsecond
  return chip;
}

}  // namespace pyquant
