// How many blocks share the K of one tile of a decode kernel. Pure, so that the cost model and the launch agree.
#pragma once
#include <cstdint>

namespace pyquant {

constexpr int32_t kDecodeWarps = 8;
constexpr int32_t kDecodeSplitMax = 8;  // blocks of a portable cluster

// A power of two: doubled while the device's multiprocessors are not all busy and every warp keeps a unit of work.
constexpr int32_t decode_split(int64_t tiles, int64_t units, int32_t sm_count) {
  int32_t split = 1;
  while (split < kDecodeSplitMax && tiles * split < sm_count && units >= int64_t{2} * split * kDecodeWarps) split *= 2;
  return split;
}

}  // namespace pyquant
