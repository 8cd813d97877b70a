// The search for the step of least squared error of a short row of weights (docs/calibration.md 2.4): its constants,
// which are those of pyquant/calibrate/short_rows.py.
#pragma once
#include <cstdint>

namespace pyquant {

constexpr int64_t kStepLanes = 16;     // partial sums of a row, added in halves
constexpr int64_t kLongestRow = 256;   // numbers
constexpr int64_t kMostRatios = 512;   // candidates of the first pass
constexpr int64_t kStepsKept = 3;      // minima of the first pass that are looked at closely
constexpr int64_t kStepsBeside = 8;    // points on either side of each
constexpr int64_t kStepsPolished = 2;  // of all these
constexpr int64_t kPolishRounds = 3;

}  // namespace pyquant
