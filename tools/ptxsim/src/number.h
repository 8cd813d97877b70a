// Numeric formats: IEEE half, bfloat16, tf32, fp8, with PTX rounding and saturation rules.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace ptxsim {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

enum Round : u8 { RN, RZ, RM, RP, RNA };

inline float bitsf(u32 x) { return std::bit_cast<float>(x); }
inline u32 fbits(float x) { return std::bit_cast<u32>(x); }
inline double bitsd(u64 x) { return std::bit_cast<double>(x); }
inline u64 dbits(double x) { return std::bit_cast<u64>(x); }

inline double roundInt(double q, Round rm, bool neg = false) {
  switch (rm) {
    case RN: return std::nearbyint(q);
    case RZ: return std::trunc(q);
    case RM: return neg ? std::ceil(q) : std::floor(q);
    case RP: return neg ? std::floor(q) : std::ceil(q);
    case RNA: return std::floor(q + 0.5);
  }
  return q;
}

enum FloatKind : u8 { K_IEEE, K_E4M3 };
// Encode |E| exponent bits, |M| mantissa bits. satfinite clamps overflow (and Inf) to the largest
// finite value; NaN becomes the canonical NaN of the format.
inline u32 encodeFloat(double x, int E, int M, Round rm, bool satfinite, FloatKind kind = K_IEEE) {
  const u32 sign = std::signbit(x) ? 1u << (E + M) : 0;
  const int bias = (1 << (E - 1)) - 1, emin = 1 - bias;
  const u32 infBits = ((1u << E) - 1) << M;
  const u32 maxBits = kind == K_E4M3 ? (infBits | ((1u << M) - 2)) : infBits - 1;
  if (std::isnan(x)) return (1u << (E + M)) - 1;  // canonical: all ones, positive
  double ax = std::fabs(x);
  if (ax == 0) return sign;
  if (std::isinf(ax)) {
    if (satfinite) return sign | maxBits;
    return kind == K_E4M3 ? (sign | ((1u << (E + M)) - 1)) : (sign | infBits);
  }
  int e = std::ilogb(ax);
  if (e < emin) e = emin;
  double q = std::ldexp(ax, M - e);
  double r = roundInt(q, rm, sign != 0);
  if (r >= std::ldexp(1.0, M + 1)) {
    r *= 0.5;
    ++e;
  }
  u64 ri = (u64)r;
  u32 bits;
  if (ri < (1ull << M))
    bits = (u32)ri;
  else {
    s64 ee = (s64)e + bias;
    if (ee > (1 << E) - 1)
      bits = 0xffffffffu;
    else
      bits = ((u32)ee << M) + (u32)(ri - (1ull << M));
  }
  if (bits > maxBits) {
    bool toMax = satfinite || rm == RZ || (rm == RM && !sign) || (rm == RP && sign);
    if (toMax)
      bits = maxBits;
    else
      bits = kind == K_E4M3 ? ((1u << (E + M)) - 1) : infBits;
  }
  return sign | bits;
}

inline float h2f(u16 h) { return _cvtsh_ss(h); }
inline u16 f2h(float f) {
  if (f != f) return 0x7fff;
  return (u16)_cvtss_sh(f, 0);
}
inline u16 d2h(double d, Round rm = RN, bool sat = false) { return (u16)encodeFloat(d, 5, 10, rm, sat); }
inline float b2f(u16 b) { return bitsf((u32)b << 16); }
inline u16 f2b(float f) {
  u32 x = fbits(f);
  if (f != f) return 0x7fff;
  return (u16)((x + 0x7fff + ((x >> 16) & 1)) >> 16);
}
inline u16 d2b(double d, Round rm = RN, bool sat = false) { return (u16)encodeFloat(d, 8, 7, rm, sat); }

inline float decodeE4M3(u8 v) {
  int e = (v >> 3) & 15, m = v & 7;
  float r;
  if (e == 15 && m == 7) return bitsf(0x7fffffff);
  if (e == 0)
    r = std::ldexp((float)m, -9);
  else
    r = std::ldexp((float)(8 + m), e - 10);
  return v & 0x80 ? -r : r;
}
inline float decodeE5M2(u8 v) { return h2f((u16)v << 8); }
struct Fp8Tables {
  float e4m3[256], e5m2[256];
  Fp8Tables() {
    for (int i = 0; i < 256; ++i) {
      e4m3[i] = decodeE4M3((u8)i);
      e5m2[i] = decodeE5M2((u8)i);
    }
  }
};
extern const Fp8Tables g_fp8;

inline float tf32Trunc(u32 x) { return bitsf(x & 0xffffe000u); }

// a*b+c with one rounding into a narrow format: the exact product is added with round-to-odd so
// that the final conversion is free of double rounding.
inline double fmaOdd(double a, double b, double c) {
  double p = a * b;  // exact for <= 26-bit significands
  double s = p + c;
  if (!std::isfinite(s)) return s;
  double bb = s - p;
  double err = (p - (s - bb)) + (c - bb);
  if (err != 0) {
    u64 x = dbits(s);
    if (!(x & 1)) {
      bool up = (err > 0) == (s > 0);
      x = up ? x + 1 : x - 1;
      s = bitsd(x);
    }
  }
  return s;
}
inline float canonNan(float f) { return f != f ? bitsf(0x7fffffff) : f; }
inline float ftzf(float f) {
  u32 b = fbits(f);
  return (b & 0x7f800000) ? f : bitsf(b & 0x80000000);
}

}  // namespace ptxsim
