// From values in registers to codes in memory: rounding, padding, packing, sums, a unit (unit.cuh) at a time.
#pragma once
#include "cuda/cuda.h"
#include "cuda/quantize/range.cuh"
#include "cuda/zeros.cuh"

namespace pyquant::cuda {

// QuantizeOut and the code limits as a kernel sees them.
struct Codes {
  uint8_t* q;
  int64_t ldq, row_bytes;
  bool packed, vector;  // vector: a unit is one aligned store
  int32_t qmin, qmax;
  int32_t* row_sum;
  Zeros zeros;
  __device__ __forceinline__ uint8_t* row(int64_t index) const { return q + index * row_bytes; }
};

template <class T, int Width = kVector<T>>
Codes codes_of(const QuantizeOut& out, const CodeRange& range, int64_t rows, int64_t cols) {
  if (out.ldq < cols || (out.packed && out.ldq % 2 != 0))
    throw std::runtime_error("quantize: ldq " + std::to_string(out.ldq) + "; allowed: at least " +
                             std::to_string(cols) + (out.packed ? " and even" : ""));
  if (out.packed && (range.qmin < -8 || range.qmax > 7))
    throw std::runtime_error("quantize: packed codes from " + std::to_string(range.qmin) + " to " +
                             std::to_string(range.qmax) + "; allowed: within -8 to 7");
  const int64_t row_bytes = out.packed ? out.ldq / 2 : out.ldq;
  const int64_t unit_bytes = out.packed ? Width / 2 : Width;
  return {static_cast<uint8_t*>(out.q),
          out.ldq,
          row_bytes,
          out.packed,
          is_aligned(out.q, rows > 1 ? row_bytes : 0, unit_bytes),
          range.qmin,
          range.qmax,
          out.row_sum,
          out.zeros};
}

// What is known of the values that a step meets: of a range that they made themselves, rint(x / scale) needs no clamp
// (symmetric: 127 at the range's end, rounding included), or at least no NaN can be among them.
enum class Values { within, finite, any };

// code_from_real (core/epilogue_math.h) for units. The limits are whole numbers, so that clamping may come before
// rounding; adding 1.5 * 2^23 rounds to the nearest even integer in the low bits.
struct Coder {
  float recip, low, high;  // limits of x / scale
  uint32_t zero_points;    // four bytes
  bool is_signed;

  Coder() = default;
  __device__ __forceinline__ Coder(const Step& step, const Codes& to)
      : recip(step.recip),
        low(static_cast<float>(to.qmin - step.zero_point)),
        high(static_cast<float>(to.qmax - step.zero_point)),
        zero_points(static_cast<uint32_t>(step.zero_point & 255) * 0x01010101u),
        is_signed(to.qmin < 0) {}

  // Codes of a row that made its step itself, all 0 where the row is poisoned: its scale is NaN, its values may be.
  static __device__ __forceinline__ Coder own(const Step& step, const Codes& to) {
    Coder coder(step, to);
    if (step.recip != step.recip) coder.low = coder.high = 0.f;
    return coder;
  }
  // Whether those of `own` are Values::within.
  static __device__ __forceinline__ bool is_within(const Step& step, bool symmetric, const Codes& to) {
    return symmetric && step.recip == step.recip && to.qmin <= -to.qmax;
  }

  template <Values kValues>
  __device__ __forceinline__ uint32_t bits(float x) const {
    float v = fmul(x, recip);
    if constexpr (kValues == Values::any) v = v == v ? v : 0.f;
    if constexpr (kValues != Values::within) v = fminf(fmaxf(v, low), high);
    return __float_as_uint(fadd(v, 12582912.f));
  }

  // Four codes, a byte each.
  template <Values kValues>
  __device__ __forceinline__ uint32_t word(const float* v) const {
    const uint32_t left = __byte_perm(bits<kValues>(v[0]), bits<kValues>(v[1]), 0x0040);
    const uint32_t right = __byte_perm(bits<kValues>(v[2]), bits<kValues>(v[3]), 0x0040);
    const uint32_t codes = __byte_perm(left, right, 0x5410);
    if constexpr (kValues == Values::within) return codes;
    // Bytes added to bytes, without a carry between them.
    return ((codes & 0x7f7f7f7fu) + (zero_points & 0x7f7f7f7fu)) ^ ((codes ^ zero_points) & 0x80808080u);
  }

