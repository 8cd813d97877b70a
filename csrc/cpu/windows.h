// Rows of a convolution's product, read from the image itself: row m holds the codes under the window of pixel m of the
// result, in the order (kernel row, kernel column, channel). No matrix of patches is ever stored.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/window.h"

namespace pyquant::cpu {

struct Windows {
  // Few bytes are copied in blocks, the last of which reads and writes beyond them: the codes have kSlack bytes more
  // behind them, as a row has, and what is written comes in the order of the row.
  static constexpr int64_t kBlock = 16, kFewBytes = 256, kSlack = 64;

  const uint8_t* codes = nullptr;  // [images][height][width][channels]
  int64_t height = 0, width = 0, channels = 0;
  int64_t out_height = 0, out_width = 0;
  Window window;

  int64_t pixels() const { return out_height * out_width; }

  // Walks over the rows from one on, without a division each.
  class Cursor {
   public:
    Cursor(const Windows& of, int64_t row) : of_(of) {
      image_ = row / of.pixels();
      i_ = row % of.pixels() / of.out_width;
      j_ = row % of.out_width;
    }
    // The row, as u8 codes; `outside` stands for real zero.
    void copy(uint8_t outside, uint8_t* to) const {
      const Window& w = of_.window;
      const int64_t run = w.kernel[1] * of_.channels, top = w.first(0, i_), left = w.first(1, j_);
      if (run == 0) return;
      const uint8_t* image = of_.codes + image_ * of_.height * of_.width * of_.channels;
      for (int64_t r = 0; r < w.kernel[0]; ++r, to += run) {
        const int64_t y = top + r * w.dilation[0];
        if (y < 0 || y >= of_.height)
          std::memset(to, outside, static_cast<size_t>(run));
        else
          line(image + y * of_.width * of_.channels, left, outside, to);
      }
    }
    void next() {
      if (++j_ < of_.out_width) return;
      j_ = 0;
      if (++i_ < of_.out_height) return;
      i_ = 0;
      ++image_;
    }

   private:
    // The taps of one kernel row, from column `left` of a line of the image on.
    void line(const uint8_t* from, int64_t left, uint8_t outside, uint8_t* to) const {
      const int64_t taps = of_.window.kernel[1], step = of_.window.dilation[1], c = of_.channels;
      if (step == 1) {
        const int64_t first = std::clamp<int64_t>(-left, 0, taps);
        const int64_t last = std::clamp<int64_t>(of_.width - left, first, taps);
        if (first > 0) std::memset(to, outside, static_cast<size_t>(first * c));
        bytes(from + (left + first) * c, (last - first) * c, to + first * c);
        if (last < taps) std::memset(to + last * c, outside, static_cast<size_t>((taps - last) * c));
        return;
      }
      for (int64_t s = 0; s < taps; ++s, to += c) {
        const int64_t x = left + s * step;
        if (x < 0 || x >= of_.width)
          std::memset(to, outside, static_cast<size_t>(c));
        else
          bytes(from + x * c, c, to);
      }
    }
    static void bytes(const uint8_t* from, int64_t count, uint8_t* to) {
      if (count > kFewBytes)
        std::memcpy(to, from, static_cast<size_t>(count));
      else
        for (int64_t i = 0; i < count; i += kBlock) std::memcpy(to + i, from + i, kBlock);
    }

    const Windows& of_;
    int64_t image_, i_, j_;
  };
};

}  // namespace pyquant::cpu
