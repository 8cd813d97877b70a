// quantize_dynamic: the input row itself, without a norm or gate.
#include "cuda/quantize/dynamic.h"
#include "cuda/quantize/rows.cuh"

namespace pyquant::cuda {

namespace {

template <class T>
struct PlainInput {
  using Kept = T;
  static constexpr int kWidth = kVector<T>;
  const T* x;
  int64_t ld;
  bool vector;

  struct Row {
    const T* x;
    bool vector;
    Space<T, kWidth> space;
    __device__ __forceinline__ void produce(int64_t unit, float (&v)[kWidth]) const {
      load_run(x + unit * kWidth, space.valid(unit), vector, v);
      if (space.kept) space.put(unit, v);
    }
    __device__ __forceinline__ void again(int64_t unit, float (&v)[kWidth]) const {
      if (space.kept)
        space.get(unit, v);
      else
        load_run(x + unit * kWidth, space.valid(unit), vector, v);
    }
  };
  __device__ __forceinline__ Row open(int64_t row, const Space<T, kWidth>& space, RowShared&) const {
    return {x + row * ld, vector, space};
  }
};

}  // namespace

void quantize_per_token(const FloatMatrix& x, const CodeRange& range, const QuantizeParams& params,
                        const QuantizeOut& out, const Context& context) {
  with_float_type(x.type, "quantize_dynamic", [&](auto element) {
    using T = decltype(element);
    const PlainInput<T> in{static_cast<const T*>(x.data), x.ld,
                           is_aligned(x.data, x.ld * static_cast<int64_t>(sizeof(T)), 16)};
    quantize_rows<T>("quantize_dynamic", in, x.rows, x.cols, range, params, out, context);
  });
}

}  // namespace pyquant::cuda
