// What straight-line epilogues (plain90.cuh, plain80.cuh, depthwise_conv.cu) make of real values, two at a time, and
// what they read where there is no scale or bias.
#pragma once
#include "cuda/gemm/epilogue.cuh"

namespace pyquant::cuda {

// Two real values as half words: 16-bit floats, or codes in the low bytes.
template <bool F16>
struct PlainHalves {
  static constexpr int kBytes = 2;
  __device__ __forceinline__ explicit PlainHalves(const CodeLimits&) {}
  __device__ __forceinline__ uint32_t pair(float low, float high) const { return pair_of_floats<F16>(low, high); }
};

struct PlainCodes {
  static constexpr int kBytes = 1;
  float recip, low, high;
  int32_t zero_points;  // for both halves of a word
  __device__ __forceinline__ explicit PlainCodes(const CodeLimits& limits)
      : recip(limits.recip), low(limits.low), high(limits.high), zero_points(limits.zero_point * 0x10001) {}
  // NaN has the code of 0, which a code must be in reach of; differences of codes are those of bytes.
  __device__ __forceinline__ static bool serves(const CodeLimits& limits) {
    return fabsf(limits.recip) < kInfinity && limits.low <= 0 && limits.high >= 0 && abs(limits.zero_point) <= 128;
  }
  // code_from_real without its zero point, and 256, in the low half. The limits are whole numbers, so that clamping may
  // come first; adding 1.5 * 2^23 then rounds to the nearest even integer and leaves it in the low bits.
  __device__ __forceinline__ uint32_t code(float t) const {
    const float v = fmul(t, recip);
    return __float_as_uint(fadd(fminf(fmaxf(v == v ? v : 0.f, low), high), 12582912.f + 256.f));
  }
  // Halves are positive with their zero points too: nothing is carried between them.
  __device__ __forceinline__ uint32_t pair(float a, float b) const {
    return __byte_perm(code(a), code(b), 0x5410) + static_cast<uint32_t>(zero_points);
  }
};

// Two pairs of codes as four bytes.
__device__ __forceinline__ uint32_t bytes_of_pairs(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x6420);
}

// Sixteen codes in order from the words of a quad, of which word s holds codes 2s, 2s + 1 of two runs of eight.
__device__ __forceinline__ uint4 runs_of_codes(const uint4& word) {
  return make_uint4(__byte_perm(word.x, word.y, 0x5410), __byte_perm(word.z, word.w, 0x5410),
                    __byte_perm(word.x, word.y, 0x7632), __byte_perm(word.z, word.w, 0x7632));
}

// What stands in for a tile's absent scales and bias: it changes no bit, and loads of it need no guards.
struct Filled {
  static constexpr int kColumns = 256;
  float value[kColumns];
  constexpr explicit Filled(float all) : value{} {
    for (float& v : value) v = all;
  }
};
static __device__ const Filled kOnes(1.f), kMinusZeros(-0.f);

}  // namespace pyquant::cuda
