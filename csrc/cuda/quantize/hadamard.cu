// The Hadamard transform in front of the quantiser, in one kernel (docs/numerics.md 15): a row is read once, turned in
// shared memory, and its codes are made of the float32 sums; or the sums are written as they are.
#include "cuda/quantize/hadamard.cuh"

#include "cuda/quantize/rows.cuh"

namespace pyquant::cuda {

namespace {

template <class T>
struct HadamardInput {
  static constexpr int kUnits = 4, kThreads = 512, kStep = 0;
  using Kept = KeptFloats<T, kUnits, kTurned>;
  const T* x;
  int64_t ld;
  bool vector;
  int base, log2;
  float factor;

  struct Row {
    TurnedRow<T> row;
    float factor;
    bool folds = false;  // the factor is part of the step
    __device__ __forceinline__ Row(const HadamardInput& in, int64_t index, const RowSpan& span, RowShared&, Kept&)
        : row(in.x + index * in.ld, in.vector, span.cols, in.base, in.log2, memory()), factor(in.factor) {}
    // The sums, without the factor, by which finish() multiplies.
    __device__ __forceinline__ void load(const Chunk& chunk, Kept& kept) const {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (i * chunk.step < chunk.left) {
          row.read(chunk.first + i * chunk.step, kept.value[i]);
        } else {
#pragma unroll
          for (int j = 0; j < kTurned; ++j) kept.value[i][j] = 0.f;
        }
      }
    }
    // Rounding keeps the order of numbers: the ends of the products are the products of the ends.
    __device__ __forceinline__ Range range(const Range& sums) const {
      return {__float_as_uint(fmul(__uint_as_float(sums.below), factor)),
              __float_as_uint(fmul(__uint_as_float(sums.above), factor))};
    }
    // A power of two may as well multiply the reciprocal of the step, where no number on the way is too small or too
    // large to be exact (what is below 2^-26 of the largest has code 0 whatever its last bits are).
    __device__ __forceinline__ Step inner_step(Step step, const Range& ends) {
      const float most = __uint_as_float(ends.below > ends.above ? ends.below : ends.above);
      folds = (__float_as_uint(factor) & 0x7fffff) == 0 && most > 0x1p-80f && most < 0x1p80f;
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
  return {static_cast<const T*>(x.data), x.ld, vector, order.base, order.log2, hadamard_factor(order)};
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
    const auto block = row_block(x.rows, x.cols, x.cols, kTurned, Input::kUnits, Input::kThreads);
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(x.rows));
    shape.block = dim3(static_cast<unsigned>(block.threads));
    shape.shared_bytes = shared_bytes;
    shape.overlaps = true;
    const bool vector = is_aligned(out, x.rows > 1 ? x.cols * static_cast<int64_t>(sizeof(T)) : 0, 16);
    launch<hadamard_rows_kernel<T>>("hadamard_transform", shape, context, input_of<T>(x, order), block.span,
                                    static_cast<T*>(out), vector);
  });
}

}  // namespace pyquant::cuda
