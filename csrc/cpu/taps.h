// What convolutions in groups ask of an instruction set. An output channel multiplies the codes of its own group alone,
// so there is no row that 64 channels share: every lane reads four codes (a dword) of its own at every step ("tap") of
// the sum. Weights are the blocks of kernels.h, one quad a tap.
#pragma once
#include <cstdint>

namespace pyquant::cpu {

// Where the 64 channels of a block find their dwords, vector by vector.
enum class Spread : int32_t {
  side_by_side,  // channel n reads dword n: one group a channel
  one,           // all channels of a vector read one dword: they are of one group
  near,          // they read dwords less than a vector apart
  far            // anything else
};

// Sums of pixels: acc[pixel][channel] = sum over taps of the four products of a dword and a quad of weights.
struct TapRun {
  const uint8_t* codes = nullptr;  // the dword of tap 0, channel 0, pixel 0; 64 bytes beyond the last may be read
  int64_t step = 0;                // bytes from pixel to pixel
  int64_t pixels = 0;
  const int64_t* offsets = nullptr;  // [taps], bytes
  int64_t taps = 0;
  Spread spread = Spread::side_by_side;  // for vectors as wide as Kernels::lanes
  const int32_t* dwords = nullptr;       // [64] ascending: of channel n
  const int8_t* weights = nullptr;       // [taps][64][4]
  int64_t channels = 0;                  // that are multiplied: a multiple of 16, at most 64
  int32_t* acc = nullptr;
  int64_t ld = 0;  // 64; or the number of channels, 16 or 32, with the sums of several pixels in a row of 64
};

// Up to four lines of an image byte by byte: to[pixel][channel] = {lines[0], ..., lines[3]}[pixel][channel], with zeros
// for lines that are not there.
struct Interleave {
  const uint8_t* lines[4] = {};
  int64_t strides[4] = {};  // bytes from pixel to pixel
  int64_t count = 0;        // lines, at least 1
  int64_t pixels = 0;
  int64_t channels = 0;  // a multiple of 16, at most 64
  uint8_t* to = nullptr;
  int64_t step = 0;  // bytes from pixel to pixel
};

}  // namespace pyquant::cpu
