// The Hadamard transform in front of the quantiser, in one kernel (docs/numerics.md 15): a row is read once, turned in
// shared memory, and its codes are made of the float32 sums; or the sums are written as they are.
#include "cuda/quantize/hadamard.cuh"

#include "cuda/quantize/rows.cuh"

namespace pyquant::cuda {

namespace {

// The range of floats: where a chip has it, one instruction that takes the larger magnitude.
class TurnedRange {
 public:
  template <bool kSymmetric>
  __device__ __forceinline__ void widen(float x) {
    const uint32_t word = __float_as_uint(x);
    if constexpr (!kSymmetric) {
      low_ = Extremes<float>::least(low_, word);
      high_ = Extremes<float>::most(high_, word);
    } else {
#if __CUDA_ARCH__ >= 860
      float larger;  // of the magnitudes, with a sign that says nothing
      asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(larger) : "f"(__uint_as_float(high_)), "f"(x));
      high_ = __float_as_uint(larger);
#else
      high_ = Extremes<float>::most(high_, __float_as_uint(fabsf(x)));
#endif
    }
  }
  __device__ __forceinline__ Range ends() const { return {low_ & 0x7fffffffu, high_ & 0x7fffffffu}; }

 private:
  uint32_t low_ = 0, high_ = 0;
};

// The sums of a thread.
template <class T>
struct KeptTurned : KeptFloats<T, kTurnedUnits, kTurned> {
  using Range = TurnedRange;
  static constexpr int kStep = kTurnedApart;
  __device__ __forceinline__ void widen(TurnedRange& range, bool symmetric) const {
    if (symmetric)  // asked once, not an element
      widen_all<true>(range);
    else
      widen_all<false>(range);
  }

 private:
  template <bool kSymmetric>
  __device__ __forceinline__ void widen_all(TurnedRange& range) const {
#pragma unroll
    for (int i = 0; i < kTurnedUnits; ++i)
#pragma unroll
      for (int j = 0; j < kTurned; ++j) range.template widen<kSymmetric>(this->value[i][j]);
  }
};

template <class T, bool OneChunk>
struct HadamardInput {
  using Kept = KeptTurned<T>;
  static constexpr int kUnits = Kept::kUnits, kThreads = 512, kStep = Kept::kStep;
  static constexpr bool kByWarp = true, kOneChunk = OneChunk;
  const T* x;
  int64_t ld;
  bool vector;
  int base, log2;
  float scale;
  uint32_t least, between;  // bits of the ends of ranges with which the scale is part of the step

  struct Row {
    TurnedRow<T, OneChunk> row;
    float scale;
    uint32_t least, between;
    bool folds = false;  // the scale is part of the step
    __device__ __forceinline__ Row(const HadamardInput& in, int64_t index, const RowSpan& span, RowShared&, Kept&)
        : row(in.x + index * in.ld, in.vector, span.cols, in.base, in.log2, span.step == kUnits * kStep, memory()),
          scale(in.scale),
          least(in.least),
          between(in.between) {}
    // The sums, without the scale, by which finish() multiplies.
    __device__ __forceinline__ void load(const Chunk& chunk, Kept& kept) const {
      row.read(chunk.first, chunk.left, kept.value);
    }
    // Rounding keeps the order of numbers: the ends of the products are the products of the ends.
    __device__ __forceinline__ Range range(const Range& sums) const {
      return {__float_as_uint(fmul(__uint_as_float(sums.below), scale)),
              __float_as_uint(fmul(__uint_as_float(sums.above), scale))};
    }
    // A power of two may as well multiply the reciprocal of the step, where no number on the way is too small or too
    // large to be exact (what is below 2^-26 of the largest has code 0 whatever its last bits are).
    __device__ __forceinline__ Step inner_step(Step step, const Range& ends) {
      folds = (ends.below > ends.above ? ends.below : ends.above) - least < between;
      if (folds) step.recip = fmul(step.recip, scale);
      return step;
    }
    __device__ __forceinline__ void finish(Kept& kept) const {
      if (!folds) multiply(kept, [](float product) { return product; });
    }
    template <class Of>
    __device__ __forceinline__ void multiply(Kept& kept, Of of) const {
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
#pragma unroll
        for (int j = 0; j < kTurned; ++j) kept.value[i][j] = of(fmul(kept.value[i][j], scale));
    }
  };

