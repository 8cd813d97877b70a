// taps.h by tiles of four pixels and sixteen channels: tap_tile<Spread, pixels>(run, pixel, channel) of the instruction
// set, which stands before this is included.
#pragma once
#include "cpu/taps.h"

namespace pyquant::cpu {
namespace {

template <Spread kSpread>
void tap_channels(const TapRun& run) {
  int64_t pixel = 0;
  for (; pixel + 4 <= run.pixels; pixel += 4)
    for (int64_t c = 0; c < run.channels; c += 16) tap_tile<kSpread, 4>(run, pixel, c);
  for (; pixel < run.pixels; ++pixel)
    for (int64_t c = 0; c < run.channels; c += 16) tap_tile<kSpread, 1>(run, pixel, c);
}

void taps(const TapRun& run) {
  switch (run.spread) {
    case Spread::side_by_side: return tap_channels<Spread::side_by_side>(run);
    case Spread::one: return tap_channels<Spread::one>(run);
    case Spread::near: return tap_channels<Spread::near>(run);
    case Spread::far: return tap_channels<Spread::far>(run);
  }
}

}  // namespace
}  // namespace pyquant::cpu
