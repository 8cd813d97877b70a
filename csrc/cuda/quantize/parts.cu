// The range of a whole matrix, in parts: for quantisers that have one scale for all of it.
#include "cuda/quantize/parts.cuh"

namespace pyquant::cuda {
namespace {

// One range a block; blockIdx.y walks rows, blockIdx.x units of a row.
template <class T>
__global__ void __launch_bounds__(kBlock) range_parts_kernel(Matrix<T> m, bool symmetric, Range* parts) {
  constexpr int kWidth = kVector<T>;
  __shared__ Range per_warp[kBlock / 32];
  wait_for_predecessor();
  release_successor();
  RangeOf<T> range;
  for (int64_t row = blockIdx.y; row < m.rows; row += gridDim.y) {
    const T* from = m.x + row * m.ld;
    for (int64_t u = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x; u * kWidth < m.cols;
         u += int64_t{kBlock} * gridDim.x) {
      range.widen(load_unit(from + u * kWidth, clipped(m.cols - u * kWidth, kWidth), m.vector), symmetric);
    }
  }
  const Range all = reduce_block(range.ends(), per_warp);
  if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = all;
}

}  // namespace

int launch_range_parts(const char* name, const FloatMatrix& x, bool symmetric, Range* parts, const Context& context) {
  const FloatMatrix all = is_dense(x) ? flattened(x) : x;
  int count = 0;
  with_float_type(x.type, name, [&](auto element) {
    using T = decltype(element);
    const int64_t columns = blocks_of(all.cols, kVector<T>, kParts), rows = all.rows < 1 ? 1 : all.rows;
    LaunchShape shape;
    shape.grid =
        dim3(static_cast<unsigned>(columns), static_cast<unsigned>(rows < kParts / columns ? rows : kParts / columns));
    shape.block = dim3(kBlock);
    shape.overlaps = true;
    count = static_cast<int>(shape.grid.x * shape.grid.y);
    launch<range_parts_kernel<T>>(name, shape, context, matrix_of<T>(all), symmetric, parts);
  });
  return count;
}

void launch_row_range_parts(const char* name, const FloatMatrix& x, bool symmetric, Range* parts, int count,
                            const Context& context) {
  constexpr int64_t kMostRows = 65535;  // of a launch, which walks a row of blocks for each
  with_float_type(x.type, name, [&](auto element) {
    using T = decltype(element);
    for (int64_t first = 0; first < x.rows; first += kMostRows) {
      FloatMatrix some = x;
      some.data = static_cast<const T*>(x.data) + first * x.ld;
      some.rows = x.rows - first < kMostRows ? x.rows - first : kMostRows;
      LaunchShape shape;
      shape.grid = dim3(static_cast<unsigned>(count), static_cast<unsigned>(some.rows));
      shape.block = dim3(kBlock);
      shape.overlaps = true;
      launch<range_parts_kernel<T>>(name, shape, context, matrix_of<T>(some), symmetric, parts + first * count);
    }
  });
}

}  // namespace pyquant::cuda
