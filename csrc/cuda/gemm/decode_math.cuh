// The multiplications of the decode kernels, one struct a pair of types: what a lane does with the 16 bytes of weights
// that it loaded from a row and with the activations that belong to them.
//   Weights are operand A of mma.sync (16 channels), activations operand B (8 tokens). A sum over k may be taken in any
//   order (integers: exactly; floats: outside of the bit contract), so lane t of a quad takes kCodes neighbouring k,
//   whichever columns of the fragments the instruction calls its own: nothing is shuffled.
//   A unit is 16 bytes of one token's activations, two MMAs' worth of B; kUnits of them go with 16 bytes of weights.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "cuda/gemm/steps.cuh"

namespace pyquant::cuda {

__device__ __forceinline__ uint32_t word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// acc (channels g, g + 8 x tokens 2t, 2t + 1) += two rows' fragments x one token's.
__device__ __forceinline__ void mma(int32_t (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1, int8_t) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&acc)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

struct DecodeS8S8 {
  using X = int8_t;
  using Acc = int32_t;
  using Offset = int32_t;            // what the codes are corrected by before the product (floats only)
  static constexpr int kCodes = 16;  // codes in 16 bytes of weights
  static constexpr DType kX = DType::s8, kW = DType::s8;
  static constexpr int kAccShift = 0;  // the accumulator holds the sum times 2^kAccShift
  static constexpr bool kTakesGroups = false, kBlocked = false, kSteps = false;

  static bool takes(DType x) { return x == DType::s8; }
  static __device__ __forceinline__ Offset offset(int32_t) { return 0; }
  static __device__ __forceinline__ void weights(const uint4& row, int, Offset, uint32_t (&a)[4]) {
    a[0] = row.x, a[1] = row.y, a[2] = row.z, a[3] = row.w;
  }
  static __device__ __forceinline__ void activations(const uint4& unit, uint32_t (&b)[4]) {
    b[0] = unit.x, b[1] = unit.y, b[2] = unit.z, b[3] = unit.w;
  }
};

// A nibble moved to the top of a byte is the code times 16: two or three instructions unpack eight codes, even k apart
// from odd k, and the activations follow.
struct DecodeS8S4 : DecodeS8S8 {
  static constexpr DType kW = DType::s4;
  static constexpr int kCodes = 32, kAccShift = 4;
  static constexpr bool kTakesGroups = true, kBlocked = false, kSteps = false;

  static bool takes(DType x) { return x == DType::s8 || x == DType::s4; }
  static __device__ __forceinline__ void weights(const uint4& row, int unit, Offset, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = word_of(row, 2 * unit + i);
      a[2 * i] = (word << 4) & 0xf0f0f0f0u;
      a[2 * i + 1] = word & 0xf0f0f0f0u;
    }
  }
  static __device__ __forceinline__ void activations(const uint4& unit, uint32_t (&b)[4]) {
    b[0] = __byte_perm(unit.x, unit.y, 0x6420), b[1] = __byte_perm(unit.x, unit.y, 0x7531);
    b[2] = __byte_perm(unit.z, unit.w, 0x6420), b[3] = __byte_perm(unit.z, unit.w, 0x7531);
  }
};

// The order of core/blocked128.h: a word holds four codes of channel g in its low nibbles, of channel g + 8 in its high
// ones, 16 bytes the operands of two instructions for 64 codes, as the instruction itself counts them.
struct DecodeS8S4Blocked : DecodeS8S4 {
  static constexpr bool kBlocked = true;

  static __device__ __forceinline__ void weights(const uint4& words, uint32_t (&low)[4], uint32_t (&high)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low[i] = (word_of(words, i) << 4) & 0xf0f0f0f0u;
      high[i] = word_of(words, i) & 0xf0f0f0f0u;
    }
  }
};

// Codes times their steps (steps.cuh), in both orders: a lane's 32 natural codes of a row share one.
struct DecodeS8S4Steps : DecodeS8S4 {
  static constexpr int kAccShift = 0;
  static constexpr bool kTakesGroups = false, kSteps = true;

  static __device__ __forceinline__ void weights(const uint4& row, int unit, const Step& step, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = word_of(row, 2 * unit + i);
      a[2 * i] = times_step(word, step);
      a[2 * i + 1] = times_step(word >> 4, step);
    }
  }
};

struct DecodeS8S4BlockedSteps : DecodeS8S4Steps {
  static constexpr bool kBlocked = true;

  static __device__ __forceinline__ void weights(const uint4& words, const Step& below, const Step& above,
                                                 uint32_t (&low)[4], uint32_t (&high)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      low[i] = times_step(word_of(words, i), below);
      high[i] = times_step(word_of(words, i) >> 4, above);
    }
  }
};

// Integers as floats: an unsigned code in the low bits of a power of two whose unit in the last place is 1, less that
// power, the code's bias and the zero point, all in one exact subtraction.
__device__ __forceinline__ uint32_t subtract(uint32_t pair, __half2 offset) {
  const __half2 v = __hsub2(*reinterpret_cast<const __half2*>(&pair), offset);
  return *reinterpret_cast<const uint32_t*>(&v);
}
__device__ __forceinline__ uint32_t subtract(uint32_t pair, __nv_bfloat162 offset) {
  const __nv_bfloat162 v = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&pair), offset);
  return *reinterpret_cast<const uint32_t*>(&v);
}

