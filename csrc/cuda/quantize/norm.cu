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

  // body(pointer to the channels); not called where there are none.
  template <class Body>
  __device__ __forceinline__ void with_pointer(Body body) const {
    if (!data) return;
    if (type == DType::f32) return body(static_cast<const float*>(data));
    if (type == DType::bf16) return body(static_cast<const __nv_bfloat16*>(data));
    body(static_cast<const __half*>(data));
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
// earlier ones.
template <int Sets, int Width>
__device__ __forceinline__ float sum_in_lanes(float (&s)[Sets][Width], float* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll
  for (int set = 0; set < Sets; ++set) {
    float part = tree_sum(s[set], Width);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) part = fadd(part, __shfl_xor_sync(0xffffffffu, part, step));
    if (threadIdx.x % 32 == 0) shared[set * warps + warp] = part;
  }
  __syncthreads();
  // As many leaves as a warp has lanes at most: the rest of the tree is one more of these.
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float part = lane < Sets * warps ? shared[lane] : 0.f;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) part = fadd(part, __shfl_xor_sync(0xffffffffu, part, step));
  return part;
}

constexpr int kNormThreads = 256;

// The lanes of norm_math.h that a thread adds up: unit i belongs to set i % kSets.
template <class T, bool kSubtractMean, int Units, int kSets>
struct NormInput {
  using Kept = KeptFloats<T, Units>;
  static constexpr int kThreads = kNormThreads, kWidth = kVector<T>;
  const T *x, *residual;
  T* sum;
  int64_t ld, ldr;
  bool vector;
  float eps;
  Channel weight, bias;

  struct Row {
    const T* x;  // what is normed: the input, or the sum that this kernel has written
    bool vector, is_whole;
    float mean = 0.f, factor;
    Channel weight, bias;
    KeptUnits<T, Units> raw;

    __device__ __forceinline__ Row(const NormInput& in, int64_t row, const RowSpan& span, RowShared& shared)
        : x(in.residual ? in.sum + row * span.cols : in.x + row * in.ld),
          vector(in.vector),
          is_whole(span.chunks == 1),
          weight(in.weight),
          bias(in.bias) {
      float s[kSets][kWidth] = {};
      for (int c = 0; c < span.chunks; ++c) {
        const Chunk chunk = span.chunk<kWidth>(c);
        raw.load(in.x + row * in.ld, chunk, vector);
        if (in.residual) add(in, row, span.cols, chunk);
        accumulate<false>(chunk, s, [](float v) { return kSubtractMean ? v : fmul(v, v); });
      }
      float mean_of_lanes = mean_of(sum_in_lanes(s, shared.sums[0]), span.cols);
      if constexpr (kSubtractMean) {
        mean = mean_of_lanes;
        float d[kSets][kWidth] = {};
        for (int c = 0; c < span.chunks; ++c) {
          const Chunk chunk = span.chunk<kWidth>(c);
          if (!is_whole) raw.load(x, chunk, vector);
          accumulate<true>(chunk, d, [this](float v) { return fmul(fsub(v, mean), fsub(v, mean)); });
        }
        mean_of_lanes = mean_of(sum_in_lanes(d, shared.sums[1]), span.cols);
      }
      factor = norm_factor(mean_of_lanes, in.eps);
    }

    // x + residual rounded to T, which is also stored.
    __device__ __forceinline__ void add(const NormInput& in, int64_t row, int64_t cols, const Chunk& chunk) {
      KeptUnits<T, Units> residual;
      residual.load(in.residual + row * in.ldr, chunk, vector);
#pragma unroll
      for (int i = 0; i < Units; ++i) {
        const int column = i * chunk.step;
        if (column >= chunk.left) continue;
        float v[kWidth], r[kWidth];
        raw.values(i, v);
        residual.values(i, r);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) v[j] = fadd(v[j], r[j]);
        raw.unit[i] = narrow_unit<T>(v);
        store_unit(in.sum + row * cols + chunk.first + column, chunk.left - column, vector, raw.unit[i]);
      }
    }

