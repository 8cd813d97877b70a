// The geometry of a 2-D convolution: which input pixel a (pixel of the result, tap) reads. Pairs are (height, width).
#pragma once
#include <cstdint>

namespace pyquant {

// The int[] that carries a Window; pyquant/core/patches.py writes it, tests/ops/test_conv.py compares the two.
constexpr int kWindowFields = 11;

struct Window {
  int64_t kernel[2] = {1, 1}, stride[2] = {1, 1};
  int64_t padding[4] = {0, 0, 0, 0};  // top, bottom, left, right
  int64_t dilation[2] = {1, 1};
  int64_t groups = 1;

  int64_t taps() const { return kernel[0] * kernel[1]; }
  // Pixels that a window spans along an axis, and those of the padded image.
  int64_t span(int axis) const { return dilation[axis] * (kernel[axis] - 1) + 1; }
  int64_t room(int axis, int64_t size) const { return size + padding[2 * axis] + padding[2 * axis + 1]; }
  // Of the result; only where span <= room.
  int64_t out_size(int axis, int64_t size) const { return (room(axis, size) - span(axis)) / stride[axis] + 1; }
  // The first input pixel of a window, which lies outside of the image where it is negative.
  int64_t first(int axis, int64_t out) const { return out * stride[axis] - padding[2 * axis]; }
  bool is_pointwise() const {
    return groups == 1 && taps() == 1 && stride[0] == 1 && stride[1] == 1 &&
           !(padding[0] | padding[1] | padding[2] | padding[3]);
  }
};

inline Window window_from_wire(const int64_t* wire) {
  Window w;
  for (int i = 0; i < 2; ++i) {
    w.kernel[i] = wire[i];
    w.stride[i] = wire[2 + i];
    w.dilation[i] = wire[8 + i];
  }
  for (int i = 0; i < 4; ++i) w.padding[i] = wire[4 + i];
  w.groups = wire[10];
  return w;
}

}  // namespace pyquant
