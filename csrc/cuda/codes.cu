// Activation codes that come from a caller, laid out as the tensor-core rows read them: one signed byte a code, rows on
// 16-byte boundaries, zero codes in the padding of K.
#include <algorithm>

#include "cuda/launch.h"
#include "cuda/zeros.cuh"

namespace pyquant::cuda {

namespace {

constexpr int kLanes = 32, kRows = 8;                      // of a block: words of a row, rows
constexpr int64_t kMostRows = 1 << 20, kMostColumns = 64;  // blocks

struct Source {
  const uint8_t* x;
  int64_t cols, row_bytes;
  DType type;
  bool whole_words;  // rows of bytes on 4-byte boundaries
};

// Four codes from column c on, as the bytes of a word; zero beyond the columns.
__device__ __forceinline__ uint32_t load_codes(const Source& s, int64_t row, int64_t c) {
  const uint8_t* from = s.x + row * s.row_bytes;
  const uint32_t flip = s.type == DType::u8 ? 0x80u : 0u;
  if (s.whole_words && c + 4 <= s.cols) return *reinterpret_cast<const uint32_t*>(from + c) ^ flip * 0x01010101u;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (c + i >= s.cols) break;
    uint32_t code = 0;
    if (s.type == DType::s4) {
      const uint32_t nibble = (from[(c + i) / 2] >> (4 * ((c + i) & 1))) & 15u;
      code = ((nibble ^ 8u) - 8u) & 255u;
    } else {
      code = from[c + i] ^ flip;
    }
    word |= code << (8 * i);
  }
  return word;
}

// blockIdx.x and threadIdx.y walk rows, the others the words of a row.
__global__ void __launch_bounds__(kLanes* kRows)
    arrange_codes_kernel(Source source, int64_t rows, int8_t* q, int64_t ldq, const int32_t* zero_point,
                         int32_t* shifted_zero_point, Zeros zeros) {
  if (threadIdx.y == 0) write_zeros(zeros);
  const int64_t first_row = blockIdx.x * int64_t{kRows} + threadIdx.y;
  const int64_t first = 4 * (blockIdx.y * int64_t{kLanes} + threadIdx.x);
  if (first_row == 0 && first == 0 && shifted_zero_point) *shifted_zero_point = (zero_point ? *zero_point : 0) - 128;
#pragma unroll 1
  for (int64_t row = first_row; row < rows; row += int64_t{kRows} * gridDim.x) {
#pragma unroll 1
    for (int64_t c = first; c < ldq; c += int64_t{4 * kLanes} * gridDim.y)
      *reinterpret_cast<uint32_t*>(q + row * ldq + c) = load_codes(source, row, c);
  }
}

}  // namespace

void arrange_codes(const void* x, DType type, int64_t rows, int64_t cols, int64_t ld, int8_t* q, int64_t ldq,
                   const int32_t* zero_point, int32_t* shifted_zero_point, const Zeros& zeros, const Context& context) {
  if (rows == 0 || ldq == 0) return;
  const int64_t row_bytes = columns_of(type, ld);
  const bool whole_words = !is_packed(type) && (reinterpret_cast<uintptr_t>(x) | static_cast<uint64_t>(ld)) % 4 == 0;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(std::min((rows + kRows - 1) / kRows, kMostRows)),
                    static_cast<unsigned>(std::min((ldq / 4 + kLanes - 1) / kLanes, kMostColumns)));
  shape.block = dim3(kLanes, kRows);
  const Source source{static_cast<const uint8_t*>(x), cols, row_bytes, type, whole_words};
  launch<arrange_codes_kernel>("arrange_codes", shape, context, source, rows, q, ldq, zero_point, shifted_zero_point,
                               zeros);
}

}  // namespace pyquant::cuda