  static __device__ __forceinline__ float* memory() {
    extern __shared__ __align__(128) float turned_row[];
    return turned_row;
  }
};

template <class T, class Input = HadamardInput<T, false>>
__global__ void __launch_bounds__(Input::kThreads, 1)
    hadamard_rows_kernel(Input in, RowSpan span, T* out, bool vector) {
  constexpr int kPer = kVector<T>;
  __shared__ RowShared shared;
  wait_for_predecessor();
  release_successor();
  typename Input::Kept kept;
  const typename Input::Row row(in, blockIdx.x, span, shared, kept);
  // Back to where they were, so that neighbouring threads write neighbouring units.
  for (int index = 0; index < span.chunks; ++index) {
    const Chunk chunk = span.chunk<Input>(index);
    row.load(chunk, kept);
    row.multiply(kept, [](float product) { return fadd(product, 0.f); });  // zeros of either sign become +0
#pragma unroll
    for (int i = 0; i < Input::kUnits; ++i)
      if (i * chunk.step < chunk.left) row.row.put_back(chunk.first + i * chunk.step, kept.value[i]);
  }
  __syncthreads();
  T* to = out + static_cast<int64_t>(blockIdx.x) * span.cols;
  for (int column = static_cast<int>(threadIdx.x) * kPer; column < span.cols;
       column += static_cast<int>(blockDim.x) * kPer) {
    float v[kPer];
#pragma unroll
    for (int j = 0; j < kPer; j += 4) row.row.read_back(column + j, v + j);
    store_unit<T>(to + column, span.cols - column, vector, narrow_unit<T>(v));
  }
}

// Shared memory of a row, where the device has that much.
int shared_bytes_of(const char* name, int64_t columns, const Context& context) {
  DeviceGuard guard(context.device);
  int most = 0;
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, context.device),
        "cudaDeviceGetAttribute", context.device);
  const int64_t bytes = turned_floats(columns) * static_cast<int64_t>(sizeof(float)),
                room = most - static_cast<int64_t>(sizeof(RowShared));
  if (columns > (int64_t{1} << 20) || bytes > room)
    throw std::runtime_error(std::string(name) + ": rows of " + std::to_string(columns) + " columns, " +
                             std::to_string(bytes) +
                             " bytes of shared memory; allowed on this device: " + std::to_string(room));
  return static_cast<int>(bytes);
}

template <class T, bool OneChunk>
HadamardInput<T, OneChunk> input_of(const FloatMatrix& x, const Hadamard& by) {
  const bool vector = is_aligned(x.data, x.rows > 1 ? x.ld * static_cast<int64_t>(sizeof(T)) : 0, 16);
  const uint32_t bits = bits_from_float(by.scale);
  const bool is_power = (bits & 0x7fffff) == 0 && by.scale >= 0x1p-24f && by.scale <= 0x1p24f;
  constexpr uint32_t kLeast = (127 - 80) << 23, kMost = (127 + 80) << 23;  // 2^-80, 2^80
  return {static_cast<const T*>(x.data), x.ld, vector, by.order.base, by.order.log2, by.scale, kLeast,
          is_power ? kMost - kLeast : 0};
}

}  // namespace

void hadamard_quantize(const FloatMatrix& x, const Hadamard& by, const CodeRange& range, const QuantizeParams& params,
                       const QuantizeOut& out, const Context& context) {
  const int shared_bytes = shared_bytes_of("hadamard_quantize", x.cols, context);
  with_float_type(x.type, "hadamard_quantize", [&](auto element) {
    using T = decltype(element);
    const auto launch = [&](auto one_chunk) {
      quantize_rows<T>("hadamard_quantize", input_of<T, one_chunk>(x, by), x.rows, x.cols, range, params, out, context,
                       shared_bytes);
    };
    using Input = HadamardInput<T, false>;
    if constexpr (!std::is_same_v<T, float>)  // floats are rare, and nvcc takes five seconds for each instance
      if (out.ldq <= Input::kThreads * Input::kUnits * Input::Kept::kWidth) return launch(std::true_type());
    launch(std::false_type());
  });
}

void hadamard_transform(const FloatMatrix& x, const Hadamard& by, void* out, const Context& context) {
  const int shared_bytes = shared_bytes_of("hadamard_transform", x.cols, context);
  if (x.rows == 0) return;
  with_float_type(x.type, "hadamard_transform", [&](auto element) {
    using T = decltype(element);
    using Input = HadamardInput<T, false>;
    const auto block = row_block_of<Input>(x.rows, x.cols, x.cols);
    LaunchShape shape;
    shape.grid = grid_of("hadamard_transform", x.rows);
    shape.block = dim3(static_cast<unsigned>(block.threads));
    shape.shared_bytes = shared_bytes;
    shape.overlaps = true;
    const bool vector = is_aligned(out, x.rows > 1 ? x.cols * static_cast<int64_t>(sizeof(T)) : 0, 16);
    launch<hadamard_rows_kernel<T>>("hadamard_transform", shape, context, input_of<T, false>(x, by), block.span,
                                    static_cast<T*>(out), vector);
  });
}

}  // namespace pyquant::cuda
