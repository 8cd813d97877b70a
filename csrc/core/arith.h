// fp32 operations that round once and never contract, the same on host and device. fma is used only where a
// formula says so: it is an IEEE operation with one rounding on both sides.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define PYQ_HD __host__ __device__ __attribute__((always_inline))
#define PYQ_HD_MEMBER static PYQ_HD
#else
// Internal linkage: the CPU kernels compile these bodies once for each instruction set, and the linker must never merge
// them.
#define PYQ_HD static
#define PYQ_HD_MEMBER static  // of structs in unnamed namespaces, for the same reason
#endif

namespace pyquant {

#define kInfinity __builtin_inff()
#define kNaN __builtin_nanf("")

#if defined(__CUDA_ARCH__)
PYQ_HD inline float fmul(float a, float b) { return __fmul_rn(a, b); }
PYQ_HD inline float fadd(float a, float b) { return __fadd_rn(a, b); }
PYQ_HD inline float fsub(float a, float b) { return __fsub_rn(a, b); }
PYQ_HD inline float fdiv(float a, float b) { return __fdiv_rn(a, b); }
PYQ_HD inline float fsqrt(float a) { return __fsqrt_rn(a); }
PYQ_HD inline float ffma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
PYQ_HD inline float fround_even(float a) { return rintf(a); }
PYQ_HD inline float float_from_bits(uint32_t u) { return __uint_as_float(u); }
PYQ_HD inline uint32_t bits_from_float(float f) { return __float_as_uint(f); }
#else
PYQ_HD inline float fmul(float a, float b) { return a * b; }
PYQ_HD inline float fadd(float a, float b) { return a + b; }
PYQ_HD inline float fsub(float a, float b) { return a - b; }
PYQ_HD inline float fdiv(float a, float b) { return a / b; }
PYQ_HD inline float fsqrt(float a) { return __builtin_sqrtf(a); }
PYQ_HD inline float ffma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
PYQ_HD inline float fround_even(float a) { return __builtin_rintf(a); }
PYQ_HD inline float float_from_bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
PYQ_HD inline uint32_t bits_from_float(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
#endif

}  // namespace pyquant
