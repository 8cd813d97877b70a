// Group scales where a group is 1, 2, 4 ... 32 whole units: a lane holds one unit of it, and one of several such
// groups, as far apart as the block has units. Loads and stores leave no gaps, groups are found without a quotient, and
// what stands once in a thread serves all of its groups.
#include "cuda/quantize/codes.cuh"
#include "cuda/quantize/dynamic.h"
#include "cuda/quantize/held.cuh"
#include "cuda/quantize/parts.cuh"

namespace pyquant::cuda {

namespace {

constexpr int kUnits = 8;

struct ShortGroups {
  int64_t per_row;
  int lane_shift, size_shift;  // logarithms of a group's units and of its elements
  int step, columns;           // between the units of a thread; of a chunk
};

enum class Steps { given, given_symmetric, symmetric, affine };

// Neighbouring lanes of a group, kSharing of them, hold units of the same kUnits groups. Each finds the coders of
// kUnits / kSharing: lane l those of the units from l * kUnits / kSharing on.
template <class T, int kSharing>
struct Lanes {
  static constexpr int kOwn = kUnits / kSharing;
  using Ranges = RangeOf<T>;

  // Ranges of units -> ranges of this lane's groups, over all lanes of each. Lanes halve the units between them.
  static __device__ __forceinline__ void reduce(Ranges (&range)[kUnits], int lanes, bool symmetric) {
    const int lane = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int step = kSharing / 2, half = kUnits / 2; step > 0; step /= 2, half /= 2) {
      const bool upper = lane & step;
#pragma unroll
      for (int j = 0; j < half; ++j) range[j].exchange(range[j + half], upper, step, symmetric);
    }
    for (int step = kSharing; step < lanes; step *= 2) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) range[j].exchange(range[j], false, step, symmetric);
    }
  }

  static __device__ __forceinline__ int first_unit() { return (static_cast<int>(threadIdx.x) & (kSharing - 1)) * kOwn; }

  // The coder of a unit, from the lane that has found it. kKnown: its limits and zero point are every coder's.
  template <bool kKnown>
  static __device__ __forceinline__ Coder of_unit(const Coder (&own)[kOwn], int unit) {
    Coder coder = own[unit % kOwn];
    if constexpr (kSharing == 1) return coder;
    const auto from_lane = [unit](auto v) { return __shfl_sync(0xffffffffu, v, unit / kOwn, kSharing); };
    coder.recip = from_lane(coder.recip);
    if constexpr (kKnown) return coder;
    coder.low = from_lane(coder.low);
    coder.high = from_lane(coder.high);
    coder.zero_points = from_lane(coder.zero_points);
    return coder;
  }
};

// blockIdx.x walks rows, blockIdx.y chunks of a row. Whole warps stay together, as lanes exchange ranges and coders.
template <class T, Steps kSteps, int kSharing>
__global__ void __launch_bounds__(kBlock)
    quantize_short_groups_kernel(Matrix<T> m, ShortGroups g, const float* scale, const int32_t* zero_point,
                                 QuantizeParams params, Codes to) {
  using Shared = Lanes<T, kSharing>;
  constexpr int kWidth = kVector<T>;
  constexpr bool kDynamic = kSteps == Steps::symmetric || kSteps == Steps::affine;
  constexpr bool kSymmetric = kSteps == Steps::symmetric || kSteps == Steps::given_symmetric;
  constexpr Values kValues = !kDynamic ? Values::any : kSymmetric ? Values::within : Values::finite;
  wait_for_predecessor();
  release_successor();
  write_zeros(to.zeros);
  const int first = static_cast<int>(threadIdx.x) * kWidth, lanes = 1 << g.lane_shift, apart = g.step >> g.size_shift;
  const int64_t step = g.step, code_step = to.packed ? step / 2 : step;  // added, as products of 64 bits cost more
  const bool leads = (static_cast<int>(threadIdx.x) & (lanes - 1)) < kSharing;
  for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x) {
    for (int64_t begin = int64_t{blockIdx.y} * g.columns; begin < m.cols; begin += int64_t{gridDim.y} * g.columns) {
      const int64_t column = begin + first, group = row * g.per_row + (column >> g.size_shift);
      const int left = clipped(m.cols - column, g.columns);
      const T* from = m.x + row * m.ld + column;
      Unit<T> unit[kUnits];
#pragma unroll
      for (int i = 0; i < kUnits; ++i, from += step) unit[i] = i * g.step < left ? load_whole(from) : Unit<T>{};
      RangeOf<T> range[kUnits];
      if constexpr (kDynamic) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) range[i].widen(unit[i], kSymmetric);
        Shared::reduce(range, lanes, kSymmetric);
      }
      Coder own[Shared::kOwn];
