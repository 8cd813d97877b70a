// Rows that lie in images (ImageRows, core/problem.h) without a division on the device: where one begins, where its
// codes lie from there on.
#pragma once
#include <cutlass/fast_math.h>

#include "core/problem.h"

namespace pyquant::cuda {

// Places are counted in units of kUnit codes, which divides every step and the channels, as numbers of type Place.
template <class Place, int kUnit>
struct ImageWalk {
  cutlass::FastDivmod out_width, out_height, taps, channels;
  Place image_step, window_step[2], tap_step[2];

  explicit ImageWalk(const ImageRows& rows)
      : out_width(by(rows.out_width)),
        out_height(by(rows.out_height)),
        taps(by(rows.taps)),
        channels(by(rows.channels)),
        image_step(units(rows.image_step)),
        window_step{units(rows.window_step[0]), units(rows.window_step[1])},
        tap_step{units(rows.tap_step[0]), units(rows.tap_step[1])} {}

  __device__ __forceinline__ Place begin_of_row(int row) const {
    int rest, i, j, image;
    out_width(rest, j, row);
    out_height(image, i, rest);
    return static_cast<Place>(image) * image_step + static_cast<Place>(i) * window_step[0] +
           static_cast<Place>(j) * window_step[1];
  }
  __device__ __forceinline__ Place place_in_row(int code) const {
    int tap, channel, r, s;
    channels(tap, channel, code);
    taps(r, s, tap);
    return static_cast<Place>(r) * tap_step[0] + static_cast<Place>(s) * tap_step[1] +
           static_cast<Place>(channel) / kUnit;
  }

 private:
  static Place units(int64_t codes) { return static_cast<Place>(codes / kUnit); }
  static cutlass::FastDivmod by(int64_t divisor) {
    return cutlass::FastDivmod(static_cast<int>(divisor < 1 ? 1 : divisor));
  }
};

}  // namespace pyquant::cuda
