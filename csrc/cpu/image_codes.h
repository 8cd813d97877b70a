// Images as codes, channels last: what the windows of a convolution read.
#pragma once
#include <cstdint>

#include "cpu/cpu.h"
#include "cpu/kernels.h"

namespace pyquant::cpu {

struct Images {
  const void* x = nullptr;
  DType type = DType::f32;  // f32, f16, bf16; s8 of codes
  int64_t count = 0, channels = 0, pixels = 0;
  bool channels_last = false;  // [count][pixels][channels], else [count][channels][pixels]

  int64_t numbers() const { return channels * pixels; }  // of one image
  const void* at(int64_t image, int64_t offset) const {
    return static_cast<const unsigned char*>(x) + (image * numbers() + offset) * bytes_of(type);
  }
};

// How the images of a call are quantised: one scale (and zero point) an image where step is 1, one for all where it is
// 0. A scale of NaN marks a poisoned image, whose codes are zero.
struct ImageRanges {
  const float* recip = nullptr;
  const int32_t* zero_point = nullptr;
  int64_t step = 0;
  int32_t qmin = -127, qmax = 127;
  bool finite = false;  // as in QuantizeRun
};

// The range of each image over all of its numbers.
void image_ranges(const Images& images, bool symmetric, int32_t qmin, int32_t qmax, float* scale, int32_t* zero_point);
// to [count][pixels][channels], u8 = code + 128.
void quantize_images(const Images& images, const ImageRanges& ranges, uint8_t* to);
// The same of s8 codes that are there.
void take_codes(const Images& images, uint8_t* to);

}  // namespace pyquant::cpu
