// The facts of a device that dispatch needs. Always an argument: plan/ never calls the driver.
#pragma once
#include <cstdint>

namespace pyquant {

struct DeviceInfo {
  int32_t sm = 0;  // compute capability times ten: 80, 86, 89, 90, 100, 103, 120
  int32_t sm_count = 0;
  int64_t shared_bytes = 0;  // opt-in shared memory of one block
  int64_t l2_bytes = 0;
  int64_t dram_gbps = 0;           // peak of the memory bus, 1e9 bytes a second; 0: what the generation usually has
  int64_t clock_mhz = 0;           // highest clock of the multiprocessors; 0: what the generation usually has
  bool halves_float_sums = false;  // a GeForce: tensor cores add 16-bit products into float32 at half their rate
  uint64_t gpu = 0;                // gpu_id of its name: which tuned choices hold for it; 0: none
};

// A GPU's name, as the driver tells it, in 64 bits (FNV-1a), so that looking up a choice compares no strings.
constexpr uint64_t gpu_id(const char* name) {
  uint64_t id = 0xcbf29ce484222325u;
  for (; *name != 0; ++name) id = (id ^ static_cast<unsigned char>(*name)) * 0x100000001b3u;
  return id;
}

// Whether a GPU of this name is a GeForce. No property that the driver tells gives the rate away.
constexpr bool is_geforce(const char* name) {
  constexpr char kWord[] = "GeForce";
  for (; *name != 0; ++name) {
    const char *at = name, *word = kWord;
    while (*word != 0 && *at == *word) ++at, ++word;
    if (*word == 0) return true;
  }
  return false;
}

}  // namespace pyquant