    // Columns that the row has not add +0, which changes no sum: a lane starts from +0. They are held as +0; masked: of
    // which the term makes something else.
    template <bool kMasked, class Term>
    __device__ __forceinline__ void accumulate(const Chunk& chunk, float (&s)[kSets][kWidth], Term term) const {
#pragma unroll
      for (int i = 0; i < Units; ++i) {
        const int valid = kMasked ? chunk.left - i * chunk.step : kWidth;
        if (valid <= 0) continue;
        float v[kWidth];
        raw.values(i, v);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) v[j] = term(v[j]);
        if (valid < kWidth) {
#pragma unroll
          for (int j = 0; j < kWidth; ++j) v[j] = j < valid ? v[j] : 0.f;
        }
#pragma unroll
        for (int j = 0; j < kWidth; ++j) s[i % kSets][j] = fadd(s[i % kSets][j], v[j]);
      }
    }

    __device__ __forceinline__ void scale(float (&v)[kWidth]) const {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = fmul(kSubtractMean ? fsub(v[j], mean) : v[j], factor);
    }

    // The values of one unit, `valid` of them; v holds the row's.
    __device__ __forceinline__ void normed(float (&v)[kWidth], int64_t first, int valid) const {
      scale(v);
      float channel[kWidth];
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
    }

    // use(value, channel) for all of the units that begin at column `whole` or before, by aligned loads. The type is
    // asked for once.
    template <class Use>
    __device__ __forceinline__ void each_unit(const Channel& of, const Chunk& chunk, int whole, Kept& kept,
                                              Use use) const {
      of.with_pointer([&](const auto* channels) {
        const auto* from = channels + chunk.first;
#pragma unroll
        for (int i = 0; i < Units; ++i) {
          if (i * chunk.step > whole) continue;
          float channel[kWidth];
          load_run(from + i * chunk.step, kWidth, true, channel);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) kept.value[i][j] = use(kept.value[i][j], channel[j]);
        }
      });
    }

    __device__ __forceinline__ void load(const Chunk& chunk, Kept& kept) {
      if (!is_whole) raw.load(x, chunk, vector);
      const bool aligned = weight.vector && bias.vector;
      const int whole = aligned ? chunk.left - kWidth : -1;  // where the last whole unit may begin
#pragma unroll
      for (int i = 0; i < Units; ++i) {
        raw.values(i, kept.value[i]);  // 0 beyond the row
        if (i * chunk.step <= whole) scale(kept.value[i]);
      }
      each_unit(weight, chunk, whole, kept, [](float v, float channel) { return fmul(v, channel); });
      each_unit(bias, chunk, whole, kept, [](float v, float channel) { return fadd(v, channel); });
      if (aligned && chunk.whole) return;
#pragma unroll 1  // the end of a row, or weights off the boundaries: a loop keeps the kernel short
      for (int i = 0; i < Units; ++i) {
        const int column = i * chunk.step, valid = chunk.left - column;
        if (valid <= 0 || (aligned && valid >= kWidth)) continue;
        float v[kWidth];
        widen_unit(raw.at(i), v);
        normed(v, chunk.first + column, valid);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) v[j] = j < valid ? v[j] : 0.f;
        kept.put(i, v);
      }
    }
  };
};

// One that is absent is aligned.
Channel channel_of(const void* data, DType type) { return {data, type, is_aligned(data, 0, 16)}; }

// A thread must own whole lanes: its units lie as far apart as a row has lanes (threads * sets units), unless the row
// is so short that every lane has one element at most.
template <class T, class Body>
void with_norm_shape(int64_t rows, int64_t cols, int64_t room, Body body) {
  constexpr int kWidth = kVector<T>, kLaneUnits = kSumLanes / kWidth;
  const auto run = [&](auto units, auto sets, int threads) {
    body(units, sets, row_block(threads, cols, room, kWidth, decltype(units)::value));
  };
  using std::integral_constant;
  constexpr integral_constant<int, 4> four{};
  constexpr integral_constant<int, 8> eight{};
  constexpr integral_constant<int, kLaneUnits / kNormThreads> fewest{};
  const int64_t units = (room + kWidth - 1) / kWidth;
  if (units <= kLaneUnits) return run(four, four, row_block(rows, cols, room, kWidth, 4, kNormThreads).threads);
  // Where rows fill the device, as few threads as hold one: what a thread does once costs less an element.
  if constexpr (kLaneUnits == kNormThreads) {
    if (rows >= 1024 && units <= 2 * kLaneUnits) return run(eight, four, kNormThreads / 4);
    if (rows >= 1024 && units <= 4 * kLaneUnits) return run(eight, integral_constant<int, 2>{}, kNormThreads / 2);
  }
  if (units <= 4 * kNormThreads) return run(four, fewest, kNormThreads);
  run(eight, fewest, kNormThreads);
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
    const auto run = [&](auto subtract_mean) {
      with_norm_shape<T>(x.rows, x.cols, out.ldq, [&](auto units, auto sets, const RowBlock& block) {
        using Input = NormInput<T, decltype(subtract_mean)::value, decltype(units)::value, decltype(sets)::value>;
        const Input in{static_cast<const T*>(x.data),
                       static_cast<const T*>(norm.residual),
                       static_cast<T*>(norm.sum),
                       x.ld,
                       norm.ldr,
                       vector,
                       norm.eps,
                       channel_of(norm.weight, norm.weight_type),
                       channel_of(norm.bias, norm.bias_type)};
        launch_rows("norm_quantize", in, RowCodes{codes_of<T>(out, range, x.rows, x.cols)}, block, x.rows, range,
                    params, context);
      });
    };
    if (norm.subtract_mean)
      run(std::true_type{});
    else
      run(std::false_type{});
  });
}

}  // namespace pyquant::cuda
