// Norm or gated SiLU in front of the quantiser, in one kernel (docs/numerics.md 9): the 16-bit tensor between the two
// is never written. The row kept in shared memory is fp32, the values as the quantiser sees them.
#include <type_traits>

#include "cuda/quantize/rows.cuh"

namespace pyquant::cuda {

namespace {

// Weight or bias of a norm: any float type.
struct Channel {
  const void* data;
  DType type;
  bool vector;
  template <int Width>
  __device__ __forceinline__ void load(int64_t first, int64_t valid, float (&v)[Width]) const {
    switch (type) {
      case DType::f16: return load_run(static_cast<const __half*>(data) + first, valid, vector, v);
      case DType::bf16: return load_run(static_cast<const __nv_bfloat16*>(data) + first, valid, vector, v);
      default: return load_run(static_cast<const float*>(data) + first, valid, vector, v);
    }
  }
};

// Sum over the block in the order of norm_math.h. s[set] are the lanes of this thread: its unit of every kSets-th
// round.
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
  float all[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) all[i] = i < Sets * warps ? shared[i] : 0.f;
  return tree_sum(all, 16);
}

template <class T, bool kSubtractMean>
struct NormInput {
  using Kept = float;
  static constexpr int kWidth = kVector<T>;
  static constexpr int kSets = kSumLanes / kBlock / kWidth;
  const T *x, *residual;
  T* sum;
  int64_t ld, ldr;
  bool vector;
  float eps;
  Channel weight, bias;

  struct Row {
    const T* x;  // what is normed: the input, or the sum that this kernel has written
    bool vector;
    float mean, factor;
    Channel weight, bias;
    Space<float, kWidth> space;

    __device__ __forceinline__ void values(int64_t unit, float (&v)[kWidth]) const {
      if (space.kept)
        space.get(unit, v);
      else
        load_run(x + unit * kWidth, space.valid(unit), vector, v);
    }
    __device__ __forceinline__ void normed(int64_t unit, float (&v)[kWidth]) const {
      const int64_t valid = space.valid(unit);
      float w[kWidth], b[kWidth];
      if (weight.data) weight.load(unit * kWidth, valid, w);
      if (bias.data) bias.load(unit * kWidth, valid, b);
      values(unit, v);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        float y = kSubtractMean ? fsub(v[j], mean) : v[j];
        y = fmul(y, factor);
        if (weight.data) y = fmul(y, w[j]);
        if (bias.data) y = fadd(y, b[j]);
        v[j] = j < valid ? y : 0.f;
      }
    }
    __device__ __forceinline__ void produce(int64_t unit, float (&v)[kWidth]) const {
      normed(unit, v);
      if (space.kept) space.put(unit, v);
    }
    __device__ __forceinline__ void again(int64_t unit, float (&v)[kWidth]) const {
      if (space.kept)
        space.get(unit, v);
      else
        normed(unit, v);
    }
  };

  // x, or x + residual rounded to T, which is also stored.
  __device__ __forceinline__ void read(int64_t row, int64_t unit, const Space<float, kWidth>& space,
                                       float (&v)[kWidth]) const {
    const int64_t first = unit * kWidth, valid = space.valid(unit);
    load_run(x + row * ld + first, valid, vector, v);
    if (residual) {
      float r[kWidth];
      load_run(residual + row * ldr + first, valid, vector, r);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = widen(narrow<T>(fadd(v[j], r[j])));
      store_run(sum + row * space.cols + first, valid, vector, v);
    }
    if (space.kept) space.put(unit, v);
  }

