// Group scales, given or from the data: a group belongs to 1 to 32 neighbouring threads of a warp, as many as it has
// units. What a thread loaded first stays in its registers; only groups longer than 32 units are read twice.
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/codes.cuh"
#include "cuda/quantize/dynamic.h"

namespace pyquant::cuda {

namespace {

struct Groups {
  int64_t rows, cols, ld, size, per_row;
  int lanes;    // threads of a group, a power of two
  bool vector;  // units of every group are aligned loads
};

template <class T>
__global__ void __launch_bounds__(kBlock)
    quantize_groups_kernel(const T* x, Groups g, const float* scale, const int32_t* zero_point, bool symmetric,
                           QuantizeParams params, Codes to) {
  constexpr int kWidth = kVector<T>;
  wait_for_predecessor();
  release_successor();
  write_zeros(to.zeros);
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) / g.lanes;
  const int lane = static_cast<int>(threadIdx.x) % g.lanes;
  const bool exists = group < g.rows * g.per_row;  // the shuffles below need every thread of the warp
  const int64_t row = exists ? group / g.per_row : 0, index = exists ? group % g.per_row : 0;
  const int64_t size = exists ? g.size : 0;
  const T* from = x + row * g.ld + index * g.size;
  const auto load = [&](int64_t column) { return load_unit(from + column, clipped(size - column, kWidth), g.vector); };
  Unit<T> unit = load(lane * kWidth);
  Step step{1.f, 1.f, 0};
  if (params.scale) {
    RangeOf<T> range;
    range.widen(unit, symmetric);
    for (int64_t c = static_cast<int64_t>(lane + g.lanes) * kWidth; c < size; c += g.lanes * kWidth)
      range.widen(load(c), symmetric);
    step = step_of(reduce_lanes(range.ends(), g.lanes), symmetric, to.qmin, to.qmax);
    if (exists && lane == 0) {
      params.scale[group] = step.scale;
      if (params.zero_point) params.zero_point[group] = step.zero_point;
    }
  } else if (exists) {
    step = step_at(scale, zero_point, group);
  }
  const Coder coder = params.scale ? Coder::own(step, to) : Coder(step, to);
  const bool within = params.scale && Coder::is_within(step, symmetric, to);
  uint8_t* codes = to.row(row);
  const int64_t begin = index * g.size;
  Codes whole = to;  // units of every group are aligned stores
  whole.vector = to.vector && g.size % kWidth == 0;
  int32_t sum = 0;
  for (int64_t c = static_cast<int64_t>(lane) * kWidth; c < size; c += g.lanes * kWidth) {
    if (c >= g.lanes * kWidth) unit = load(c);
    const int room = clipped(size - c, kWidth);
    float v[kWidth];
    uint32_t words[kWidth / 4];
    widen_unit(unit, v);
    if (within)
      coder.code<Values::within>(v, words);
    else
      coder.code<Values::any>(v, words);
    store_codes(codes, begin + c, room, room, whole, words);
    if (to.row_sum) sum = coder.sum(words, sum);
  }
  if (exists && index == g.per_row - 1) {
    whole.vector = false;
    uint32_t none[kWidth / 4] = {};
    for (int64_t c = g.cols + static_cast<int64_t>(lane) * kWidth; c < to.ldq; c += g.lanes * kWidth)
      store_codes(codes, c, clipped(to.ldq - c, kWidth), 0, whole, none);
  }
  if (to.row_sum) {
    sum = sum_lanes(sum, g.lanes);
    if (exists && lane == 0) to.row_sum[group] = sum;
  }
}

}  // namespace

void quantize_per_group(const FloatMatrix& x, int64_t group_size, const float* scale, const int32_t* zero_point,
                        const CodeRange& range, const QuantizeParams& params, const QuantizeOut& out,
                        const Context& context) {
  if (x.rows == 0) return;
  if (out.packed && group_size % 2 != 0)
    throw std::runtime_error("quantize: packed codes with group_size " + std::to_string(group_size) +
                             "; allowed: an even one, as groups must not share a byte");
  with_float_type(x.type, "quantize", [&](auto element) {
    using T = decltype(element);
    constexpr int kWidth = kVector<T>;
    Groups g{x.rows, x.cols, x.ld, group_size, x.cols / group_size, 1, false};
    while (g.lanes < 32 && g.lanes * kWidth < group_size) g.lanes *= 2;
    g.vector = group_size % kWidth == 0 && is_aligned(x.data, x.ld * static_cast<int64_t>(sizeof(T)), 16);
    const int64_t threads = g.rows * g.per_row * g.lanes;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>((threads + kBlock - 1) / kBlock));
    shape.block = dim3(kBlock);
    shape.overlaps = true;
    launch<quantize_groups_kernel<T>>("quantize", shape, context, static_cast<const T*>(x.data), g, scale, zero_point,
                                      range.symmetric, params, codes_of<T>(out, range, x.rows, x.cols));
  });
}

}  // namespace pyquant::cuda
