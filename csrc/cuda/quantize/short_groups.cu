// Group scales where a group is 1, 2, 4 ... 32 whole units: a lane holds one unit of it, and one of several such
// groups, as far apart as the block has units. Loads and stores leave no gaps, groups are found without a quotient, and
// what stands once in a thread serves all of its groups.
#include "cuda/quantize/codes.cuh"
#include "cuda/quantize/dynamic.h"
#include "cuda/quantize/held.cuh"
#include "cuda/quantize/parts.cuh"

namespace pyquant::cuda {

namespace {

constexpr int kUnits = 4;

struct ShortGroups {
  int64_t per_row;
  int lane_shift, size_shift;  // logarithms of a group's units and of its elements
  int step, columns;           // between the units of a thread; of a chunk
};

enum class Steps { given, symmetric, affine };

// The largest over each group's lanes, of several groups at a time.
__device__ __forceinline__ void reduce_groups(Range (&range)[kUnits], int lanes, bool symmetric) {
  for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (Range& r : range) {
      r.above = max(r.above, __shfl_xor_sync(0xffffffffu, r.above, step));
      if (!symmetric) r.below = max(r.below, __shfl_xor_sync(0xffffffffu, r.below, step));
    }
  }
}

// blockIdx.x walks rows, blockIdx.y chunks of a row. Whole warps stay together, as lanes exchange ranges.
template <class T, Steps kSteps>
__global__ void __launch_bounds__(kBlock)
    quantize_short_groups_kernel(Matrix<T> m, ShortGroups g, const float* scale, const int32_t* zero_point,
                                 QuantizeParams params, Codes to) {
  constexpr int kWidth = kVector<T>;
  constexpr bool kGiven = kSteps == Steps::given, kSymmetric = kSteps == Steps::symmetric;
  constexpr Values kValues = kGiven ? Values::any : kSymmetric ? Values::within : Values::finite;
  wait_for_predecessor();
  release_successor();
  write_zeros(to.zeros);
  const int first = static_cast<int>(threadIdx.x) * kWidth, lanes = 1 << g.lane_shift, apart = g.step >> g.size_shift;
  const bool leads = (static_cast<int>(threadIdx.x) & (lanes - 1)) == 0;
  for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x) {
    for (int64_t begin = int64_t{blockIdx.y} * g.columns; begin < m.cols; begin += int64_t{gridDim.y} * g.columns) {
      const int64_t column = begin + first, group = row * g.per_row + (column >> g.size_shift);
      const int left = clipped(m.cols - column, g.columns);
      const T* from = m.x + row * m.ld + column;
      Unit<T> unit[kUnits];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) unit[i] = i * g.step < left ? load_whole(from + i * g.step) : Unit<T>{};
      Range range[kUnits];
      if constexpr (!kGiven) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          RangeOf<T> of;
          of.widen(unit[i], kSymmetric);
          range[i] = of.ends();
        }
        reduce_groups(range, lanes, kSymmetric);
      }
      uint8_t* codes = to.row(row) + (to.packed ? column / 2 : column);
      const int between = to.packed ? g.step / 2 : g.step;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        if (i * g.step >= left) break;
        Step step;
        if constexpr (kGiven) {
          step = step_at(scale, zero_point, group + i * apart);
        } else {
          step = step_of(range[i], kSymmetric, to.qmin, to.qmax);
          if (leads) {
            params.scale[group + i * apart] = step.scale;
            if (params.zero_point) params.zero_point[group + i * apart] = step.zero_point;
          }
        }
        float v[kWidth];
        uint32_t words[kWidth / 4];
        widen_unit(unit[i], v);
        (kGiven ? Coder(step, to) : Coder::own(step, to)).template code<kValues>(v, words);
        if constexpr (kSymmetric) {  // no clamp has made the codes of a poisoned group 0
#pragma unroll
          for (uint32_t& word : words) word = step.scale == step.scale ? word : 0;
        }
        store_whole(codes + i * between, to.packed, words);
      }
    }
  }
}

constexpr int logarithm(int64_t power) {
  int result = 0;
  while (int64_t{1} << result < power) ++result;
  return result;
}

// Whether groups are better here than where a thread has several units of one (groups.cu). Int8 codes of longer groups
// are not if the step is to be found: it would be found for fewer elements at a time.
template <class T>
bool are_short(const FloatMatrix& x, int64_t group_size, bool given, const Codes& to) {
  const int64_t units = group_size / kVector<T>, most = given || to.packed ? 32 : 8;
  return group_size % kVector<T> == 0 && units <= most && (units & (units - 1)) == 0 && x.cols == to.ldq && to.vector &&
         !to.row_sum && matrix_of<T>(x).vector;
}

}  // namespace

bool quantize_short_groups(FloatMatrix x, int64_t group_size, const float* scale, const int32_t* zero_point,
                           const CodeRange& range, const QuantizeParams& params, QuantizeOut out,
                           const Context& context) {
  bool done = false;
  with_float_type(x.type, "quantize", [&](auto element) {
    using T = decltype(element);
    constexpr int kWidth = kVector<T>;
    if (!are_short<T>(x, group_size, !params.scale, codes_of<T>(out, range, x.rows, x.cols))) return;
    if (is_dense(x)) {  // groups and codes are as dense
      x = flattened(x);
      out.ldq = x.cols;
    }
    const int threads = row_threads(x.rows, x.cols, kWidth, kUnits, kBlock);
    const int step = threads * kWidth, columns = step * kUnits;
    const ShortGroups g{x.cols / group_size, logarithm(group_size / kWidth), logarithm(group_size), step, columns};
    const int64_t chunks = (x.cols + columns - 1) / columns, most_rows = int64_t{1} << 30;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(x.rows < most_rows ? x.rows : most_rows),
                      static_cast<unsigned>(chunks < kColumnBlocks ? chunks : kColumnBlocks));
    shape.block = dim3(static_cast<unsigned>(threads));
    shape.overlaps = true;
    const auto run = [&](auto kernel) {
      kernel("quantize", shape, context, matrix_of<T>(x), g, scale, zero_point, params,
             codes_of<T>(out, range, x.rows, x.cols));
    };
    if (!params.scale)
      run([](auto&&... all) { launch<quantize_short_groups_kernel<T, Steps::given>>(all...); });
    else if (range.symmetric && range.qmin <= -range.qmax)
      run([](auto&&... all) { launch<quantize_short_groups_kernel<T, Steps::symmetric>>(all...); });
    else
      run([](auto&&... all) { launch<quantize_short_groups_kernel<T, Steps::affine>>(all...); });
    done = true;
  });
  return done;
}

}  // namespace pyquant::cuda
