// Flags of arithmetic, rounding modes, and the converters of half types.
#pragma once
#include "translate/translator.h"
#include <cfenv>

namespace ptxsim {

enum : u32 {
  F_SAT = 1,
  F_FTZ = 2,
  F_RELU = 4,
  F_SATFIN = 8,
  F_RINT = 16,
  F_NAN = 32,
  F_XORSIGN = 64,
  F_WIDE = 128,
  F_RSHIFT = 8
};  // round mode in bits 8..10
inline u32 rm(Round r) { return (u32)r << F_RSHIFT; }
inline Round getRm(const Inst& I) { return (Round)(I.fl >> F_RSHIFT & 7); }

inline Round parseRound(Tr& t, bool* given = nullptr) {
  if (given) *given = true;
  if (t.has("rn")) return RN;
  if (t.has("rz")) return RZ;
  if (t.has("rm")) return RM;
  if (t.has("rp")) return RP;
  if (given) *given = false;
  return RN;
}
template <class T, class F>
inline T withRound(Round r, F f) {
  if (r == RN) return f();
  int old = fegetround();
  fesetround(r == RZ ? FE_TOWARDZERO : r == RM ? FE_DOWNWARD : FE_UPWARD);
  T v = f();
  fesetround(old);
  return v;
}
__attribute__((noinline)) inline float addR(float a, float b, Round r) {
  volatile float x = a, y = b;
  return withRound<float>(r, [&] {
    volatile float z = x + y;
    return (float)z;
  });
}
__attribute__((noinline)) inline float mulR(float a, float b, Round r) {
  volatile float x = a, y = b;
  return withRound<float>(r, [&] {
    volatile float z = x * y;
    return (float)z;
  });
}
__attribute__((noinline)) inline float fmaR(float a, float b, float c, Round r) {
  volatile float x = a, y = b, w = c;
  return withRound<float>(r, [&] {
    volatile float z = __builtin_fmaf(x, y, w);
    return (float)z;
  });
}
__attribute__((noinline)) inline double addD(double a, double b, Round r) {
  volatile double x = a, y = b;
  return withRound<double>(r, [&] {
    volatile double z = x + y;
    return (double)z;
  });
}
__attribute__((noinline)) inline double mulD(double a, double b, Round r) {
  volatile double x = a, y = b;
  return withRound<double>(r, [&] {
    volatile double z = x * y;
    return (double)z;
  });
}
__attribute__((noinline)) inline double fmaD(double a, double b, double c, Round r) {
  volatile double x = a, y = b, w = c;
  return withRound<double>(r, [&] {
    volatile double z = __builtin_fma(x, y, w);
    return (double)z;
  });
}
__attribute__((noinline)) inline float divR(float a, float b, Round r) {
  volatile float x = a, y = b;
  return withRound<float>(r, [&] {
    volatile float z = x / y;
    return (float)z;
  });
}
__attribute__((noinline)) inline double divD(double a, double b, Round r) {
  volatile double x = a, y = b;
  return withRound<double>(r, [&] {
    volatile double z = x / y;
    return (double)z;
  });
}
__attribute__((noinline)) inline float sqrtR(float a, Round r) {
  volatile float x = a;
  return withRound<float>(r, [&] {
    volatile float z = __builtin_sqrtf(x);
    return (float)z;
  });
}
__attribute__((noinline)) inline double sqrtD(double a, Round r) {
  volatile double x = a;
  return withRound<double>(r, [&] {
    volatile double z = __builtin_sqrt(x);
    return (double)z;
  });
}

inline float fin(const Inst& I, float v) {
  if (I.fl & F_FTZ) v = ftzf(v);
  if (I.fl & F_SAT) v = v != v ? 0.f : v < 0 ? 0.f : v > 1 ? 1.f : v;
  return canonNan(v);
}
inline float fi(const Inst& I, float v) { return I.fl & F_FTZ ? ftzf(v) : v; }

// ---- half/bf16 helpers: value converters by type -------------------------------------------------
struct HF {
  static float up(u16 x) { return h2f(x); }
  static u16 dn(double d) { return d2h(d); }
  static u16 dnf(float f) { return f2h(f); }
};
struct BF {
  static float up(u16 x) { return b2f(x); }
  static u16 dn(double d) { return d2b(d); }
  static u16 dnf(float f) { return f2b(f); }
};
inline u16 hftz(const Inst& I, u16 x) {
  return (I.fl & F_FTZ) && !(x & 0x7c00) ? (u16)(x & 0x8000) : x;
}  // .ftz exists for f16 only
template <class H>
inline u16 hfin(const Inst& I, u16 r) {
  r = hftz(I, r);
  float f = H::up(r);
  if (I.fl & F_SAT) {
    if (f != f || f < 0) return 0;
    if (f > 1) return H::dnf(1.f);
  }
  if (I.fl & F_RELU) {
    if (f != f) return 0x7fff;
    if (f < 0 || r == 0x8000) return 0;
  }
  return r;
}
template <class H, class F>
inline u32 x2(u32 a, F f) {
  return (u32)f((u16)a) | (u32)f((u16)(a >> 16)) << 16;
}
template <class F>
inline u32 x2b(u32 a, u32 b, F f) {
  return (u32)f((u16)a, (u16)b) | (u32)f((u16)(a >> 16), (u16)(b >> 16)) << 16;
}
template <class F>
inline u32 x2c(u32 a, u32 b, u32 c, F f) {
  return (u32)f((u16)a, (u16)b, (u16)c) | (u32)f((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)) << 16;
}

inline u32 flFloat(Tr& t) {
  u32 f = 0;
  if (t.has("ftz")) f |= F_FTZ;
  if (t.has("sat")) f |= F_SAT;
  if (t.has("relu")) f |= F_RELU;
  return f;
}

}  // namespace ptxsim
