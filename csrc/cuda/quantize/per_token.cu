// quantize_dynamic: the input row itself, without a norm or gate; all rows, or chosen ones.
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

namespace {

// Rows in the order of a list.
template <class T>
struct ChosenInput : PlainInput<T> {
  const int64_t* chosen;

  struct Row : PlainInput<T>::Row {
    __device__ __forceinline__ Row(const ChosenInput& in, int64_t row, const RowSpan& span, RowShared& shared,
                                   typename PlainInput<T>::Kept& kept)
        : PlainInput<T>::Row(in, in.chosen[row], span, shared, kept) {}
  };
};

}  // namespace

void quantize_chosen_rows(const FloatMatrix& x, const int64_t* chosen, int64_t count, const CodeRange& range,
                          const QuantizeParams& params, const QuantizeOut& out, const Context& context) {
  with_float_type(x.type, "quantize_chosen_rows", [&](auto element) {
    using T = decltype(element);
    const bool vector = is_aligned(x.data, x.ld * static_cast<int64_t>(sizeof(T)), 16);
    const ChosenInput<T> in{{static_cast<const T*>(x.data), x.ld, vector}, chosen};
    quantize_rows<T>("quantize_chosen_rows", in, count, x.cols, range, params, out, context);
  });
}

}  // namespace pyquant::cuda
