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

// The sums of a thread: units 32 * kTurned columns apart.
template <class T>
struct KeptTurned : KeptFloats<T, 4, kTurned> {
  using Range = TurnedRange;
  static constexpr int kStep = 32 * kTurned;
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
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < kTurned; ++j) range.template widen<kSymmetric>(this->value[i][j]);
  }
};

template <class T>
struct HadamardInput {
  using Kept = KeptTurned<T>;
  static constexpr int kUnits = Kept::kUnits, kThreads = 512, kStep = Kept::kStep;
  static constexpr bool kByWarp = true;
  const T* x;
  int64_t ld;
  bool vector;
  int base, log2;
  float factor;
  int straight;             // TurnedRow::straight_from
  uint32_t least, between;  // bits of the ends of ranges with which the factor is part of the step

  struct Row {
    TurnedRow<T> row;
    float factor;
    int straight;
    uint32_t least, between;
    bool folds = false;  // the factor is part of the step
    __device__ __forceinline__ Row(const HadamardInput& in, int64_t index, const RowSpan& span, RowShared&, Kept&)
        : row(in.x + index * in.ld, in.vector, span.cols, in.base, in.log2, memory()),
          factor(in.factor),
          straight(in.straight),
          least(in.least),
          between(in.between) {}
    // The sums, without the factor, by which finish() multiplies.
    __device__ __forceinline__ void load(const Chunk& chunk, Kept& kept) const {
      if ((kUnits - 1) * kStep >= chunk.left) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i)
#pragma unroll
          for (int j = 0; j < kTurned; ++j) kept.value[i][j] = 0.f;
      }
      row.template read<kUnits, kStep>(chunk.first, chunk.left, straight, [&](int i, const float (&v)[kTurned]) {
#pragma unroll
        for (int j = 0; j < kTurned; ++j) kept.value[i][j] = v[j];
      });
    }
    // Rounding keeps the order of numbers: the ends of the products are the products of the ends.
    __device__ __forceinline__ Range range(const Range& sums) const {
      return {__float_as_uint(fmul(__uint_as_float(sums.below), factor)),
              __float_as_uint(fmul(__uint_as_float(sums.above), factor))};
    }
    // A power of two may as well multiply the reciprocal of the step, where no number on the way is too small or too
    // large to be exact (what is below 2^-26 of the largest has code 0 whatever its last bits are).
    __device__ __forceinline__ Step inner_step(Step step, const Range& ends) {
      folds = (ends.below > ends.above ? ends.below : ends.above) - least < between;
      if (folds) step.recip = fmul(step.recip, factor);
      return step;
    }
    __device__ __forceinline__ void finish(Kept& kept) const {
      if (!folds) scale(kept);
    }
    __device__ __forceinline__ void scale(Kept& kept) const {
#pragma unroll
      for (int i = 0; i < kUnits; ++i)
#pragma unroll
        for (int j = 0; j < kTurned; ++j) kept.value[i][j] = fmul(kept.value[i][j], factor);
    }
  };

  static __device__ __forceinline__ float* memory() {
    extern __shared__ __align__(128) float turned_row[];
    return turned_row;
  }
};

template <class T>
__global__ void __launch_bounds__(HadamardInput<T>::kThreads, 1)
    hadamard_rows_kernel(HadamardInput<T> in, RowSpan span, T* out, bool vector) {
  constexpr int kPer = kVector<T>;
  __shared__ RowShared shared;
  wait_for_predecessor();
  release_successor();
  typename HadamardInput<T>::Kept kept;
  const typename HadamardInput<T>::Row row(in, blockIdx.x, span, shared, kept);
  // Back to where they were, so that neighbouring threads write neighbouring units.
  for (int index = 0; index < span.chunks; ++index) {
    const Chunk chunk = span.chunk<HadamardInput<T>>(index);
    row.load(chunk, kept);
    row.scale(kept);
#pragma unroll
    for (int i = 0; i < HadamardInput<T>::kUnits; ++i)
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

template <class T>
HadamardInput<T> input_of(const FloatMatrix& x, HadamardOrder order) {
  const bool vector = is_aligned(x.data, x.rows > 1 ? x.ld * static_cast<int64_t>(sizeof(T)) : 0, 16);
  const int straight = TurnedRow<T>::template straight_from<KeptTurned<T>::kUnits, KeptTurned<T>::kStep>(order.log2);
  const bool is_power = order.base == 1 && order.log2 % 2 == 0;            // 1 / sqrt(n)
  constexpr uint32_t kLeast = (127 - 80) << 23, kMost = (127 + 80) << 23;  // 2^-80, 2^80
  return {static_cast<const T*>(x.data), x.ld, vector, order.base, order.log2, hadamard_factor(order), straight, kLeast,
          is_power ? kMost - kLeast : 0};
}

}  // namespace

void hadamard_quantize(const FloatMatrix& x, HadamardOrder order, const CodeRange& range, const QuantizeParams& params,
                       const QuantizeOut& out, const Context& context) {
  const int shared_bytes = shared_bytes_of("hadamard_quantize", x.cols, context);
  with_float_type(x.type, "hadamard_quantize", [&](auto element) {
    using T = decltype(element);
    quantize_rows<T>("hadamard_quantize", input_of<T>(x, order), x.rows, x.cols, range, params, out, context,
                     shared_bytes);
  });
}

void hadamard_transform(const FloatMatrix& x, HadamardOrder order, void* out, const Context& context) {
  const int shared_bytes = shared_bytes_of("hadamard_transform", x.cols, context);
  if (x.rows == 0) return;
  with_float_type(x.type, "hadamard_transform", [&](auto element) {
    using T = decltype(element);
    using Input = HadamardInput<T>;
    const auto block = row_block_of<Input>(x.rows, x.cols, x.cols);
    LaunchShape shape;
    shape.grid = grid_of("hadamard_transform", x.rows);
    shape.block = dim3(static_cast<unsigned>(block.threads));
    shape.shared_bytes = shared_bytes;
    shape.overlaps = true;
    const bool vector = is_aligned(out, x.rows > 1 ? x.cols * static_cast<int64_t>(sizeof(T)) : 0, 16);
    launch<hadamard_rows_kernel<T>>("hadamard_transform", shape, context, input_of<T>(x, order), block.span,
                                    static_cast<T*>(out), vector);
  });
}

}  // namespace pyquant::cuda
