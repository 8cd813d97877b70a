// A gate in front of the quantiser, in one kernel (docs/numerics.md 9): the 16-bit tensor between the two is never
// written. A curve costs up to sixty operations, so its values are kept as fp32.
#include "core/activation_math.h"
#include "cuda/quantize/rows.cuh"

namespace pyquant::cuda {

namespace {

template <class T, class Curve>
struct GateInput {
  static constexpr int kUnits = 4, kThreads = 512, kStep = 0, kWidth = kVector<T>;  // fp32 values fill the registers
  using Kept = KeptFloats<T, kUnits>;
  const T *x, *up;
  int64_t ld, ldu;
  bool vector;
  float low, high;  // of the curve, where it has limits

  struct Row {
    const T *gate, *up;
    bool vector;
    float low, high;
    __device__ __forceinline__ Row(const GateInput& in, int64_t row, const RowSpan&, RowShared&, Kept&)
        : gate(in.x + row * in.ld), up(in.up + row * in.ldu), vector(in.vector), low(in.low), high(in.high) {}
    __device__ __forceinline__ void load(const Chunk& chunk, Kept& kept) const {
      KeptUnits<T, kUnits> gates, ups;
      gates.load(gate, chunk, vector);
      ups.load(up, chunk, vector);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        float g[kWidth], u[kWidth];
        gates.values(i, g);
        ups.values(i, u);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) kept.value[i][j] = 0.f;
        if (i * chunk.step >= chunk.left) continue;
#pragma unroll
        for (int j = 0; j < kWidth; ++j) kept.value[i][j] = fmul(Curve::of(g[j], low, high), u[j]);
      }
    }
  };
};

template <class Curve>
void launch_gate(const FloatMatrix& x, const GateOperands& gate, const CodeRange& range, const QuantizeParams& params,
                 const QuantizeOut& out, const Context& context) {
  with_float_type(x.type, "activation_mul_quantize", [&](auto element) {
    using T = decltype(element);
    const auto size = static_cast<int64_t>(sizeof(T));
    const bool vector = is_aligned(x.data, x.ld * size, 16) && is_aligned(gate.up, gate.ldu * size, 16);
    const GateInput<T, Curve> in{static_cast<const T*>(x.data),
                                 static_cast<const T*>(gate.up),
                                 x.ld,
                                 gate.ldu,
                                 vector,
                                 gate.clamp_min,
                                 gate.clamp_max};
    quantize_rows<T>("activation_mul_quantize", in, x.rows, x.cols, range, params, out, context);
  });
}

}  // namespace

void activation_mul_quantize(const FloatMatrix& x, const GateOperands& gate, const CodeRange& range,
                             const QuantizeParams& params, const QuantizeOut& out, const Context& context) {
  switch (gate.activation) {
#define PYQUANT_ACTIVATION(NAME) \
  case Activation::NAME: return launch_gate<activations::NAME>(x, gate, range, params, out, context);
    PYQUANT_ACTIVATIONS(PYQUANT_ACTIVATION)
#undef PYQUANT_ACTIVATION
  }
}

}  // namespace pyquant::cuda