#pragma unroll
      for (int j = 0; j < Shared::kOwn; ++j) {
        const int i = Shared::first_unit() + j;
        const int64_t index = group + i * apart;
        const bool exists = i * g.step < left;
        if constexpr (kDynamic) {
          const Step found = step_of(range[j].ends(), kSymmetric, to.qmin, to.qmax);
          own[j] = Coder::own(found, to);
          if (leads && exists) {
            params.scale[index] = found.scale;
            if (params.zero_point) params.zero_point[index] = found.zero_point;
          }
        } else {
          own[j] = Coder(exists ? step_at(scale, kSymmetric ? nullptr : zero_point, index) : Step{}, to);
        }
      }
      uint8_t* codes = to.row(row) + (to.packed ? column / 2 : column);
#pragma unroll
      for (int i = 0; i < kUnits; ++i, codes += code_step) {
        const Coder coder = Shared::template of_unit<kSymmetric>(own, i);
        if (i * g.step >= left) continue;
        float v[kWidth];
        uint32_t words[kWidth / 4];
        widen_unit(unit[i], v);
        coder.template code<kValues>(v, words);
        if constexpr (kValues == Values::within) {  // no clamp has made the codes of a poisoned group 0
#pragma unroll
          for (uint32_t& word : words) word = coder.recip == coder.recip ? word : 0;
        }
        store_whole(codes, to.packed, words);
      }
    }
  }
}

constexpr int logarithm(int64_t power) {
  int result = 0;
  while (int64_t{1} << result < power) ++result;
  return result;
}

// Whether a group is no more units than a warp has lanes, and all of it whole.
template <class T>
bool are_short(const FloatMatrix& x, int64_t group_size, const Codes& to) {
  const int64_t units = group_size / kVector<T>;
  return group_size % kVector<T> == 0 && units <= 32 && (units & (units - 1)) == 0 && x.cols == to.ldq && to.vector &&
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
    if (!are_short<T>(x, group_size, codes_of<T>(out, range, x.rows, x.cols))) return;
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
    const auto run_shared = [&](auto steps) {
      constexpr Steps kSteps = decltype(steps)::value;
      if (group_size / kWidth < 4)
        run([](auto&&... all) { launch<quantize_short_groups_kernel<T, kSteps, 1>>(all...); });
      else if (group_size / kWidth < kUnits)
        run([](auto&&... all) { launch<quantize_short_groups_kernel<T, kSteps, 4>>(all...); });
      else
        run([](auto&&... all) { launch<quantize_short_groups_kernel<T, kSteps, kUnits>>(all...); });
    };
    if (!params.scale && !zero_point)
      run_shared(std::integral_constant<Steps, Steps::given_symmetric>{});
    else if (!params.scale)
      run_shared(std::integral_constant<Steps, Steps::given>{});
    else if (range.symmetric && range.qmin <= -range.qmax)
      run_shared(std::integral_constant<Steps, Steps::symmetric>{});
    else
      run_shared(std::integral_constant<Steps, Steps::affine>{});
    done = true;
  });
  return done;
}

}  // namespace pyquant::cuda