// A pair of 16-bit floats from its bits. Offsets are made so: the unit of their last place is 1, and zero points are
// codes (pyquant/ops/zero_points.py), so that an integer is added to a power of two without a conversion.
template <class Pair>
struct Bits {
  static __device__ __forceinline__ Pair of(uint32_t bits) { return *reinterpret_cast<const Pair*>(&bits); }
};

template <class Float>
struct DecodeW8A16;

template <>
struct DecodeW8A16<__half> {
  using X = __half;
  using Acc = float;
  using Offset = __half2;
  static constexpr DType kX = DType::f16, kW = DType::s8;
  static constexpr int kCodes = 16, kAccShift = 0;
  static constexpr bool kTakesGroups = true, kBlocked = false, kSteps = false;

  static bool takes(DType x) { return x == kX; }
  static __device__ __forceinline__ Offset offset(int32_t zero_point) {
    return Bits<Offset>::of(0x64006400u + 0x10001u * static_cast<uint32_t>(128 + zero_point));  // 1152 + it, twice
  }
  static __device__ __forceinline__ void weights(const uint4& row, int unit, Offset offset, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = word_of(row, 2 * unit + i) ^ 0x80808080u;
      a[2 * i] = subtract(__byte_perm(word, 0x64646464u, 0x4140), offset);
      a[2 * i + 1] = subtract(__byte_perm(word, 0x64646464u, 0x4342), offset);
    }
  }
  static __device__ __forceinline__ void activations(const uint4& unit, uint32_t (&b)[4]) {
    b[0] = unit.x, b[1] = unit.y, b[2] = unit.z, b[3] = unit.w;
  }
};

// bfloat16 has 8 bits of significand: enough for a code less its zero point, not for a power of two on top. The detour
// is over float.
template <>
struct DecodeW8A16<__nv_bfloat16> {
  using X = __nv_bfloat16;
  using Acc = float;
  using Offset = float;
  static constexpr DType kX = DType::bf16, kW = DType::s8;
  static constexpr int kCodes = 16, kAccShift = 0;
  static constexpr bool kTakesGroups = true, kBlocked = false, kSteps = false;

  static bool takes(DType x) { return x == kX; }
  static __device__ __forceinline__ Offset offset(int32_t zero_point) {
    return __uint_as_float(0x4b000000u + static_cast<uint32_t>(128 + zero_point));  // 2^23 + 128 + it
  }
  static __device__ __forceinline__ float real(uint32_t word, uint32_t selector, Offset offset) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, selector)) - offset;
  }
  static __device__ __forceinline__ void weights(const uint4& row, int unit, Offset offset, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = word_of(row, 2 * unit + i) ^ 0x80808080u;
      const __nv_bfloat162 low = __floats2bfloat162_rn(real(word, 0x7650, offset), real(word, 0x7651, offset));
      const __nv_bfloat162 high = __floats2bfloat162_rn(real(word, 0x7652, offset), real(word, 0x7653, offset));
      a[2 * i] = *reinterpret_cast<const uint32_t*>(&low);
      a[2 * i + 1] = *reinterpret_cast<const uint32_t*>(&high);
    }
  }
  static __device__ __forceinline__ void activations(const uint4& unit, uint32_t (&b)[4]) {
    b[0] = unit.x, b[1] = unit.y, b[2] = unit.z, b[3] = unit.w;
  }
};

// Nibbles i and i + 4 of a word fall into the two halves of a pair.
template <class Float>
struct DecodeW4A16 {
  using X = Float;
  using Acc = float;
  static constexpr bool kHalf = std::is_same_v<Float, __half>;
  using Offset = std::conditional_t<kHalf, __half2, __nv_bfloat162>;
  static constexpr DType kX = kHalf ? DType::f16 : DType::bf16, kW = DType::s4;
  static constexpr int kCodes = 32, kAccShift = 0;
  static constexpr bool kTakesGroups = true, kBlocked = false, kSteps = false;
  static constexpr uint32_t kBase = kHalf ? 0x64006400u : 0x43004300u;  // 1024 or 128, twice

  static bool takes(DType x) { return x == kX; }
  static __device__ __forceinline__ Offset offset(int32_t zero_point) {
    return Bits<Offset>::of(kBase + 0x10001u * static_cast<uint32_t>(8 + zero_point));
  }
  // Of the lowest nibble of each half of a word: code + 8 under the base, by one operation: (word & mask) ^ c, where c
  // sets the base and turns a nibble's sign bit. Written as such it becomes two, one an immediate.
  static __device__ __forceinline__ uint32_t pair(uint32_t word, Offset offset) {
    uint32_t biased;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(biased) : "r"(word), "r"(0x000f000fu), "r"(kBase ^ 0x00080008u));
    return subtract(biased, offset);
  }
  static __device__ __forceinline__ void weights(const uint4& row, int unit, Offset offset, uint32_t (&a)[4]) {
    const uint32_t word = word_of(row, unit);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = pair(word >> (4 * i), offset);
  }
  static __device__ __forceinline__ void activations(const uint4& unit, uint32_t (&b)[4]) {
    b[0] = __byte_perm(unit.x, unit.z, 0x5410), b[1] = __byte_perm(unit.x, unit.z, 0x7632);
    b[2] = __byte_perm(unit.y, unit.w, 0x5410), b[3] = __byte_perm(unit.y, unit.w, 0x7632);
  }
};

}  // namespace pyquant::cuda
