// The gated SiLU in front of the quantiser, in one kernel (docs/numerics.md 9): the 16-bit tensor between the two is
// never written. The curve costs about sixty operations, so its values are kept as fp32.
#include "cuda/quantize/rows.cuh"

namespace pyquant::cuda {

namespace {

template <class T>
struct SiluMulInput {
  static constexpr int kUnits = 4, kThreads = 512, kStep = 0, kWidth = kVector<T>;  // fp32 values fill the registers
  using Kept = KeptFloats<T, kUnits>;
  const T* x;
  int64_t ld;
  bool vector;

  struct Row {
    const T *gate, *up;
    bool vector;
    __device__ __forceinline__ Row(const SiluMulInput& in, int64_t row, const RowSpan& span, RowShared&, Kept&)
        : gate(in.x + row * in.ld), up(gate + span.cols), vector(in.vector) {}
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
        for (int j = 0; j < kWidth; ++j) kept.value[i][j] = gated_silu(g[j], u[j]);
      }
    }
  };
};

}  // namespace

void silu_mul_quantize(const FloatMatrix& x, const CodeRange& range, const QuantizeParams& params,
                       const QuantizeOut& out, const Context& context) {
  with_float_type(x.type, "silu_mul_quantize", [&](auto element) {
    using T = decltype(element);
    const auto size = static_cast<int64_t>(sizeof(T));
    const int64_t cols = x.cols / 2;
    const SiluMulInput<T> in{static_cast<const T*>(x.data), x.ld,
                             is_aligned(x.data, x.ld * size, 16) && cols * size % 16 == 0};
    quantize_rows<T>("silu_mul_quantize", in, x.rows, cols, range, params, out, context);
  });
}

}  // namespace pyquant::cuda
