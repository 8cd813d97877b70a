#include "plan/chip.h"

#include <algorithm>

namespace pyquant {

namespace {

// A generation. Multiply-adds are peaks of data sheets divided by two, multiprocessors and clock.
struct Generation {
  int32_t sm_end;  // of the compute capabilities that it stands for, from the generation before on
  double clock_mhz;
  double mma_macs, mma_float_macs, wgmma_macs, framework_macs, int4_rate;
  double dram_gbps;   // of its usual card, for a device whose bus is not known
  double l2_bytes;    // a clock and multiprocessor, that all of them together read
  double port_bytes;  // a clock, that one alone reads from L2
  double latency_us;
  int64_t shared_kib;  // opt-in, of a block (CUDA C++ programming guide, technical specifications)
};

constexpr Generation kGenerations[] = {
    // A100 (its whitepaper): 624 int8 TOPS and 312 in 16 bits, 108 multiprocessors, 1.41 GHz: 2048 and 1024.
    {81, 1410, 2048, 1024, 0, 1024, 2, 1944, 29.6, 48, 0.6, 163},
    // A40 (data sheet): 299 and 150, 84, 1.74: 1024 and 512. RTX 3090 (GA102 whitepaper): 284 int8, 82, 1.695: 1024.
    {87, 1740, 1024, 512, 0, 512, 2, 768, 17.5, 48, 0.6, 99},
    // Jetson AGX Orin (technical brief): 85 int8 TOPS of the GPU, 16, 1.3: 2048, an A100's multiprocessor.
    {88, 1300, 2048, 1024, 0, 1024, 2, 204, 29.6, 48, 0.6, 163},
    // L40S (data sheet): 733 and 362, 142, 2.52: 1024 and 512. RTX 4090 (Ada whitepaper): 661 int8, 128, 2.52: 1024.
    {90, 2520, 1024, 512, 0, 512, 2, 864, 11.7, 48, 0.6, 99},
    // H100 (data sheet): 1979 and 989, 132, 1.83: 4096 and 2048 by wgmma; mma.sync runs at about half of it. The clock
    // is what drivers report. L2: `python -m bench.rows` on an H200, 71.9 us for 1024 x 4096 x 6144 in bf16 by tiles of
    // 128 x 128 without clusters, which reads 45 bytes a clock at least; 64 is what our rule for things that overlap
    // needs to say so, and what a multiprocessor's port is wide.
    {100, 1980, 2048, 1024, 4096, 2048, 1, 4000, 64, 64, 0.7, 227},
    // B200 (data sheet): 2250 in 16 bits, 148, 1.85: 4096 by tcgen05, which these kernels do not use. Nobody publishes
    // its
    // mma.sync: Ampere's rate is assumed.
    {103, 1850, 2048, 1024, 0, 4096, 1, 8000, 51.1, 48, 0.8, 227},
    // B300: int8 is all but gone. cuBLASLt's own int8 product takes 1.75 ms for 8192 x 4096 x 4096 (pytorch issue
    // 187094):
    // 157 TOPS, 256 a clock. 16 bits as B200.
    {110, 1850, 256, 1024, 0, 4096, 1, 8000, 51.1, 48, 0.8, 227},
    // Jetson Thor: no int8 rate is published; as B200.
    {120, 1570, 2048, 1024, 0, 4096, 1, 273, 51.1, 48, 0.8, 227},
    // RTX PRO 6000 (RTX PRO Blackwell whitepaper): 1008 and 504, 188, 2.62: 1024 and 512. RTX 5090 (RTX Blackwell
    // whitepaper): 838 int8, 170, 2.41: 1024. L2 and latency as Ada's.
    {1000, 2617, 1024, 512, 0, 512, 1, 1792, 11.7, 48, 0.6, 99},
};

const Generation& generation_of(int32_t sm) {
  for (const Generation& generation : kGenerations)
    if (sm < generation.sm_end) return generation;
  return kGenerations[0];
}

}  // namespace

// A GeForce adds 16-bit products into float32 at half the rate: 71 TFLOPS of the RTX 3090, 165 of the 4090, 210 of the
// 5090 (their whitepapers), a fourth of int8. Of the memory bus a copy reaches nine tenths.
Chip chip_of(const DeviceInfo& device) {
  const Generation& g = generation_of(device.sm);
  const double half = device.halves_float_sums ? 0.5 : 1;
  Chip chip{};
  chip.clocks_per_us =
      device.clock_mhz > 0 ? std::min(static_cast<double>(device.clock_mhz), g.clock_mhz) : g.clock_mhz;
  chip.mma_macs = g.mma_macs;
  chip.mma_float_macs = g.mma_float_macs * half;
  chip.wgmma_macs = g.wgmma_macs;
  chip.framework_macs = g.framework_macs * half;
  chip.int4_rate = g.int4_rate;
  chip.dram_bytes_per_us = 0.9e3 * (device.dram_gbps > 0 ? static_cast<double>(device.dram_gbps) : g.dram_gbps);
  chip.l2_bytes_per_us = g.l2_bytes * chip.clocks_per_us * std::max(device.sm_count, 1);
  chip.port_bytes_per_us = g.port_bytes * chip.clocks_per_us;
  chip.latency_us = g.latency_us;
  return chip;
}

int64_t shared_of(const DeviceInfo& device) {
  return device.shared_bytes > 0 ? device.shared_bytes : generation_of(device.sm).shared_kib << 10;
}

}  // namespace pyquant
