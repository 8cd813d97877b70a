// 4-bit codes times whole-number steps (docs/numerics.md 4.1), four to a register, as int8 codes.
//   Four codes c + 8, a byte each, are the digits of a number in base 256. The number times a step, plus 128 - 8 step
//   in every digit, has the digits c * step + 128: all from 1 to 255, so that whatever carries on the way, modulo 2^32
//   none is left. Less 128 is the sign bit turned. Thus one multiplication and addition, and one operation on bits, for
//   four codes; LiquidGEMM (arXiv 2509.01229) multiplies so too.
#pragma once
#include <cstdint>

namespace pyquant::cuda {

struct Step {
  uint32_t factor, base;
};

// The step in byte `byte` of a word.
__device__ __forceinline__ Step step_of(uint32_t word, int byte) {
  const uint32_t factor = __byte_perm(word, 0, 0x4440 + byte);
  uint32_t base = 0x80808080u - 0x08080808u * factor;
  asm("" : "+r"(base));  // the compiler would take the factor out again: a subtraction for every four codes
  return {factor, base};
}

// Nibbles 0, 2, 4 and 6 of a word, a byte each, as codes + 8: one operation, where written as two the compiler makes
// two.
__device__ __forceinline__ uint32_t biased_codes(uint32_t word) {
  uint32_t codes;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(codes) : "r"(word), "r"(0x0f0f0f0fu), "r"(0x08080808u));
  return codes;
}

// int8 products of the codes in nibbles 0, 2, 4, 6 with a step.
__device__ __forceinline__ uint32_t times_step(uint32_t word, const Step& step) {
  return (biased_codes(word) * step.factor + step.base) ^ 0x80808080u;
}

}  // namespace pyquant::cuda
