// Fake quantisation, forward: every element is read and written once, its mask as one bit. Rows whose length is no
// multiple of eight share bytes of the mask and take a kernel of their own.
#include "cuda/divisor.cuh"
#include "cuda/grid.h"
#include "cuda/quantize/fake.cuh"
#include "cuda/quantize/parts.cuh"
#include "cuda/quantize/rows.cuh"

namespace pyquant::cuda {

namespace {

// Where the step of an element comes from.
struct FakeGiven {
  const float* scale;
  const int32_t* zero_point;
  int64_t row_step;    // scales from row to row: 0 for one scale
  int64_t group_size;  // columns that share one: at least cols without groups
  int32_t qmin, qmax;
  const Range* parts;  // when not null: one step, of these, which is written to `params`
  int part_count;
  bool symmetric;
  QuantizeParams params;
  __device__ __forceinline__ FakeStep at(int64_t row, int64_t column) const {
    const int64_t group = column < group_size ? 0 : static_cast<uint32_t>(column) / static_cast<uint32_t>(group_size);
    return fake_step(step_at(scale, zero_point, row * row_step + group), qmin, qmax);
  }
};

template <class T>
struct FakeOut {
  T* y;
  uint8_t* mask;  // null: no mask is written
  bool vector;
};

// blockIdx.x walks rows, blockIdx.y units of a row. cols is a multiple of 8, or there is one row.
template <class T>
__global__ void __launch_bounds__(kBlock, 1) fake_rows_kernel(Matrix<T> m, FakeGiven given, FakeOut<T> to) {
  constexpr int kWidth = kVector<T>;
  __shared__ Range ranges[kBlock / 32];
  wait_for_predecessor();
  release_successor();
  FakeStep step{};
  if (given.parts) {
    Range range{};
    for (int i = threadIdx.x; i < given.part_count; i += kBlock) range = merged(range, given.parts[i]);
    const Step own = step_of(reduce_block(range, ranges), given.symmetric, given.qmin, given.qmax);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
      given.params.scale[0] = own.scale;
      if (given.params.zero_point) given.params.zero_point[0] = own.zero_point;
    }
    step = fake_step(own, given.qmin, given.qmax);
  }
  const bool grouped = given.group_size < m.cols, split = given.group_size % kWidth != 0;
  for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x) {
    const T* from = m.x + row * m.ld;
    if (!given.parts && !grouped && m.cols > 0) step = given.at(row, 0);
    // The shuffle of byte_of needs whole warps: the loop ends for a block at once.
    for (int64_t first = static_cast<int64_t>(blockIdx.y) * kBlock; first * kWidth < m.cols;
         first += int64_t{kBlock} * gridDim.y) {
      const int64_t c = (first + threadIdx.x) * kWidth, valid = m.cols - c;
      uint32_t bits = 0;
      if (valid > 0) {
        const int have = clipped(valid, kWidth);
        float v[kWidth];
        widen_unit(load_unit(from + c, have, m.vector), v);
        if (grouped && split) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            if (j >= valid) continue;
            float one[1] = {v[j]};
            bits |= fake_unit(one, 1, given.at(row, c + j)) << j;
            v[j] = one[0];
          }
        } else {
          if (grouped) step = given.at(row, c);
          bits = fake_unit(v, valid, step);
        }
        store_unit(to.y + row * m.cols + c, have, to.vector, narrow_unit<T>(v));
      }
      const uint32_t byte = byte_of<kWidth>(bits);
      if (to.mask && valid > 0 && c % 8 == 0) to.mask[(row * m.cols + c) / 8] = static_cast<uint8_t>(byte);
    }
  }
}

// Any length of a row: a thread owns a byte of the mask, its elements may belong to two rows and many groups.
template <class T>
__global__ void __launch_bounds__(kBlock)
    fake_bytes_kernel(Matrix<T> m, Divisor columns, FakeGiven given, FakeOut<T> to) {
  wait_for_predecessor();
  release_successor();
  const int64_t count = m.rows * m.cols, first = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) * 8;
  if (first >= count) return;
  int64_t row = columns.quotient(first), column = first - row * m.cols;
  uint32_t bits = 0;
  for (int j = 0; j < 8 && first + j < count; ++j) {
    float one[1] = {widen(m.x[row * m.ld + column])};
    bits |= fake_unit(one, 1, given.at(row, column)) << j;
    to.y[first + j] = narrow<T>(one[0]);
    if (++column == m.cols) {
      column = 0;
      ++row;
    }
  }
  to.mask[first / 8] = static_cast<uint8_t>(bits);
}

