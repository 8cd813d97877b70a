// Quantise and dequantise (docs/numerics.md 2). Bandwidth-bound: each element is read once and written once.
//   quantize_dynamic: a block owns one row; threads read it sixteen bytes at a time, keep it in shared memory while
//   the range is reduced by shuffles, then write the codes. A row that does not fit (over 48 KiB) is read twice.
//   NaN and infinity: the largest |x| is reduced as a bit pattern, where NaN > infinity > every finite value, so a
//   poisoned row is seen without a flag of its own.
#include "cuda/elements.cuh"
#include "cuda/launch.h"

namespace pyquant::cuda {

namespace {

constexpr int kRowBytes = 48 << 10;
constexpr int kBlock = 256;

struct Range {
  uint32_t amax = 0;  // bits of the largest |x|
  float low = 0.f, high = 0.f;
};

__device__ __forceinline__ void widen_range(Range& r, float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  r.amax = bits > r.amax ? bits : r.amax;
  r.low = x < r.low ? x : r.low;
  r.high = x > r.high ? x : r.high;
}

__device__ __forceinline__ Range merged(const Range& a, const Range& b) {
  return {a.amax > b.amax ? a.amax : b.amax, a.low < b.low ? a.low : b.low, a.high > b.high ? a.high : b.high};
}

__device__ __forceinline__ Range reduce_warp(Range r) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const Range other = {__shfl_xor_sync(0xffffffffu, r.amax, step), __shfl_xor_sync(0xffffffffu, r.low, step),
                         __shfl_xor_sync(0xffffffffu, r.high, step)};
    r = merged(r, other);
  }
  return r;
}

__device__ __forceinline__ Range reduce_block(Range r, Range* per_warp) {
  r = reduce_warp(r);
  const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
  if (threadIdx.x % 32 == 0) per_warp[warp] = r;
  __syncthreads();
  r = per_warp[0];
  for (int i = 1; i < warps; ++i) r = merged(r, per_warp[i]);
  return r;
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    quantize_dynamic_kernel(const T* x, int64_t cols, int64_t ld, bool vector, bool cached, bool symmetric,
                            int32_t qmin, int32_t qmax, int8_t* q, int64_t ldq, bool vector_store, float* scale,
                            int32_t* zero_point) {
  constexpr int kWidth = kVector<T>;
  extern __shared__ uint4 kept[];
  __shared__ Range per_warp[kBlock / 32];
  const T* row = x + static_cast<int64_t>(blockIdx.x) * ld;
  int8_t* codes = q + static_cast<int64_t>(blockIdx.x) * ldq;
  const int64_t vectors = vector ? cols / kWidth : 0;
  Range range;
  for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
    if (cached) kept[i] = reinterpret_cast<const uint4*>(row)[i];
    float v[kWidth];
    load_vector(cached ? reinterpret_cast<const T*>(kept + i) : row + i * kWidth, v);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) widen_range(range, v[j]);
  }
  for (int64_t i = vectors * kWidth + threadIdx.x; i < cols; i += blockDim.x) widen_range(range, widen(row[i]));
  range = reduce_block(range, per_warp);

  const float amax = float_from_bits(range.amax);
  const bool poisoned = !(amax < kInfinity);
  const float row_scale =
      symmetric ? scale_from_amax(amax, qmax) : (poisoned ? kNaN : scale_from_range(range.low, range.high, qmin, qmax));
  const float recip = scale_recip(row_scale);
  const int32_t zero = symmetric ? 0 : zero_point_from_range(range.low, recip, qmin, qmax);
  if (threadIdx.x == 0) {
    scale[blockIdx.x] = row_scale;
    if (zero_point) zero_point[blockIdx.x] = zero;
  }
  for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
    float v[kWidth];
    load_vector(cached ? reinterpret_cast<const T*>(kept + i) : row + i * kWidth, v);  // each thread reads what it kept
    int32_t code[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) code[j] = code_from_real(v[j], recip, zero, qmin, qmax);
    if (vector_store) {
      store_codes(codes + i * kWidth, code);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) codes[i * kWidth + j] = static_cast<int8_t>(code[j]);
    }
  }
  for (int64_t i = vectors * kWidth + threadIdx.x; i < ldq; i += blockDim.x)
    codes[i] = i < cols ? static_cast<int8_t>(code_from_real(widen(row[i]), recip, zero, qmin, qmax)) : int8_t{0};
}

// Index of the scale of element (row, column).
struct ScaleIndex {
  int64_t row_step, group_size;  // group_size 0: no groups
  __device__ __forceinline__ int64_t operator()(int64_t row, int64_t column) const {
    return row * row_step + (group_size ? column / group_size : 0);
  }
};

ScaleIndex scale_index(Granularity granularity, int64_t cols, int64_t group_size) {
  switch (granularity) {
    case Granularity::rows: return {1, 0};
    case Granularity::groups: return {cols / group_size, group_size};
    default: return {0, 0};
  }
}

