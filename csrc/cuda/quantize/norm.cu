// RMSNorm or LayerNorm in front of the quantiser, with the residual added on request, in one kernel (docs/numerics.md
// 9): the normed 16-bit tensor is never written.
#include <type_traits>

#include "cuda/quantize/rows.cuh"

namespace pyquant::cuda {

namespace {

// Weight or bias of a norm: any float type.
struct Channel {
  const void* data;
  DType type;
  bool vector;

  // body(pointer to the channels), of floats or of T (channel_of); not called where there are none.
  template <class T, class Body>
  __device__ __forceinline__ void with_pointer(Body body) const {
    if (!data) return;
    if (!std::is_same_v<T, float> && type != DType::f32) return body(static_cast<const T*>(data));
    body(static_cast<const float*>(data));
  }

  // `valid` of them, wherever they lie.
  template <int Width>
  __device__ __forceinline__ void load_part(int64_t first, int valid, float (&v)[Width]) const {
    switch (type) {
      case DType::f16: return load_run(static_cast<const __half*>(data) + first, valid, false, v);
      case DType::bf16: return load_run(static_cast<const __nv_bfloat16*>(data) + first, valid, false, v);
      default: return load_run(static_cast<const float*>(data) + first, valid, false, v);
    }
  }
};

// Sum over the block in the order of norm_math.h; s[set] are lanes of this thread, later sets after all threads'
// earlier ones. Threads halve the sets between them while these are several: each set still adds neighbours first.
// Leaves: of the tree, that the warps leave; no more than a warp has lanes. Of short rows: fewer, the others are +0.
template <int Leaves, int Sets, int Width>
__device__ __forceinline__ float sum_in_lanes(float (&s)[Sets][Width], float* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto from_lane = [](float v, int step) { return __shfl_xor_sync(0xffffffffu, v, step); };
  float part[Sets];
#pragma unroll
  for (int set = 0; set < Sets; ++set) part[set] = tree_sum(s[set], Width);
  int set = 0;  // whose sum this thread is left with
#pragma unroll
  for (int half = Sets / 2; half > 0; half /= 2) {
    const int step = Sets / 2 / half;
    const bool upper = lane & step;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const float other = from_lane(upper ? part[j] : part[j + half], step);
      part[j] = fadd(upper ? part[j + half] : part[j], other);
    }
    set += upper ? half : 0;
  }
#pragma unroll
  for (int step = Sets; step < 32; step *= 2) part[0] = fadd(part[0], from_lane(part[0], step));
  if (lane < Sets) shared[set * warps + warp] = part[0];
  __syncthreads();
  // The rest of the tree, by every warp; where leaves are fewer than lanes, several times side by side.
  float all = Leaves < 32 || lane < Sets * warps ? shared[lane % Leaves] : 0.f;
#pragma unroll
  for (int step = 1; step < Leaves; step *= 2) all = fadd(all, from_lane(all, step));
  return all;
}

constexpr int kNormThreads = 256;

// How a block holds rows.
enum class Held {
  short_rows,  // of no more elements than there are lanes, by any number of threads
  at_once,     // a thread's units lie so far apart that it owns whole lanes
  in_chunks    // the same of rows that may be longer than what a block holds
};

// The lanes of norm_math.h that a thread adds up: unit i belongs to set i % kSets.
template <class T, int Units, int kSets, Held kHeld>
struct NormInput {
  using Kept = KeptFloats<T, Units>;
  static constexpr bool kOneChunk = kHeld != Held::in_chunks, kShort = kHeld == Held::short_rows;
  static constexpr int kThreads = kNormThreads, kWidth = kVector<T>, kStep = kShort ? 0 : kSumLanes / kSets;
  static constexpr int kLeaves = kShort ? 32 : kSumLanes / kWidth / 32;
  const T *x, *residual;
  T* sum;
  int64_t ld, ldr;
  bool vector, subtract_mean;  // a LayerNorm's, or an RMSNorm: one kernel, which takes nvcc half as long as two
  float eps;
  Channel weight, bias;

  struct Row {
    const T* x;  // what is normed: the input, or the sum that this kernel has written
    bool vector, subtract_mean, is_whole;
    float mean = 0.f, factor;
    Channel weight, bias;

    // Leaves the values of a row of one chunk in `kept`, less the mean.
    __device__ __forceinline__ Row(const NormInput& in, int64_t row, const RowSpan& span, RowShared& shared, Kept& kept)
        : x(in.residual ? in.sum + row * span.cols : in.x + row * in.ld),
          vector(in.vector),
          subtract_mean(in.subtract_mean),
          is_whole(kOneChunk || span.chunks == 1),
          weight(in.weight),
          bias(in.bias) {
      const int chunks = kOneChunk ? 1 : span.chunks;
      float s[kSets][kWidth];
      for (int c = 0; c < chunks; ++c) {
        const Chunk chunk = span.chunk<NormInput>(c);
        if (in.residual)
          add(in, row, span.cols, chunk, kept);
        else
          read(in.x + row * in.ld, chunk, kept);
        if (subtract_mean)
          accumulate(kept, s, c == 0, [](float v) { return v; });
        else
          accumulate(kept, s, c == 0, [](float v) { return fmul(v, v); });
      }
      float mean_of_lanes = mean_of(sum_in_lanes<kLeaves>(s, shared.sums[0]), span.cols);
      if (subtract_mean) {
        mean = mean_of_lanes;
        for (int c = 0; c < chunks; ++c) {
          const Chunk chunk = span.chunk<NormInput>(c);
          if (!is_whole) read(x, chunk, kept);
          center(chunk, kept);
          accumulate(kept, s, c == 0, [](float v) { return fmul(v, v); });
        }
        mean_of_lanes = mean_of(sum_in_lanes<kLeaves>(s, shared.sums[1]), span.cols);
      }
      factor = norm_factor(mean_of_lanes, in.eps);
    }

