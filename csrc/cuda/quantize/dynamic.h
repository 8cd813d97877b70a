// The parts of quantize_dynamic, by granularity.
#pragma once
#include "cuda/cuda.h"

namespace pyquant::cuda {

void quantize_per_token(const FloatMatrix& x, const CodeRange& range, const QuantizeParams& params,
                        const QuantizeOut& out, const Context& context);
void quantize_per_tensor(const FloatMatrix& x, const CodeRange& range, const QuantizeParams& params,
                         const QuantizeOut& out, void* workspace, const Context& context);
// params.scale null: scale and zero_point are given.
void quantize_per_group(const FloatMatrix& x, int64_t group_size, const float* scale, const int32_t* zero_point,
                        const CodeRange& range, const QuantizeParams& params, const QuantizeOut& out,
                        const Context& context);
// The same where every group is few whole units (short_groups.cu); false, and nothing launched, where it is not.
bool quantize_short_groups(FloatMatrix x, int64_t group_size, const float* scale, const int32_t* zero_point,
                           const CodeRange& range, const QuantizeParams& params, QuantizeOut out,
                           const Context& context);

}  // namespace pyquant::cuda
