// processors: any
// The portable kernels: the plainest form of each, and the measure of all others.
#include <cstring>

#include "core/arith.h"
#include "cpu/row_table.h"

namespace pyquant::cpu {
namespace {

float float_from_half(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, body = h & 0x7fffu;
  if (body >= 0x7c00u)
    return float_from_bits(sign | 0x7f800000u | (body << 13 & 0x7fffffu) | (body > 0x7c00u ? 0x400000u : 0u));
  if (body >= 0x400u) return float_from_bits(sign | ((body << 13) + 0x38000000u));
  const float magnitude = static_cast<float>(body) * 5.9604644775390625e-8f;  // 2^-24
  return sign ? -magnitude : magnitude;
}

uint16_t half_from_float(float f) {
  uint32_t u = bits_from_float(f);
  const auto sign = static_cast<uint16_t>(u >> 16 & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (u >> 13 & 0x3ffu));
  if (u >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
  // Below 2^-14 the sum with 0.5, whose last bit weighs 2^-24, rounds to the grid of subnormal halves.
  if (u < 0x38800000u) return static_cast<uint16_t>(sign | (bits_from_float(float_from_bits(u) + 0.5f) - 0x3f000000u));
  u += 0xc8000fffu + (u >> 13 & 1u);
  return static_cast<uint16_t>(sign | u >> 13);
}

struct V {
  using F = float;
  using I = int32_t;
  static constexpr int64_t W = 1;
  static F set(float v) { return v; }
  static I set_i(int32_t v) { return v; }
  static F load_f32(const float* p) { return *p; }
  static F load_f16(const uint16_t* p) { return float_from_half(*p); }
  static F load_bf16(const uint16_t* p) {
    uint32_t bits = *p;
#if defined(__aarch64__) && defined(__GNUC__)
    asm("" : "+r"(bits));  // g++ 12 makes vectors of this shift that forget half of the numbers
#endif
    return float_from_bits(bits << 16);
  }
  // Rows of int4 begin at any byte.
  static I load_i(const int32_t* p) {
    I v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static I load_s8(const int8_t* p) { return *p; }
  static I load_u8(const uint8_t* p) { return *p; }
  static void store_f32(float* p, F v) { *p = v; }
  static void store_f16(uint16_t* p, F v) { *p = half_from_float(v); }
  static void store_bf16(uint16_t* p, F v) {
    const uint32_t u = bits_from_float(v);
    *p = v == v ? static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16) : static_cast<uint16_t>(0x7fc0u);
  }
  static void store_i(int32_t* p, I v) { *p = v; }
  static void store_bytes(uint8_t* p, const I* q, int32_t qmin, int32_t qmax, uint8_t flip) {
    for (int j = 0; j < 4; ++j) {
      const int32_t v = q[j] < qmin ? qmin : q[j] > qmax ? qmax : q[j];
      p[j] = static_cast<uint8_t>(static_cast<uint8_t>(v) ^ flip);
    }
  }
  static F mul(F a, F b) { return fmul(a, b); }
  static F add(F a, F b) { return fadd(a, b); }
  static F max(F a, F b) { return a > b ? a : b; }  // b where either is NaN, as maxps does
  static F min(F a, F b) { return a < b ? a : b; }
  static F sub(F a, F b) { return fsub(a, b); }
  static I bits(F v) { return static_cast<I>(bits_from_float(v)); }
  static F mul_add(F a, F b, F c) { return fadd(fmul(a, b), c); }  // one rounding where the machine has it
  static I add_i(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b)); }
  static I sub_i(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b)); }
  static I mul_i(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b)); }
  static I max_i(I a, I b) { return a > b ? a : b; }
  static I magnitude_bits(F v) { return static_cast<I>(bits_from_float(v) & 0x7fffffffu); }
  static I to_int(F v) { return static_cast<I>(fround_even(v)); }
  static I to_int_nan_zero(F v) { return v == v ? to_int(v) : 0; }
  static F to_float(I v) { return static_cast<float>(v); }
  // Past the caches; fence() before another thread may read.
  static void stream_f32(float* p, F v) { *p = v; }
  static void fence() {}
  // Bit i: a[i] equals b[i], false for NaN.
  static uint64_t equal_bits(F a, F b) { return a == b ? 1u : 0u; }
  static F sub_where(F a, F b, uint64_t bits) { return bits & 1 ? fsub(a, b) : a; }
  // 64 elements: those whose bit is 1, else 0.
  template <class T>
  static void keep(void* to, const void* from, uint64_t bits) {
    for (size_t i = 0; i < 64; ++i) {
      T v;
      std::memcpy(&v, static_cast<const unsigned char*>(from) + i * sizeof v, sizeof v);
      v = bits >> i & 1 ? v : T{0};
      std::memcpy(static_cast<unsigned char*>(to) + i * sizeof v, &v, sizeof v);
    }
  }
  static void keep32(void* to, const void* from, uint64_t bits) { keep<uint32_t>(to, from, bits); }
  static void keep16(void* to, const void* from, uint64_t bits) { keep<uint16_t>(to, from, bits); }
  static int32_t reduce_max_i(I v) { return v; }
  static float reduce_min(F v) { return v; }
  static float reduce_max(F v) { return v; }
  static float reduce_add(F v) { return v; }
  // int4: the products of a scale with all codes, of which an instruction could choose; none here.
  static constexpr bool kLooksUp = false;
  // to[i][j] = from[j][i] of W by W numbers.
  static void transpose(const float* from, int64_t /*ld*/, float* to, int64_t /*ldt*/) { *to = *from; }
  // Lane i: p[index[i]]; of p the first `count` entries are read.
  static F spread(const float* p, int64_t /*count*/, I /*index*/) { return *p; }
  // The two's complement code in bits 4 * at to 4 * at + 3 of every lane.
  static F nibble(I v, int at) {
    return static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(v) << (28 - 4 * at)) >> 28);
  }
};

