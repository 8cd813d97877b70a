// From values in registers to codes in memory: rounding, padding, packing, sums. A thread holds a unit: as many
// neighbouring elements as one 16-byte load brings.
#pragma once
#include "cuda/cuda.h"
#include "cuda/elements.cuh"
#include "cuda/quantize/range.cuh"

namespace pyquant::cuda {

// QuantizeOut and the code limits as a kernel sees them.
struct Codes {
  uint8_t* q;
  int64_t ldq, row_bytes;
  bool packed, vector;  // vector: a unit is one aligned store
  int32_t qmin, qmax;
  int32_t* row_sum;
  __device__ __forceinline__ uint8_t* row(int64_t index) const { return q + index * row_bytes; }
};

template <class T>
Codes codes_of(const QuantizeOut& out, const CodeRange& range, int64_t rows, int64_t cols) {
  if (out.ldq < cols || (out.packed && out.ldq % 2 != 0))
    throw std::runtime_error("quantize: ldq " + std::to_string(out.ldq) + "; allowed: at least " +
                             std::to_string(cols) + (out.packed ? " and even" : ""));
  if (out.packed && (range.qmin < -8 || range.qmax > 7))
    throw std::runtime_error("quantize: packed codes from " + std::to_string(range.qmin) + " to " +
                             std::to_string(range.qmax) + "; allowed: within -8 to 7");
  const int64_t row_bytes = out.packed ? out.ldq / 2 : out.ldq;
  const int64_t unit_bytes = out.packed ? kVector<T> / 2 : kVector<T>;
  return {static_cast<uint8_t*>(out.q),
          out.ldq,
          row_bytes,
          out.packed,
          is_aligned(out.q, rows > 1 ? row_bytes : 0, unit_bytes),
          range.qmin,
          range.qmax,
          out.row_sum};
}

// Codes of a unit; those from `valid` on are 0.
template <int Width>
__device__ __forceinline__ void code_unit(const float (&v)[Width], int64_t valid, const Step& step, const Codes& to,
                                          int32_t (&code)[Width]) {
#pragma unroll
  for (int j = 0; j < Width; ++j)
    code[j] = j < valid ? code_from_real(v[j], step.recip, step.zero_point, to.qmin, to.qmax) : 0;
}

template <int Width>
__device__ __forceinline__ int32_t sum_unit(const int32_t (&code)[Width]) {
  int32_t sum = 0;
#pragma unroll
  for (int j = 0; j < Width; ++j) sum += code[j];
  return sum;
}

// Writes the columns [first, end) of a unit that starts at column `first`, at most all of it. Packed: both even.
template <int Width>
__device__ __forceinline__ void store_unit(uint8_t* row, int64_t first, int64_t end, bool vector, bool packed,
                                           const int32_t (&code)[Width]) {
  const bool whole = vector && first + Width <= end;
  if (packed) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < Width; ++j) word |= static_cast<uint32_t>(code[j] & 15) << (4 * j);
    if (whole) {
      if constexpr (Width == 8)
        *reinterpret_cast<uint32_t*>(row + first / 2) = word;
      else
        *reinterpret_cast<uint16_t*>(row + first / 2) = static_cast<uint16_t>(word);
      return;
    }
#pragma unroll
    for (int j = 0; j < Width; j += 2)
      if (first + j < end) row[(first + j) / 2] = static_cast<uint8_t>(word >> (4 * j));
    return;
  }
  if (whole) return store_codes(reinterpret_cast<int8_t*>(row + first), code);
#pragma unroll
  for (int j = 0; j < Width; ++j)
    if (first + j < end) row[first + j] = static_cast<uint8_t>(code[j]);
}

}  // namespace pyquant::cuda