    // Columns that the row has not are held as +0 until they become codes: they change no sum and no range.
    __device__ __forceinline__ void read(const T* from, const Chunk& chunk, Kept& kept) const {
      KeptUnits<T, Units> raw;
      raw.load(from, chunk, vector);
#pragma unroll
      for (int i = 0; i < Units; ++i) raw.values(i, kept.value[i]);
    }

    // x + residual rounded to T, which is also stored.
    __device__ __forceinline__ void add(const NormInput& in, int64_t row, int64_t cols, const Chunk& chunk,
                                        Kept& kept) const {
      KeptUnits<T, Units> raw, residual;
      raw.load(in.x + row * in.ld, chunk, vector);
      residual.load(in.residual + row * in.ldr, chunk, vector);
      T* const to = in.sum + row * cols + chunk.first;
      const auto sum_of = [&](int i) {
        float r[kWidth];
        residual.values(i, r);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) r[j] = fadd(kept.value[i][j], r[j]);
        const Unit<T> sum = narrow_unit<T>(r);
        widen_unit(sum, kept.value[i]);
        return sum;
      };
#pragma unroll
      for (int i = 0; i < Units; ++i) raw.values(i, kept.value[i]);
      if (vector && (Units - 1) * chunk.step <= chunk.left - kWidth) {
#pragma unroll
        for (int i = 0; i < Units; ++i) store_whole_unit(to + i * chunk.step, sum_of(i));
        return;
      }
#pragma unroll
      for (int i = 0; i < Units; ++i) {
        const int column = i * chunk.step;
        if (column < chunk.left) store_unit(to + column, chunk.left - column, vector, sum_of(i));
      }
    }

    // s += term(value), or s = the first ones. A lane begins with +0, whose sum with its first element is that element
    // but for -0, which changes at most the sign of a mean that is 0: no scale and no code.
    template <class Term>
    static __device__ __forceinline__ void accumulate(const Kept& kept, float (&s)[kSets][kWidth], bool begins,
                                                      Term term) {
      if (begins)
        accumulate_from<kSets>(kept, s, term);
      else
        accumulate_from<0>(kept, s, term);
    }
    template <int kFirst, class Term>
    static __device__ __forceinline__ void accumulate_from(const Kept& kept, float (&s)[kSets][kWidth], Term term) {
#pragma unroll
      for (int i = 0; i < Units; ++i)
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          const float v = term(kept.value[i][j]);
          s[i % kSets][j] = i < kFirst ? v : fadd(s[i % kSets][j], v);
        }
    }

    // use(unit, i) for every unit of which all columns exist.
    template <class Use>
    static __device__ __forceinline__ void each_unit(const Chunk& chunk, int whole, Kept& kept, Use use) {
      each_whole<Units>(chunk, whole, [&](int i) { use(kept.value[i], i); });
    }
    // use(unit, columns of it, i) for the others of the row: its end, or all where `whole` is negative. A loop keeps
    // the kernel short.
    template <class Use>
    static __device__ __forceinline__ void each_rest(const Chunk& chunk, int whole, Kept& kept, Use use) {
#pragma unroll 1
      for (int i = 0; i < Units; ++i) {
        const int column = i * chunk.step, valid = chunk.left - column;
        if (valid <= 0 || column <= whole) continue;
        float v[kWidth];
        kept.values_at(i, v);
        use(v, valid, i);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) v[j] = j < valid ? v[j] : 0.f;
        kept.put(i, v);
      }
    }

    __device__ __forceinline__ void center(const Chunk& chunk, Kept& kept) const {
      const auto subtract = [this](float (&v)[kWidth]) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) v[j] = fsub(v[j], mean);
      };
      each_unit(chunk, chunk.left - kWidth, kept, [&](auto& v, int) { subtract(v); });
      if (!chunk.whole) each_rest(chunk, chunk.left - kWidth, kept, [&](auto& v, int, int) { subtract(v); });
    }

    __device__ __forceinline__ void scale(float (&v)[kWidth]) const {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = fmul(v[j], factor);
    }

    // v = use(v, channel) for the units that `weight` or `bias` has as aligned loads. The type is asked for once.
    template <class Use>
    __device__ __forceinline__ void each_channel(const Channel& of, const Chunk& chunk, int whole, Kept& kept,
                                                 Use use) const {
      of.template with_pointer<T>([&](const auto* channels) {
        const auto* from = channels + chunk.first;
        each_unit(chunk, whole, kept, [&](auto& v, int i) {
          float channel[kWidth];
          load_run(from + i * chunk.step, kWidth, true, channel);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) v[j] = use(v[j], channel[j]);
        });
      });
    }

    __device__ __forceinline__ void load(const Chunk& chunk, Kept& kept) const {
      if (!is_whole) {
        read(x, chunk, kept);
        if (subtract_mean) center(chunk, kept);
      }
      const bool aligned = weight.vector && bias.vector;
      const int whole = aligned ? chunk.left - kWidth : -1;
      if (!weight.data) each_unit(chunk, whole, kept, [this](auto& v, int) { scale(v); });
      each_channel(weight, chunk, whole, kept,
                   [this](float v, float channel) { return fmul(fmul(v, factor), channel); });
      each_channel(bias, chunk, whole, kept, [](float v, float channel) { return fadd(v, channel); });
      if (aligned && chunk.whole) return;
      each_rest(chunk, whole, kept, [&](auto& v, int valid, int i) {
        const int64_t first = chunk.first + i * chunk.step;
        float channel[kWidth];
        scale(v);
        if (weight.data) {
          weight.load_part(first, valid, channel);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) v[j] = fmul(v[j], channel[j]);
        }
        if (bias.data) {
          bias.load_part(first, valid, channel);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) v[j] = fadd(v[j], channel[j]);
        }
      });
    }
  };
};

