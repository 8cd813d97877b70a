// Activation codes that come from a caller, laid out as the tensor-core rows read them: one signed byte a code, rows on
// 16-byte boundaries, zero codes in the padding of K.
#include "cuda/launch.h"
#include "cuda/zeros.cuh"

namespace pyquant::cuda {

namespace {

constexpr int kBlock = 256;

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

__global__ void __launch_bounds__(kBlock)
    arrange_codes_kernel(Source source, int64_t rows, int8_t* q, int64_t ldq, const int32_t* zero_point,
                         int32_t* shifted_zero_point, Zeros zeros) {
  write_zeros(zeros);
  const int64_t first = blockIdx.x * int64_t{kBlock} + threadIdx.x;
  if (first == 0 && shifted_zero_point) *shifted_zero_point = (zero_point ? *zero_point : 0) - 128;
  const int64_t words = ldq / 4;
  for (int64_t i = first; i < rows * words; i += int64_t{kBlock} * gridDim.x) {
    const int64_t row = i / words, c = 4 * (i % words);
    reinterpret_cast<uint32_t*>(q + row * ldq)[c / 4] = load_codes(source, row, c);
  }
}

}  // namespace

void arrange_codes(const void* x, DType type, int64_t rows, int64_t cols, int64_t ld, int8_t* q, int64_t ldq,
                   const int32_t* zero_point, int32_t* shifted_zero_point, const Zeros& zeros, const Context& context) {
  if (rows == 0 || ldq == 0) return;
  const int64_t row_bytes = columns_of(type, ld);
  const bool whole_words = !is_packed(type) && (reinterpret_cast<uintptr_t>(x) | static_cast<uint64_t>(ld)) % 4 == 0;
  const int64_t blocks = (rows * (ldq / 4) + kBlock - 1) / kBlock;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(blocks < (int64_t{1} << 20) ? blocks : int64_t{1} << 20));
  shape.block = dim3(kBlock);
  const Source source{static_cast<const uint8_t*>(x), cols, row_bytes, type, whole_words};
  launch<arrange_codes_kernel>("arrange_codes", shape, context, source, rows, q, ldq, zero_point, shifted_zero_point,
                               zeros);
}

}  // namespace pyquant::cuda
