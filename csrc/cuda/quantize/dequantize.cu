// Codes -> real numbers (docs/numerics.md 2.3): a thread turns as many codes as one 16-byte store takes.
#include "cuda/grid.h"
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/unit.cuh"

namespace pyquant::cuda {

namespace {

constexpr int kBlock = 256;

struct CodeMatrix {
  const uint8_t* q;
  int64_t cols, row_bytes;
  bool vector;  // the codes of a unit are one aligned load
};

// Where the scale of element (row, column) stands.
struct Scales {
  const float* scale;
  const int32_t* zero_point;
  int64_t row_step;
  uint32_t group_size;  // 0: no groups
  __device__ __forceinline__ int64_t at(int64_t row, int64_t column) const {
    return row * row_step + (group_size ? static_cast<uint32_t>(column) / group_size : 0);
  }
};

Scales scales_of(Granularity granularity, int64_t cols, int64_t group_size, const float* scale,
                 const int32_t* zero_point) {
  switch (granularity) {
    case Granularity::rows: return {scale, zero_point, 1, 0};
    case Granularity::groups: return {scale, zero_point, cols / group_size, static_cast<uint32_t>(group_size)};
    default: return {scale, zero_point, 0, 0};
  }
}

// What is added to codes so that they are bytes from 0.
template <DType kType>
constexpr int kBias = -code_type(kType).qmin;

// Width codes, biased, a byte each. `valid` of them exist.
template <DType kType, int Width>
__device__ __forceinline__ void load_codes(const uint8_t* from, int valid, bool vector, uint32_t (&word)[Width / 4]) {
  constexpr int kPerByte = per_byte(kType), kBytes = Width / kPerByte;
  constexpr uint32_t kSign = code_type(kType).is_signed() ? 0x80808080u : 0u;
  uint32_t raw[2] = {};
  if (vector && valid >= Width) {
    if constexpr (kBytes == 8) {
      const uint2 both = *reinterpret_cast<const uint2*>(from);
      raw[0] = both.x;
      raw[1] = both.y;
    } else if constexpr (kBytes == 4) {
      raw[0] = *reinterpret_cast<const uint32_t*>(from);
    } else {
      raw[0] = *reinterpret_cast<const uint16_t*>(from);
    }
  } else {
    const int bytes = (valid + kPerByte - 1) / kPerByte;
#pragma unroll
    for (int j = 0; j < kBytes; ++j)
      if (j < bytes) raw[j / 4] |= static_cast<uint32_t>(from[j]) << (8 * (j % 4));
  }
  if constexpr (is_packed(kType)) {
    const uint32_t even = (raw[0] ^ 0x88888888u) & 0x0f0f0f0fu, odd = ((raw[0] ^ 0x88888888u) >> 4) & 0x0f0f0f0fu;
    word[0] = __byte_perm(even, odd, 0x5140);
    if constexpr (Width == 8) word[1] = __byte_perm(even, odd, 0x7362);
  } else {
#pragma unroll
    for (int i = 0; i < Width / 4; ++i) word[i] = raw[i] ^ kSign;
  }
}

// A byte becomes the low byte of 2^23, from which an exact subtraction takes bias and zero point: no conversion
// instruction an element, as long as zero points are small.
constexpr int32_t kSmallZero = 1 << 20;

template <DType kType, class T>
__global__ void __launch_bounds__(kBlock)
    dequantize_kernel(CodeMatrix codes, Scales scales, bool vector, T* __restrict__ out) {
  constexpr int kWidth = kVector<T>, kPerByte = per_byte(kType);
  wait_for_predecessor();
  release_successor();
  const int64_t row = blockIdx.x;
  const uint8_t* from = codes.q + row * codes.row_bytes;
  const bool split = scales.group_size % kWidth != 0;  // a unit may belong to several groups
  for (int64_t c = (static_cast<int64_t>(blockIdx.y) * kBlock + threadIdx.x) * kWidth; c < codes.cols;
       c += int64_t{kBlock} * gridDim.y * kWidth) {
    const int valid = clipped(codes.cols - c, kWidth);
    uint32_t word[kWidth / 4];
    load_codes<kType, kWidth>(from + c / kPerByte, valid, codes.vector, word);
    int64_t s = scales.at(row, c);
    float scale = scales.scale[s], v[kWidth];
    int32_t zero_point = scales.zero_point ? scales.zero_point[s] : 0;
    if (!split && zero_point <= kSmallZero && zero_point >= -kSmallZero) {
      const float offset = static_cast<float>((1 << 23) + kBias<kType> + zero_point);
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        v[j] = fmul(fsub(__uint_as_float(__byte_perm(word[j / 4], 0x4b000000u, 0x7440 + j % 4)), offset), scale);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (split && j > 0 && j < valid) {
          s = scales.at(row, c + j);
          scale = scales.scale[s];
          zero_point = scales.zero_point ? scales.zero_point[s] : 0;
        }
        v[j] =
            real_from_code(static_cast<int32_t>(word[j / 4] >> (8 * (j % 4)) & 255) - kBias<kType>, scale, zero_point);
      }
    }
    store_unit(out + row * codes.cols + c, valid, vector, narrow_unit<T>(v));
  }
}

}  // namespace

void dequantize(const void* q, DType q_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                int64_t group_size, const float* scale, const int32_t* zero_point, void* out, DType out_type,
                const Context& context) {
  if (rows == 0 || cols == 0) return;
  if (granularity == Granularity::groups) check_columns_of_groups("dequantize", cols);
  with_float_type(out_type, "dequantize", [&](auto element) {
    using T = decltype(element);
    constexpr int kWidth = kVector<T>;
    const Scales scales = scales_of(granularity, cols, group_size, scale, zero_point);
    const bool vector = is_aligned(out, rows > 1 ? cols * static_cast<int64_t>(sizeof(T)) : 0, 16);
    const int64_t blocks = (cols + kWidth * kBlock - 1) / (kWidth * kBlock);
    LaunchShape shape;
    shape.grid = grid_of("dequantize", rows, blocks < 1024 ? blocks : 1024);
    shape.block = dim3(kBlock);
    shape.overlaps = true;
    const auto run = [&](auto type) {
      constexpr DType kType = decltype(type)::value;
      const int64_t row_bytes = columns_of(kType, ld), unit_bytes = columns_of(kType, kWidth);
      const CodeMatrix codes{static_cast<const uint8_t*>(q), cols, row_bytes,
                             is_aligned(q, rows > 1 ? row_bytes : 0, unit_bytes)};
      launch<dequantize_kernel<kType, T>>("dequantize", shape, context, codes, scales, vector, static_cast<T*>(out));
    };
    switch (q_type) {
      case DType::s4: return run(std::integral_constant<DType, DType::s4>{});
      case DType::u8: return run(std::integral_constant<DType, DType::u8>{});
      default: return run(std::integral_constant<DType, DType::s8>{});
    }
  });
}

}  // namespace pyquant::cuda
