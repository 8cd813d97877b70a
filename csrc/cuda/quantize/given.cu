// Codes under scales that exist before the kernel that makes the codes starts: given by the caller ([1] or one a row),
// or one of the whole tensor, whose partial ranges a first kernel has written.
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/codes.cuh"
#include "cuda/quantize/dynamic.h"
#include "cuda/quantize/parts.cuh"

namespace pyquant::cuda {

namespace {

struct Given {
  const float* scale;
  const int32_t* zero_point;
  bool per_row;
  const Range* parts;  // when not null: the step comes from these and is written to `params`
  int part_count;
  bool symmetric;
  QuantizeParams params;
};

// blockIdx.x walks rows, blockIdx.y units of a row; with row sums there is one block a row at a time.
template <class T>
__global__ void __launch_bounds__(kBlock) quantize_given_kernel(Matrix<T> m, Given given, Codes to) {
  constexpr int kWidth = kVector<T>;
  __shared__ Range ranges[kBlock / 32];
  __shared__ int32_t counts[kBlock / 32];
  wait_for_predecessor();
  release_successor();
  write_zeros(to.zeros);
  Step step{1.f, 1.f, 0};
  if (given.parts) {
    Range range;
    for (int i = threadIdx.x; i < given.part_count; i += kBlock) range = merged(range, given.parts[i]);
    step = step_of(reduce_block(range, ranges), given.symmetric, to.qmin, to.qmax);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
      given.params.scale[0] = step.scale;
      if (given.params.zero_point) given.params.zero_point[0] = step.zero_point;
    }
  } else if (!given.per_row && m.cols > 0) {
    step = step_at(given.scale, given.zero_point, 0);
  }
  for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x) {
    if (given.per_row && m.cols > 0) step = step_at(given.scale, given.zero_point, row);
    const Coder coder(step, to);
    const T* from = m.x + row * m.ld;
    uint8_t* codes = to.row(row);
    int32_t sum = 0;
    for (int64_t u = static_cast<int64_t>(blockIdx.y) * kBlock + threadIdx.x; u * kWidth < to.ldq;
         u += int64_t{kBlock} * gridDim.y) {
      const int64_t column = u * kWidth;
      const int valid = clipped(m.cols - column, kWidth);
      float v[kWidth];
      uint32_t words[kWidth / 4];
      widen_unit(load_unit(from + column, valid, m.vector), v);
      coder.code<Values::any>(v, words);
      store_codes(codes, column, clipped(to.ldq - column, kWidth), valid, to, words);
      if (to.row_sum) sum = coder.sum(words, sum);
    }
    if (to.row_sum) {
      sum = sum_block(sum, counts);
      if (threadIdx.x == 0) to.row_sum[row] = sum;
      __syncthreads();  // counts are free again
    }
  }
}

void launch_given(FloatMatrix x, const Given& given, const CodeRange& range, QuantizeOut out, int64_t most_rows,
                  const Context& context) {
  if (!given.per_row && is_dense(x) && !out.row_sum && (out.ldq == x.cols || x.rows <= 1)) {
    if (x.rows > 1) out.ldq = x.rows * x.cols;
    x = x.rows > 1 ? flattened(x) : x;
  }
  with_float_type(x.type, "quantize", [&](auto element) {
    using T = decltype(element);
    const int64_t columns = out.row_sum ? 1 : blocks_of(out.ldq, kVector<T>, kColumnBlocks);
    const int64_t most = most_rows / columns < 1 ? 1 : most_rows / columns;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(x.rows < 1      ? 1
                                            : x.rows < most ? x.rows
                                                            : most),
                      static_cast<unsigned>(columns));
    shape.block = dim3(kBlock);
    shape.overlaps = true;
    launch<quantize_given_kernel<T>>("quantize", shape, context, matrix_of<T>(x), given,
                                     codes_of<T>(out, range, x.rows, x.cols));
  });
}

}  // namespace

void quantize(const FloatMatrix& x, Granularity granularity, int64_t group_size, const float* scale,
              const int32_t* zero_point, const CodeRange& range, const QuantizeOut& out, const Context& context) {
  if (x.rows == 0 || (x.cols == 0 && out.ldq == 0 && !out.row_sum)) return;
  if (granularity == Granularity::groups && x.cols > 0)
    return quantize_per_group(x, group_size, scale, zero_point, range, {}, out, context);
  const Given given{scale, zero_point, granularity == Granularity::rows, nullptr, 0, range.symmetric, {}};
  QuantizeOut to = out;
  if (granularity == Granularity::groups) to.row_sum = nullptr;  // no column, so no group
  launch_given(x, given, range, to, int64_t{1} << 30, context);
}

void quantize_per_tensor(const FloatMatrix& x, const CodeRange& range, const QuantizeParams& params,
                         const QuantizeOut& out, void* workspace, const Context& context) {
  auto* parts = static_cast<Range*>(workspace);
  const int count = launch_range_parts("quantize_dynamic", x, range.symmetric, parts, context);
  const Given given{nullptr, nullptr, false, parts, count, range.symmetric, params};
  launch_given(x, given, range, out, 2048, context);  // few blocks: each one reads all parts
}

void quantize_dynamic(const FloatMatrix& x, Granularity granularity, int64_t group_size, const CodeRange& range,
                      const QuantizeParams& params, const QuantizeOut& out, void* workspace, const Context& context) {
  if (granularity == Granularity::tensor) return quantize_per_tensor(x, range, params, out, workspace, context);
  if (granularity == Granularity::rows) return quantize_per_token(x, range, params, out, context);
  if (x.cols > 0) return quantize_per_group(x, group_size, nullptr, nullptr, range, params, out, context);
  quantize(x, Granularity::groups, group_size, nullptr, nullptr, range, out, context);  // no group: only padding
}

}  // namespace pyquant::cuda
