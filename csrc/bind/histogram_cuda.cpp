// magnitude_histogram on CUDA: check, allocate through torch, launch through csrc/cuda.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "bind/check.h"
#include "bind/device.h"
#include "bind/text.h"
#include "core/histogram_math.h"

namespace pyquant::bind {
namespace {

Tensor magnitude_histogram(const Tensor& x, int64_t exponent) {
  histogram_call(x, exponent);
  const On on(x);
  Tensor counts = empty(x, {2, kHistogramBins}, ScalarType::Long);
  const Matrix m = matrix(x.dim() == 0 ? torch::stable::view(x, {1}) : x);
  cuda::magnitude_histogram({m.data, m.type, m.rows, m.cols, m.ld}, static_cast<int32_t>(exponent),
                            static_cast<int64_t*>(counts.mutable_data_ptr()), on.context);
  return counts;
}

}  // namespace
}  // namespace pyquant::bind

STABLE_TORCH_LIBRARY_IMPL(PYQUANT_BIND_LIBRARY, PYQUANT_BIND_KEY, m) {
  if (!pyquant::cuda::is_built()) return;  // there is a stand-in in Python (pyquant/ops/fallback.py)
  m.impl("magnitude_histogram", TORCH_BOX(&pyquant::bind::magnitude_histogram));
}
