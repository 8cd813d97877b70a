// Rows of the experts of a mixture, quantised with a scale an expert (cuda/cuda.h: of all other quantisers).
#pragma once
#include "cuda/cuda.h"

namespace pyquant::cuda {

// Whose rows are whose, as in GemmOperands; the scale and zero point of expert e lie shifts[e] bytes beyond these.
struct ExpertSteps {
  const float* scale = nullptr;
  const int32_t* zero_point = nullptr;
  const int32_t* ends = nullptr;    // [experts] on the device
  const int64_t* shifts = nullptr;  // [experts] on the host
  int64_t experts = 0;
  const int64_t* chosen = nullptr;  // [count]: which row of x each row is; null: all, as they are
};

// Codes of `count` rows, each with the step of its expert. Those of no expert are not written: nobody reads them.
void quantize_expert_rows(const FloatMatrix& x, const ExpertSteps& steps, int64_t count, const CodeRange& range,
                          const QuantizeOut& out, const Context& context);

}  // namespace pyquant::cuda
