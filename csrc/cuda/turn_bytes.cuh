// Bytes of neighbouring words change places: codes of four channels, or of four taps, side by side.
#pragma once
#include <cstdint>

namespace pyquant::cuda {

// Four words of four bytes each, rows for columns.
__device__ __forceinline__ void turn_bytes(const uint32_t (&from)[4], uint32_t* to) {
  const uint32_t low[2] = {__byte_perm(from[0], from[1], 0x5140), __byte_perm(from[2], from[3], 0x5140)};
  const uint32_t high[2] = {__byte_perm(from[0], from[1], 0x7362), __byte_perm(from[2], from[3], 0x7362)};
  to[0] = __byte_perm(low[0], low[1], 0x5410);
  to[1] = __byte_perm(low[0], low[1], 0x7632);
  to[2] = __byte_perm(high[0], high[1], 0x5410);
  to[3] = __byte_perm(high[0], high[1], 0x7632);
}

}  // namespace pyquant::cuda