// blockIdx.x walks the rows, blockIdx.y the columns; a thread takes sixteen bytes where rows are aligned and share one
// scale, else one element.
template <class T>
__global__ void __launch_bounds__(kBlock)
    quantize_kernel(const T* x, int64_t cols, int64_t ld, bool vector, ScaleIndex index, const float* scale,
                    const int32_t* zero_point, int32_t qmin, int32_t qmax, int8_t* q, bool vector_store) {
  constexpr int kWidth = kVector<T>;
  const int64_t row = blockIdx.x, first = static_cast<int64_t>(blockIdx.y) * kBlock + threadIdx.x;
  const int64_t step = int64_t{kBlock} * gridDim.y;
  const T* from = x + row * ld;
  int8_t* to = q + row * cols;
  const int64_t vectors = vector ? cols / kWidth : 0;
  if (vectors > 0) {
    const float recip = scale_recip(scale[index(row, 0)]);
    const int32_t zero = zero_point ? zero_point[index(row, 0)] : 0;
    for (int64_t i = first; i < vectors; i += step) {
      float v[kWidth];
      load_vector(from + i * kWidth, v);
      int32_t code[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) code[j] = code_from_real(v[j], recip, zero, qmin, qmax);
      if (vector_store) {
        store_codes(to + i * kWidth, code);
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) to[i * kWidth + j] = static_cast<int8_t>(code[j]);
      }
    }
  }
  for (int64_t c = vectors * kWidth + first; c < cols; c += step) {
    const int64_t s = index(row, c);
    const int32_t zero = zero_point ? zero_point[s] : 0;
    to[c] = static_cast<int8_t>(code_from_real(widen(from[c]), scale_recip(scale[s]), zero, qmin, qmax));
  }
}

template <class Q, class T>
__global__ void __launch_bounds__(kBlock)
    dequantize_kernel(const Q* q, int64_t rows, int64_t cols, int64_t ld, ScaleIndex index, const float* scale,
                      const int32_t* zero_point, T* out) {
  const int64_t row = blockIdx.x;
  for (int64_t c = static_cast<int64_t>(blockIdx.y) * kBlock + threadIdx.x; c < cols;
       c += int64_t{kBlock} * gridDim.y) {
    const int64_t s = index(row, c);
    out[row * cols + c] = narrow<T>(real_from_code(q[row * ld + c], scale[s], zero_point ? zero_point[s] : 0));
  }
}

LaunchShape elementwise(int64_t rows, int64_t cols) {
  const int64_t columns = (cols + kBlock - 1) / kBlock;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows), static_cast<unsigned>(columns < 1024 ? columns : 1024));
  shape.block = dim3(kBlock);
  return shape;
}

}  // namespace

void quantize_dynamic(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, bool symmetric, int32_t qmin,
                      int32_t qmax, int8_t* q, int64_t ldq, float* scale, int32_t* zero_point, const Context& context) {
  if (rows == 0) return;
  with_float_type(x_type, "quantize_dynamic", [&](auto element) {
    using T = decltype(element);
    const int64_t vectors = cols / kVector<T>;
    const bool vector = is_aligned(x, ld * static_cast<int64_t>(sizeof(T)), 16);
    const bool cached = vector && vectors * 16 <= kRowBytes - 1024;
    const bool vector_store = is_aligned(q, ldq, kVector<T>);
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(rows));
    shape.block = dim3(cols <= 32 * kVector<T> ? 32 : kBlock);
    shape.shared_bytes = cached ? static_cast<int>(vectors * 16) : 0;
    launch<quantize_dynamic_kernel<T>>("quantize_dynamic", shape, context, static_cast<const T*>(x), cols, ld, vector,
                                       cached, symmetric, qmin, qmax, q, ldq, vector_store, scale, zero_point);
  });
}

void quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
              int64_t group_size, const float* scale, const int32_t* zero_point, int32_t qmin, int32_t qmax, int8_t* q,
              const Context& context) {
  if (rows == 0 || cols == 0) return;
  with_float_type(x_type, "quantize", [&](auto element) {
    using T = decltype(element);
    constexpr int kWidth = kVector<T>;
    const bool vector = granularity != Granularity::groups && is_aligned(x, ld * static_cast<int64_t>(sizeof(T)), 16);
    launch<quantize_kernel<T>>("quantize", elementwise(rows, vector ? (cols + kWidth - 1) / kWidth : cols), context,
                               static_cast<const T*>(x), cols, ld, vector, scale_index(granularity, cols, group_size),
                               scale, zero_point, qmin, qmax, q, is_aligned(q, cols, kWidth));
  });
}

void dequantize(const void* q, DType q_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                int64_t group_size, const float* scale, const int32_t* zero_point, void* out, DType out_type,
                const Context& context) {
  if (rows == 0 || cols == 0) return;
  with_float_type(out_type, "dequantize", [&](auto element) {
    using T = decltype(element);
    const ScaleIndex index = scale_index(granularity, cols, group_size);
    if (q_type == DType::u8)
      launch<dequantize_kernel<uint8_t, T>>("dequantize", elementwise(rows, cols), context,
                                            static_cast<const uint8_t*>(q), rows, cols, ld, index, scale, zero_point,
                                            static_cast<T*>(out));
    else
      launch<dequantize_kernel<int8_t, T>>("dequantize", elementwise(rows, cols), context,
                                           static_cast<const int8_t*>(q), rows, cols, ld, index, scale, zero_point,
                                           static_cast<T*>(out));
  });
}

}  // namespace pyquant::cuda
