// Where the steps of natural rows of int4 weights lie (docs/numerics.md 4.1), so that a lane of a kernel finds those of
// its channels in one word: a row of bytes for every group of codes along k, of whole 32 channels; in each 32, byte
// 4 * (n % 8) + n / 8 % 4 is channel n's. Steps of channels beyond n are anything. Those of blocked128: blocked128.h.
#pragma once
#include <cstdint>

#include "core/arith.h"

namespace pyquant {

// Bytes of a row of steps.
PYQ_HD constexpr int64_t step_row(int64_t n) { return (n + 31) / 32 * 32; }

// Position of channel n in a row.
PYQ_HD constexpr int64_t step_place(int64_t n) { return n / 32 * 32 + 4 * (n % 8) + n / 8 % 4; }

}  // namespace pyquant
