// Codes -> real numbers (docs/numerics.md 2.3).
#include "cuda/elements.cuh"
#include "cuda/launch.h"

namespace pyquant::cuda {

namespace {

constexpr int kBlock = 256;

// Index of the scale of element (row, column).
struct ScaleIndex {
  int64_t row_step, group_size;  // group_size 0: no groups
  __device__ __forceinline__ int64_t operator()(int64_t row, int64_t column) const {
    return row * row_step + (group_size ? column / group_size : 0);
  }
};

ScaleIndex scale_index(Granularity granularity, int64_t cols, int64_t group_size) {
  switch (granularity) {
    case Granularity::rows: return {1, 0};
    case Granularity::groups: return {cols / group_size, group_size};
    default: return {0, 0};
  }
}

template <class Q, class T>
__global__ void __launch_bounds__(kBlock)
    dequantize_kernel(const Q* q, int64_t rows, int64_t cols, int64_t ld, ScaleIndex index, const float* scale,
                      const int32_t* zero_point, T* out) {
  const int64_t row = blockIdx.x;
  for (int64_t c = static_cast<int64_t>(blockIdx.y) * kBlock + threadIdx.x; c < cols;
       c += int64_t{kBlock} * gridDim.y) {
    const int64_t s = index(row, c);
    out[row * cols + c] = narrow<T>(real_from_code(q[row * ld + c], scale[s], zero_point ? zero_point[s] : 0));
  }
}

LaunchShape elementwise(int64_t rows, int64_t cols) {
  const int64_t columns = (cols + kBlock - 1) / kBlock;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows), static_cast<unsigned>(columns < 1024 ? columns : 1024));
  shape.block = dim3(kBlock);
  return shape;
}

}  // namespace

void dequantize(const void* q, DType q_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                int64_t group_size, const float* scale, const int32_t* zero_point, void* out, DType out_type,
                const Context& context) {
  if (rows == 0 || cols == 0) return;
  with_float_type(out_type, "dequantize", [&](auto element) {
    using T = decltype(element);
    const ScaleIndex index = scale_index(granularity, cols, group_size);
    if (q_type == DType::u8)
      launch<dequantize_kernel<uint8_t, T>>("dequantize", elementwise(rows, cols), context,
                                            static_cast<const uint8_t*>(q), rows, cols, ld, index, scale, zero_point,
                                            static_cast<T*>(out));
    else
      launch<dequantize_kernel<int8_t, T>>("dequantize", elementwise(rows, cols), context,
                                           static_cast<const int8_t*>(q), rows, cols, ld, index, scale, zero_point,
                                           static_cast<T*>(out));
  });
}

}  // namespace pyquant::cuda