// One that is absent is aligned. Units are loaded at once as floats or as what the input is made of: other mixes, which
// no model has, take the way of misaligned ones, so that the kernels are compiled for two types and not for three.
template <class T>
Channel channel_of(const void* data, DType type) {
  constexpr DType kOwn = std::is_same_v<T, __half> ? DType::f16 : DType::bf16;
  const bool known = !data || type == DType::f32 || (!std::is_same_v<T, float> && type == kOwn);
  return {data, type, known && is_aligned(data, 0, 16)};
}

// body(units, sets, how rows are held, block).
template <class T, class Body>
void with_norm_shape(int64_t rows, int64_t cols, int64_t room, Body body) {
  constexpr int kWidth = kVector<T>, kLaneUnits = kSumLanes / kWidth;
  using std::integral_constant;
  constexpr integral_constant<int, 4> four{};
  constexpr integral_constant<int, 8> eight{};
  const int64_t units = (room + kWidth - 1) / kWidth;
  using ShortRows = integral_constant<Held, Held::short_rows>;
  using AtOnce = integral_constant<Held, Held::at_once>;
  using InChunks = integral_constant<Held, Held::in_chunks>;
  if (units <= kLaneUnits) return body(four, four, ShortRows{}, row_block(rows, cols, room, kWidth, 4, kNormThreads));
  const auto run = [&](auto units_each, auto sets, auto held) {
    constexpr int kUnits = decltype(units_each)::value, kThreads = kLaneUnits / decltype(sets)::value;
    body(units_each, sets, held, row_block(kThreads, cols, room, kWidth, kUnits));
  };
  // Where rows fill the device, as few threads as hold one: what a thread does once costs less an element.
  if constexpr (kLaneUnits == kNormThreads) {
    if (rows >= 1024 && units <= 2 * kLaneUnits) return run(eight, four, AtOnce{});
    if (rows >= 1024 && units <= 4 * kLaneUnits) return run(eight, integral_constant<int, 2>{}, AtOnce{});
  }
  constexpr integral_constant<int, kLaneUnits / kNormThreads> fewest{};
  if (units <= 4 * kNormThreads) return run(four, fewest, AtOnce{});
  run(eight, fewest, InChunks{});
}

}  // namespace

void norm_quantize(const FloatMatrix& x, const NormOperands& norm, const CodeRange& range, const QuantizeParams& params,
                   const QuantizeOut& out, const Context& context) {
  with_float_type(x.type, "norm_quantize", [&](auto element) {
    using T = decltype(element);
    const auto size = static_cast<int64_t>(sizeof(T));
    bool vector = is_aligned(x.data, x.ld * size, 16);
    if (norm.residual)
      vector = vector && is_aligned(norm.residual, norm.ldr * size, 16) && is_aligned(norm.sum, x.cols * size, 16);
    with_norm_shape<T>(x.rows, x.cols, out.ldq, [&](auto units, auto sets, auto held, const RowBlock& block) {
      using Input = NormInput<T, decltype(units)::value, decltype(sets)::value, decltype(held)::value>;
      const Input in{static_cast<const T*>(x.data),
                     static_cast<const T*>(norm.residual),
                     static_cast<T*>(norm.sum),
                     x.ld,
                     norm.ldr,
                     vector,
                     norm.subtract_mean,
                     norm.eps,
                     channel_of<T>(norm.weight, norm.weight_type),
                     channel_of<T>(norm.bias, norm.bias_type)};
      launch_rows("norm_quantize", in, RowCodes{codes_of<T>(out, range, x.rows, x.cols)}, block, x.rows, range, params,
                  context);
    });
  });
}

}  // namespace pyquant::cuda