// A scale a row from the row itself (rows.cuh).
template <class T>
struct RowValues {
  T* y;
  int64_t ld;
  bool vector;
  struct Row {
    FakeStep step;
    T* y;
    __device__ __forceinline__ void open(const RowValues& out, int64_t row, const Step& own, const CodeRange& range) {
      step = fake_step(own, range.qmin, range.qmax);
      y = out.y + row * out.ld;
    }
    template <class Kept>
    __device__ __forceinline__ void put(const RowValues& out, const Chunk& chunk, const Kept& kept) {
#pragma unroll
      for (int i = 0; i < Kept::kUnits; ++i) {
        const int column = i * chunk.step, valid = chunk.left - column;
        if (valid <= 0) continue;
        float v[Kept::kWidth];
        kept.values(i, v);
        fake_unit(v, valid, step);
        store_unit(y + chunk.first + column, valid, out.vector, narrow_unit<T>(v));
      }
    }
    __device__ __forceinline__ void close(const RowValues&, int64_t, RowShared&) const {}
  };
};

// A scale a group from the group itself: 1 to 32 threads, and what they loaded first stays in registers (groups.cu).
template <class T>
__global__ void __launch_bounds__(kBlock)
    fake_dynamic_groups_kernel(Matrix<T> m, Divisor per_row, int64_t size, int lane_shift, CodeRange limits,
                               QuantizeParams params, FakeOut<T> to) {
  constexpr int kWidth = kVector<T>;
  wait_for_predecessor();
  release_successor();
  const int lanes = 1 << lane_shift, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) >> lane_shift;
  const bool exists = group < m.rows * per_row.by;  // the shuffles below need every thread of the warp
  const int64_t own = exists ? size : 0;
  const int64_t row = exists ? per_row.quotient(group) : 0;
  const T* from = m.x + row * m.ld + (exists ? group - row * per_row.by : 0) * size;
  const auto load = [&](int64_t column) { return load_unit(from + column, clipped(own - column, kWidth), m.vector); };
  Unit<T> unit = load(lane * kWidth);
  RangeOf<T> range;
  range.widen(unit, limits.symmetric);
  for (int64_t c = static_cast<int64_t>(lane + lanes) * kWidth; c < own; c += lanes * kWidth)
    range.widen(load(c), limits.symmetric);
  const Step step =
      step_of(reduce_lanes(range.ends(), lanes, limits.symmetric), limits.symmetric, limits.qmin, limits.qmax);
  if (exists && lane == 0) {
    params.scale[group] = step.scale;
    if (params.zero_point) params.zero_point[group] = step.zero_point;
  }
  const FakeStep fake = fake_step(step, limits.qmin, limits.qmax);
  for (int64_t c = static_cast<int64_t>(lane) * kWidth; c < own; c += lanes * kWidth) {
    if (c >= lanes * kWidth) unit = load(c);
    const int valid = clipped(own - c, kWidth);
    float v[kWidth];
    widen_unit(unit, v);
    fake_unit(v, valid, fake);
    store_unit(to.y + group * size + c, valid, to.vector, narrow_unit<T>(v));
  }
}

LaunchShape over(int64_t blocks, int64_t columns = 1) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(columns));
  shape.block = dim3(kBlock);
  shape.overlaps = true;
  return shape;
}

template <class T>
FakeOut<T> out_of(void* y, uint8_t* mask, int64_t run) {
  return {static_cast<T*>(y), mask, is_aligned(y, run * static_cast<int64_t>(sizeof(T)), 16)};
}

