// Group scales, given or from the data: a group belongs to 1 to 32 neighbouring threads of a warp, which hold up to
// four of its units each, so that what is done once a group costs little an element. Only groups longer than 128 units
// are read twice.
#include "cuda/divisor.cuh"
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/dynamic.h"
#include "cuda/quantize/held.cuh"

namespace pyquant::cuda {

namespace {

constexpr int kUnits = 4;

// Of numbers below 2^31, if all are so, by a multiplication of 32 bits.
struct GroupDivisor : Divisor {
  uint32_t short_factor;
  bool is_short;
  GroupDivisor(int64_t divisor, int64_t numbers)
      : Divisor(divisor),
        short_factor(static_cast<uint32_t>((factor - 1) >> 32) + 1),
        is_short(numbers < int64_t{1} << 31) {}
  __device__ __forceinline__ int64_t quotient(int64_t n) const {
    if (!is_short) return Divisor::quotient(n);
    const auto low = static_cast<uint32_t>(n);
    return (__umulhi(low, short_factor) + low) >> shift;
  }
};

struct Groups {
  int64_t rows, cols, ld;
  int size;                // of a group
  GroupDivisor per_row;    // groups
  int lane_shift, chunks;  // 2^lane_shift threads of a group; how often they come back to it
  bool vector;             // units of every group are aligned loads
};

template <class T, bool kGiven>
__global__ void __launch_bounds__(kBlock)
    quantize_groups_kernel(const T* x, Groups g, const float* scale, const int32_t* zero_point, bool symmetric,
                           QuantizeParams params, Codes to) {
  using Kept = KeptUnits<T, kUnits>;
  constexpr int kWidth = kVector<T>;
  wait_for_predecessor();
  release_successor();
  write_zeros(to.zeros);
  const int lanes = 1 << g.lane_shift, lane = static_cast<int>(threadIdx.x) & (lanes - 1), step = lanes * kWidth;
  // The exchanges below need every thread of the warp: those beyond the last group hold nothing.
  const int64_t group = (static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x) >> g.lane_shift;
  const bool exists = group < g.rows * g.per_row.by;
  const int64_t row = exists ? g.per_row.quotient(group) : 0, index = exists ? group - row * g.per_row.by : 0;
  const int64_t begin = index * g.size;
  const T* from = x + row * g.ld + begin;
  const auto chunk_at = [&](int turn) {
    const int first = turn * kUnits * step + lane * kWidth, left = exists ? g.size - first : 0;
    return Chunk{first, step, left, left, g.size % kWidth == 0, false};
  };
  Kept kept;
  Chunk chunk = chunk_at(0);
  kept.load(from, chunk, g.vector);
  Step of{1.f, 1.f, 0};
  if constexpr (kGiven) {
    if (exists) of = step_at(scale, zero_point, group);
  } else {
    typename Kept::Range range;
    kept.widen(range, symmetric);
    for (int turn = 1; turn < g.chunks; ++turn) {
      chunk = chunk_at(turn);
      kept.load(from, chunk, g.vector);
      kept.widen(range, symmetric);
    }
    of = step_of(reduce_lanes(range.ends(), lanes, symmetric), symmetric, to.qmin, to.qmax);
    if (exists && lane == 0) {
      params.scale[group] = of.scale;
      if (params.zero_point) params.zero_point[group] = of.zero_point;
    }
  }
  uint8_t* codes = to.row(row);
  Codes whole = to;  // units of every group are aligned stores
  whole.vector = to.vector && g.size % kWidth == 0;
  CodeWriter<kGiven ? Values::any : Values::finite> writer{kGiven ? Coder(of, to) : Coder::own(of, to),
                                                           !kGiven && Coder::is_within(of, symmetric, to),
                                                           codes + (to.packed ? begin / 2 : begin)};
  // Backwards where the range came first, as the last chunk is still held.
  for (int turn = 0; turn < g.chunks; ++turn) {
    if (turn > 0) {
      chunk = chunk_at(kGiven ? turn : g.chunks - 1 - turn);
      kept.load(from, chunk, g.vector);
    }
    writer.put(whole, chunk, kept);
  }
  if (to.ldq > g.cols && exists && index == g.per_row.by - 1) {
    whole.vector = false;
    uint32_t none[kWidth / 4] = {};
    for (int64_t c = g.cols + static_cast<int64_t>(lane) * kWidth; c < to.ldq; c += step)
      store_codes(codes, c, clipped(to.ldq - c, kWidth), 0, whole, none);
  }
  if (to.row_sum) {
    const int32_t sum = sum_lanes(writer.sum, lanes);
    if (exists && lane == 0) to.row_sum[group] = sum;
  }
}

// As few threads as hold a group, but as many as store a whole sector of its codes at a time.
template <class T>
Groups groups_of(const FloatMatrix& x, int64_t size, bool packed) {
  constexpr int kWidth = kVector<T>;
  const int64_t units = (size + kWidth - 1) / kWidth, sector = (packed ? 64 : 32) / kWidth, per_row = x.cols / size;
  int shift = 0;
  while (shift < 5 && units >> shift > (sector >> shift > 1 ? 1 : kUnits)) ++shift;
  const int64_t held = int64_t{kUnits} << shift;
  const bool vector = size % kWidth == 0 && is_aligned(x.data, x.ld * static_cast<int64_t>(sizeof(T)), 16);
  return {x.rows,
          x.cols,
          x.ld,
          static_cast<int>(size),
          GroupDivisor(per_row, x.rows * per_row),
          shift,
          static_cast<int>((units + held - 1) / held),
          vector};
}

}  // namespace

void quantize_per_group(const FloatMatrix& x, int64_t group_size, const float* scale, const int32_t* zero_point,
                        const CodeRange& range, const QuantizeParams& params, const QuantizeOut& out,
                        const Context& context) {
  if (x.rows == 0) return;
  if (out.packed && group_size % 2 != 0)
    throw std::runtime_error("quantize: packed codes with group_size " + std::to_string(group_size) +
                             "; allowed: an even one, as groups must not share a byte");
  if (group_size > kMostColumns)
    throw std::runtime_error("quantize: group_size " + std::to_string(group_size) +
                             "; allowed: " + std::to_string(kMostColumns));
  if (quantize_short_groups(x, group_size, scale, zero_point, range, params, out, context)) return;
  with_float_type(x.type, "quantize", [&](auto element) {
    using T = decltype(element);
    const Groups g = groups_of<T>(x, group_size, out.packed);
    const int64_t threads = (g.rows * g.per_row.by) << g.lane_shift;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>((threads + kBlock - 1) / kBlock));
    shape.block = dim3(kBlock);
    shape.overlaps = true;
    const auto run = [&](auto kernel) {
      kernel("quantize", shape, context, static_cast<const T*>(x.data), g, scale, zero_point, range.symmetric, params,
             codes_of<T>(out, range, x.rows, x.cols));
    };
    if (params.scale)
      run([](auto&&... all) { launch<quantize_groups_kernel<T, false>>(all...); });
    else
      run([](auto&&... all) { launch<quantize_groups_kernel<T, true>>(all...); });
  });
}

}  // namespace pyquant::cuda