void gemm_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add,
             const Ahead&) {
  for (int64_t r = 0; r < rows; ++r) {
    uint32_t sums[kBlockN] = {};
    if (add) std::memcpy(sums, acc + r * kBlockN, sizeof sums);
    for (int64_t q = 0; q < quads; ++q) {
      const uint8_t* x = a + r * lda + q * 4;
      const int8_t* w = b + q * kBlockN * 4;
      for (int64_t n = 0; n < kBlockN; ++n)
        sums[n] +=
            static_cast<uint32_t>(x[0] * w[n * 4] + x[1] * w[n * 4 + 1] + x[2] * w[n * 4 + 2] + x[3] * w[n * 4 + 3]);
    }
    std::memcpy(acc + r * kBlockN, sums, sizeof sums);
  }
}

void unpack_s4(const uint8_t* b, int64_t octs, int8_t* out) {
  constexpr int64_t kStep = kBlockN * 4;
  for (int64_t o = 0; o < octs; ++o)
    for (int64_t i = 0; i < kStep; ++i) {
      const int v = b[o * kStep + i];
      out[2 * o * kStep + i] = static_cast<int8_t>((v & 15) - 8);
      out[(2 * o + 1) * kStep + i] = static_cast<int8_t>((v >> 4 ^ 8) - 8);
    }
}

void gemm_s4(const uint8_t* a, int64_t lda, int64_t rows, const uint8_t* b, int64_t octs, int32_t* acc) {
  int8_t quads[2 * kBlockN * 4];
  if (octs == 0) gemm_s8(a, lda, rows, nullptr, 0, acc, false, {});
  for (int64_t o = 0; o < octs; ++o) {
    unpack_s4(b + o * kBlockN * 4, 1, quads);
    gemm_s8(a + o * 8, lda, rows, quads, 2, acc, o > 0, {});
  }
}

void taps(const TapRun& run) {
  for (int64_t p = 0; p < run.pixels; ++p)
    for (int64_t n = 0; n < run.channels; ++n) {
      uint32_t sum = 0;
      for (int64_t t = 0; t < run.taps; ++t) {
        const uint8_t* x = run.codes + p * run.step + run.offsets[t] + int64_t{run.dwords[n]} * 4;
        const int8_t* w = run.weights + (t * kBlockN + n) * 4;
        sum += static_cast<uint32_t>(x[0] * w[0] + x[1] * w[1] + x[2] * w[2] + x[3] * w[3]);
      }
      run.acc[p * run.ld + n] = static_cast<int32_t>(sum);
    }
}

void interleave(const Interleave& run) {
  for (int64_t p = 0; p < run.pixels; ++p)
    for (int64_t c = 0; c < run.channels; ++c)
      for (int i = 0; i < 4; ++i)
        run.to[p * run.step + c * 4 + i] = i < run.count ? run.lines[i][p * run.strides[i] + c] : uint8_t{0};
}

}  // namespace

// Reads like that of every other set; the functions are those of this file alone.
const Kernels& kernels_scalar() {
  static constexpr Kernels table = [] {
    Kernels k = row_table<V>(Isa::scalar);
    k.row_block = 16;
    k.gemm_s8 = gemm_s8;
    k.gemm_s4 = gemm_s4;
    k.unpack_s4 = unpack_s4;
    k.taps = taps;
    k.interleave = interleave;
    return k;
  }();
  return table;
}

}  // namespace pyquant::cpu