  template <Values kValues, int Width>
  __device__ __forceinline__ void code(const float (&v)[Width], uint32_t (&words)[Width / 4]) const {
#pragma unroll
    for (int i = 0; i < Width / 4; ++i) words[i] = word<kValues>(v + 4 * i);
  }

  template <int Words>
  __device__ __forceinline__ int32_t sum(const uint32_t (&words)[Words], int32_t before) const {
#pragma unroll
    for (int i = 0; i < Words; ++i)
      before = is_signed ? __dp4a(static_cast<int32_t>(words[i]), 0x01010101, before)
                         : static_cast<int32_t>(__dp4a(words[i], 0x01010101u, static_cast<uint32_t>(before)));
    return before;
  }
};

// Eight or four codes as nibbles.
template <int Words>
__device__ __forceinline__ uint32_t nibbles(const uint32_t (&words)[Words]) {
  uint32_t pair[2] = {};
#pragma unroll
  for (int i = 0; i < Words; ++i) {
    const uint32_t low = words[i] & 0x0f0f0f0fu;
    pair[i] = low | low >> 4;
  }
  return __byte_perm(pair[0], pair[1], 0x6420);
}

template <int Words>
__device__ __forceinline__ void store_whole(uint8_t* to, bool packed, const uint32_t (&words)[Words]) {
  if constexpr (Words == 4) {
    const uint32_t left[2] = {words[0], words[1]}, right[2] = {words[2], words[3]};
    if (packed)
      *reinterpret_cast<uint2*>(to) = make_uint2(nibbles(left), nibbles(right));
    else
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if (packed) {
    const uint32_t word = nibbles(words);
    if constexpr (Words == 2)
      *reinterpret_cast<uint32_t*>(to) = word;
    else
      *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(word);
  } else if constexpr (Words == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
    *reinterpret_cast<uint32_t*>(to) = words[0];
  }
}

// Writes the codes of a unit that begins at column `first`, `room` of them at most, and makes those of columns that the
// matrix has not, from `valid` on, 0. Packed: first and room are even.
template <int Words>
__device__ __forceinline__ void store_codes(uint8_t* row, int64_t first, int room, int valid, const Codes& to,
                                            uint32_t (&words)[Words]) {
  constexpr int kWidth = 4 * Words;
  if (valid < kWidth) {
#pragma unroll
    for (int i = 0; i < Words; ++i) {
      const int bytes = valid - 4 * i;
      words[i] = bytes <= 0 ? 0 : bytes < 4 ? words[i] & ((1u << (8 * bytes)) - 1) : words[i];
    }
  }
  uint8_t* out = row + (to.packed ? first / 2 : first);
  if (to.vector && room >= kWidth) return store_whole(out, to.packed, words);
  uint64_t bytes = words[0] | static_cast<uint64_t>(Words == 2 ? words[Words - 1] : 0) << 32;
  int count = room < kWidth ? room : kWidth;
  if (to.packed) {
    bytes = nibbles(words);
    count >>= 1;
  }
#pragma unroll 1  // rare: kept short
  for (int j = 0; j < count; ++j, bytes >>= 8) out[j] = static_cast<uint8_t>(bytes);
}

// Of a unit of sixteen codes, in two halves.
__device__ __forceinline__ void store_codes(uint8_t* row, int64_t first, int room, int valid, const Codes& to,
                                            uint32_t (&words)[4]) {
  uint32_t left[2] = {words[0], words[1]}, right[2] = {words[2], words[3]};
  store_codes(row, first, room, valid, to, left);
  words[0] = left[0];
  words[1] = left[1];
  if (room > 8) store_codes(row, first + 8, room - 8, valid - 8, to, right);
  words[2] = valid > 8 ? right[0] : 0;
  words[3] = valid > 8 ? right[1] : 0;
}

}  // namespace pyquant::cuda