void launch_given(const char* name, FloatMatrix x, const FakeGiven& given, void* y, uint8_t* mask, int64_t most_rows,
                  const Context& context) {
  if (given.row_step == 0 && is_dense(x)) x = flattened(x);
  with_float_type(x.type, name, [&](auto element) {
    using T = decltype(element);
    const FakeOut<T> to = out_of<T>(y, mask, x.rows > 1 ? x.cols : 0);
    if (mask && x.rows > 1 && x.cols % 8 != 0) {
      const int64_t bytes = (x.rows * x.cols + 7) / 8;
      return launch<fake_bytes_kernel<T>>(name, over((bytes + kBlock - 1) / kBlock), context, matrix_of<T>(x),
                                          Divisor(x.cols), given, to);
    }
    const int64_t columns = blocks_of(x.cols, kVector<T>, kColumnBlocks);
    const int64_t most = most_rows / columns < 1 ? 1 : most_rows / columns;
    launch<fake_rows_kernel<T>>(name, over(x.rows < most ? x.rows : most, columns), context, matrix_of<T>(x), given,
                                to);
  });
}

}  // namespace

void fake_quantize(const FloatMatrix& x, Granularity granularity, int64_t group_size, const float* scale,
                   const int32_t* zero_point, const CodeRange& range, void* y, uint8_t* mask, const Context& context) {
  if (x.rows == 0 || x.cols == 0) return;
  const bool groups = granularity == Granularity::groups;
  if (groups) check_columns_of_groups("fake_quantize", x.cols);
  const int64_t row_step = granularity == Granularity::tensor ? 0 : groups ? x.cols / group_size : 1;
  const FakeGiven given{scale,      zero_point, row_step, groups ? group_size : int64_t{1} << 62,
                        range.qmin, range.qmax, nullptr,  0,
                        true,       {}};
  launch_given("fake_quantize", x, given, y, mask, int64_t{1} << 30, context);
}

void fake_quantize_dynamic(const FloatMatrix& x, Granularity granularity, int64_t group_size, const CodeRange& range,
                           const QuantizeParams& params, void* y, void* workspace, const Context& context) {
  const char* name = "fake_quantize_dynamic";
  if (granularity == Granularity::tensor) {
    auto* parts = static_cast<Range*>(workspace);
    const int count = launch_range_parts(name, x, range.symmetric, parts, context);
    const FakeGiven given{nullptr,    nullptr, 0,     int64_t{1} << 62, range.qmin,
                          range.qmax, parts,   count, range.symmetric,  params};
    FloatMatrix all = is_dense(x) ? flattened(x) : x;
    if (all.rows == 0) all = {x.data, x.type, 1, 0, 0};                // no element, but a scale
    return launch_given(name, all, given, y, nullptr, 2048, context);  // few blocks: each one reads all parts
  }
  if (x.rows == 0) return;
  with_float_type(x.type, name, [&](auto element) {
    using T = decltype(element);
    constexpr int kWidth = kVector<T>;
    if (granularity == Granularity::rows) {
      const Matrix<T> m = matrix_of<T>(x);
      const RowValues<T> to{static_cast<T*>(y), x.cols, out_of<T>(y, nullptr, x.rows > 1 ? x.cols : 0).vector};
      using Input = PlainInput<T, 512>;  // of more threads each would have too few registers
      return launch_rows(name, Input{m.x, m.ld, m.vector}, to,
                         row_block(x.rows, x.cols, x.cols, kWidth, Input::Kept::kUnits, Input::kThreads), x.rows, range,
                         params, context);
    }
    if (x.cols == 0) return;
    int lane_shift = 0;
    while (lane_shift < 5 && int64_t{kWidth} << lane_shift < group_size) ++lane_shift;
    Matrix<T> m = matrix_of<T>(x);
    m.vector = m.vector && group_size % kWidth == 0;
    const int64_t threads = x.rows * (x.cols / group_size) << lane_shift;
    launch<fake_dynamic_groups_kernel<T>>(name, over((threads + kBlock - 1) / kBlock), context, m,
                                          Divisor(x.cols / group_size), group_size, lane_shift, range, params,
                                          out_of<T>(y, nullptr, group_size));
  });
}

}  // namespace pyquant::cuda