  __device__ __forceinline__ Row open(int64_t row, const Space<float, kWidth>& space, RowShared& shared) const {
    Row r{residual ? sum + row * space.cols : x + row * ld, vector, 0.f, 0.f, weight, bias, space};
    float s[kSets][kWidth] = {};
    for (int64_t base = threadIdx.x; base < space.units; base += int64_t{kSets} * blockDim.x) {
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const int64_t unit = base + set * static_cast<int64_t>(blockDim.x);
        if (unit >= space.units) continue;
        float v[kWidth];
        read(row, unit, space, v);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) s[set][j] = fadd(s[set][j], kSubtractMean ? v[j] : fmul(v[j], v[j]));
      }
    }
    float mean = mean_of(sum_in_lanes(s, shared.sums[0]), space.cols);
    if constexpr (kSubtractMean) {
      r.mean = mean;
      float d[kSets][kWidth] = {};
      for (int64_t base = threadIdx.x; base < space.units; base += int64_t{kSets} * blockDim.x) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          const int64_t unit = base + set * static_cast<int64_t>(blockDim.x);
          if (unit >= space.units) continue;
          const int64_t valid = space.valid(unit);
          float v[kWidth];
          r.values(unit, v);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const float off = fsub(v[j], mean);
            d[set][j] = fadd(d[set][j], j < valid ? fmul(off, off) : 0.f);
          }
        }
      }
      mean = mean_of(sum_in_lanes(d, shared.sums[1]), space.cols);
    }
    r.factor = norm_factor(mean, eps);
    return r;
  }
};

// The curve costs about sixty operations, so it is evaluated once where the row can be kept.
template <class T>
struct SiluMulInput {
  using Kept = float;
  static constexpr int kWidth = kVector<T>;
  const T* x;
  int64_t ld;
  bool vector;

  struct Row {
    const T *gate, *up;
    bool vector;
    Space<float, kWidth> space;
    __device__ __forceinline__ void gated(int64_t unit, float (&v)[kWidth]) const {
      float u[kWidth];
      load_run(gate + unit * kWidth, space.valid(unit), vector, v);
      load_run(up + unit * kWidth, space.valid(unit), vector, u);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = gated_silu(v[j], u[j]);
    }
    __device__ __forceinline__ void produce(int64_t unit, float (&v)[kWidth]) const {
      gated(unit, v);
      if (space.kept) space.put(unit, v);
    }
    __device__ __forceinline__ void again(int64_t unit, float (&v)[kWidth]) const {
      if (space.kept)
        space.get(unit, v);
      else
        gated(unit, v);
    }
  };
  __device__ __forceinline__ Row open(int64_t row, const Space<float, kWidth>& space, RowShared&) const {
    return {x + row * ld, x + row * ld + space.cols, vector, space};
  }
};

Channel channel_of(const void* data, DType type) { return {data, type, is_aligned(data, 0, 16)}; }

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
      const NormInput<T, decltype(subtract_mean)::value> in{static_cast<const T*>(x.data),
                                                            static_cast<const T*>(norm.residual),
                                                            static_cast<T*>(norm.sum),
                                                            x.ld,
                                                            norm.ldr,
                                                            vector,
                                                            norm.eps,
                                                            channel_of(norm.weight, norm.weight_type),
                                                            channel_of(norm.bias, norm.bias_type)};
      quantize_rows<T>("norm_quantize", in, x.rows, x.cols, range, params, out, context);
    };
    if (norm.subtract_mean)
      run(std::true_type{});
    else
      run(std::false_type{});
  });
}

void silu_mul_quantize(const FloatMatrix& x, const CodeRange& range, const QuantizeParams& params,
                       const QuantizeOut& out, const Context& context) {
  with_float_type(x.type, "silu_mul_quantize", [&](auto element) {
    using T = decltype(element);
    const auto size = static_cast<int64_t>(sizeof(T));
    const int64_t cols = x.cols / 2;
    const SiluMulInput<T> in{static_cast<const T*>(x.data), x.ld,
                             is_aligned(x.data, x.ld * size, 16) && cols * size % 16 == 0};
    quantize_rows<T>("silu_mul_quantize", in, x.rows, cols, range, params, out, context);
  });
}

}  // namespace pyquant::cuda
