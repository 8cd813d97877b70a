// How the windows of a convolution in groups become taps (taps.h), and the strips of codes that these read.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/blocks.h"
#include "cpu/windows.h"

namespace pyquant::cpu {

constexpr int64_t kMostColumns = 512;  // of a strip, unless one window spans more

// Which codes a tap multiplies: positions along K of its four bytes, -1 for none.
struct Tap {
  int64_t k[4];
};

// How the windows of a layer are cut into taps. A strip holds what the windows of some neighbouring results read:
// - one channel a group: [column][plane][dword], four lines of the image in a dword, one above the other, so that
//   neighbouring windows share the work of bringing bytes together;
// - more: [line][column][dword], four channels of a group in a dword.
// Bytes that belong to no code meet weights of zero.
struct Taps {
  bool depthwise;
  int64_t group_channels, group_results, dwords;  // of one group: channels, output channels, dwords of a pixel
  int64_t planes;                                 // dwords, one above the other, in which a column of a window lies
  int64_t pixel;                                  // dwords of a pixel (of one plane), whichever block reads it
  int64_t columns;                                // of a strip, at most
  int64_t results;                                // of a strip, at most
  std::vector<Tap> taps;
  std::vector<int64_t> offsets;  // bytes from the first column and line of a window

  Taps(const Windows& windows, int64_t n, int64_t most_results) {
    const Window& w = windows.window;
    group_channels = windows.channels / w.groups;
    group_results = n / w.groups;
    depthwise = group_channels == 1;
    dwords = (group_channels + 3) / 4;
    planes = depthwise ? (w.kernel[0] + 3) / 4 : w.kernel[0];
    pixel = round_up(most_groups(n) * dwords, depthwise ? 16 : 1);
    results = std::min(windows.out_width, most_results);
    // Where windows lie far apart, a strip is mostly what no window reads: it stays short.
    results = std::clamp<int64_t>((kMostColumns - w.span(1)) / w.stride[1] + 1, 1, results);
    columns = (results - 1) * w.stride[1] + w.span(1);
    if (depthwise)
      of_lines(w);
    else
      of_channels(w);
  }

  int64_t strip_bytes() const { return planes * columns * pixel * 4; }
  // Whether the quads of a packed block are these taps, in order.
  bool are_quads(const Extent& extent) const { return !depthwise && group_channels % 4 == 0 && !extent.scattered(); }

 private:
  // Groups that a block of 64 output channels meets, at most.
  int64_t most_groups(int64_t n) const {
    int64_t most = 0;
    for (int64_t first = 0; first < n; first += kBlockN) {
      const int64_t last = std::min(first + kBlockN, n) - 1;
      most = std::max(most, last / group_results - first / group_results + 1);
    }
    return most;
  }

  void of_lines(const Window& w) {
    for (int64_t s = 0; s < w.kernel[1]; ++s)
      for (int64_t plane = 0; plane < planes; ++plane) {
        Tap tap;
        for (int64_t i = 0; i < 4; ++i) {
          const int64_t r = plane * 4 + i;
          tap.k[i] = r < w.kernel[0] ? r * w.kernel[1] + s : -1;
        }
        add(tap, (s * w.dilation[1] * planes + plane) * pixel);
      }
  }

  void of_channels(const Window& w) {
    for (int64_t r = 0; r < w.kernel[0]; ++r)
      for (int64_t s = 0; s < w.kernel[1]; ++s)
        for (int64_t d = 0; d < dwords; ++d) {
          Tap tap;
          for (int64_t i = 0; i < 4; ++i) {
            const int64_t c = d * 4 + i;
            tap.k[i] = c < group_channels ? (r * w.kernel[1] + s) * group_channels + c : -1;
          }
          add(tap, (r * columns + s * w.dilation[1]) * pixel + d);
        }
  }

  void add(const Tap& tap, int64_t dword) {
    taps.push_back(tap);
    offsets.push_back(dword * 4);
  }
};

}  // namespace pyquant::cpu
