// quantize_dynamic: the input row itself, without a norm or gate.
#include "cuda/quantize/dynamic.h"
#include "cuda/quantize/rows.cuh"

namespace pyquant::cuda {

void quantize_per_token(const FloatMatrix& x, const CodeRange& range, const QuantizeParams& params,
                        const QuantizeOut& out, const Context& context) {
  with_float_type(x.type, "quantize_dynamic", [&](auto element) {
    using T = decltype(element);
    const bool vector = is_aligned(x.data, x.ld * static_cast<int64_t>(sizeof(T)), 16);
    const PlainInput<T> in{static_cast<const T*>(x.data), x.ld, vector};
    quantize_rows<T>("quantize_dynamic", in, x.rows, x.cols, range, params, out, context);
  });
}

}  // namespace pyquant::cuda
