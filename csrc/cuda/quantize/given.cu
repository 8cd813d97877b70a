// Codes under scales that exist before the kernel that makes the codes starts: given by the caller ([1] or one a row),
// or one of the whole tensor, whose partial ranges a first kernel has written.
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/dynamic.h"
#include "cuda/quantize/held.cuh"
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

constexpr int kUnits = 8;

// How the blocks lie over the matrix: a chunk of a row is up to kUnits units of every thread.
struct GivenSpan {
  int step;     // between the units of a thread
  int columns;  // of a chunk
};

// blockIdx.x walks rows, blockIdx.y chunks of a row; with row sums there is one block a row at a time.
template <class T>
__global__ void __launch_bounds__(kBlock) quantize_given_kernel(Matrix<T> m, Given given, GivenSpan span, Codes to) {
  using Kept = KeptUnits<T, kUnits>;
  constexpr int kWidth = kVector<T>;
  __shared__ Range ranges[kBlock / 32];
  __shared__ int32_t counts[kBlock / 32];
  wait_for_predecessor();
  release_successor();
  write_zeros(to.zeros);
  Step step{1.f, 1.f, 0};
  if (given.parts) {
    Range range{};
    for (int i = threadIdx.x; i < given.part_count; i += blockDim.x) range = merged(range, given.parts[i]);
    step = step_of(reduce_block(range, ranges), given.symmetric, to.qmin, to.qmax);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
      given.params.scale[0] = step.scale;
      if (given.params.zero_point) given.params.zero_point[0] = step.zero_point;
    }
  } else if (!given.per_row && m.cols > 0) {
    step = step_at(given.scale, given.zero_point, 0);
  }
  const int first = static_cast<int>(threadIdx.x) * kWidth;
  for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x) {
    if (given.per_row && m.cols > 0) step = step_at(given.scale, given.zero_point, row);
    const T* from = m.x + row * m.ld;
    CodeWriter<Values::any> writer{Coder(step, to), false, to.row(row)};
    for (int64_t begin = int64_t{blockIdx.y} * span.columns; begin < to.ldq;
         begin += int64_t{gridDim.y} * span.columns) {
      const int cols = clipped(m.cols - begin, span.columns), room = clipped(to.ldq - begin, span.columns);
      const Chunk chunk{first, span.step, cols - first, room - first, cols % kWidth == 0, room > cols};
      Kept kept;
      kept.load(from + begin, chunk, m.vector);
      writer.codes = to.row(row) + (to.packed ? begin / 2 : begin);
      writer.put(to, chunk, kept);
    }
    if (to.row_sum) {
      const int32_t sum = sum_block(writer.sum, counts);
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
    constexpr int kWidth = kVector<T>;
    const int64_t fill = x.rows * out.ldq / kWidth >> 17;  // units for each of the threads that fill the device
    const int units = static_cast<int>(fill < 1 ? 1 : fill < kUnits ? fill : kUnits);
    const int threads = row_threads(x.rows, out.ldq, kWidth, units, kBlock);
    const GivenSpan span{threads * kWidth, threads * kWidth * units};
    const int64_t chunks = (out.ldq + span.columns - 1) / span.columns;
    const int64_t columns = out.row_sum || chunks < 1 ? 1 : chunks < kColumnBlocks ? chunks : kColumnBlocks;
    const int64_t most = most_rows / columns < 1 ? 1 : most_rows / columns;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(x.rows < 1      ? 1
                                            : x.rows < most ? x.rows
                                                            : most),
                      static_cast<unsigned>(columns));
    shape.block = dim3(static_cast<unsigned>(threads));
    shape.overlaps = true;
    launch<quantize_given_kernel<T>>("quantize", shape, context, matrix_of<T>(x), given, span,
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
