// Eight floats or ints of Arm's Advanced SIMD in two registers, as rows.h, weight_rows.h and fake_rows.h take them:
// what they keep in the sixteen registers of AVX2 fills thirty-two of these. For isa_neon_*.cpp.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "cpu/each.h"

namespace pyquant::cpu {
namespace {

struct V {
  struct F {
    float32x4_t half[2];
  };
  struct I {
    int32x4_t half[2];
  };
  static constexpr int64_t W = 8;

  static F set(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
  static I set_i(int32_t v) { return {vdupq_n_s32(v), vdupq_n_s32(v)}; }
  static F load_f32(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static F load_f16(const uint16_t* p) {
    const float16x8_t v = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)};
  }
  static F load_bf16(const uint16_t* p) {
    const uint16x8_t v = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(v, 16))};
  }
  static I load_i(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }
  static I load_s8(const int8_t* p) {
    const int16x8_t v = vmovl_s8(vld1_s8(p));
    return {vmovl_s16(vget_low_s16(v)), vmovl_high_s16(v)};
  }
  static I load_u8(const uint8_t* p) {
    const uint16x8_t v = vmovl_u8(vld1_u8(p));
    return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(v))), vreinterpretq_s32_u32(vmovl_high_u16(v))};
  }
  static void store_f32(float* p, F v) {
    vst1q_f32(p, v.half[0]);
    vst1q_f32(p + 4, v.half[1]);
  }
  static void store_f16(uint16_t* p, F v) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.half[0]), v.half[1])));
  }
  static uint16x4_t bf16_of(float32x4_t v) {
    const uint32x4_t u = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    return vmovn_u32(vbslq_u32(vceqq_f32(v, v), rounded, vdupq_n_u32(0x7fc0)));
  }
  static void store_bf16(uint16_t* p, F v) { vst1q_u16(p, vcombine_u16(bf16_of(v.half[0]), bf16_of(v.half[1]))); }
  static void store_i(int32_t* p, I v) {
    vst1q_s32(p, v.half[0]);
    vst1q_s32(p + 4, v.half[1]);
  }
  static void store_bytes(uint8_t* p, const I* q, int32_t qmin, int32_t qmax, uint8_t flip) {
    const int8x16_t least = vdupq_n_s8(static_cast<int8_t>(qmin)), most = vdupq_n_s8(static_cast<int8_t>(qmax));
    for (int j = 0; j < 4; j += 2) {
      const auto narrowed = [](I v) { return vqmovn_high_s32(vqmovn_s32(v.half[0]), v.half[1]); };
      const int8x16_t v = vqmovn_high_s16(vqmovn_s16(narrowed(q[j])), narrowed(q[j + 1]));
      const uint8x16_t limited = vreinterpretq_u8_s8(vminq_s8(vmaxq_s8(v, least), most));
      vst1q_u8(p + j * 8, veorq_u8(limited, vdupq_n_u8(flip)));
    }
  }
  // Every lane and the one Step away from it, exchanged.
  template <int Step>
  static F swapped(F v) {
    if constexpr (Step == 4) return {v.half[1], v.half[0]};
    if constexpr (Step == 2) return {vextq_f32(v.half[0], v.half[0], 2), vextq_f32(v.half[1], v.half[1], 2)};
    return {vrev64q_f32(v.half[0]), vrev64q_f32(v.half[1])};
  }
  static F mul(F a, F b) { return {vmulq_f32(a.half[0], b.half[0]), vmulq_f32(a.half[1], b.half[1])}; }
  static F add(F a, F b) { return {vaddq_f32(a.half[0], b.half[0]), vaddq_f32(a.half[1], b.half[1])}; }
  static F sub(F a, F b) { return {vsubq_f32(a.half[0], b.half[0]), vsubq_f32(a.half[1], b.half[1])}; }
  // b where either is NaN or both are zero, as the other instruction sets have it: not what fmax and fmaxnm do.
  static F max(F a, F b) { return chosen(vcgtq_f32(a.half[0], b.half[0]), vcgtq_f32(a.half[1], b.half[1]), a, b); }
  static F min(F a, F b) { return chosen(vcltq_f32(a.half[0], b.half[0]), vcltq_f32(a.half[1], b.half[1]), a, b); }
  static F chosen(uint32x4_t first, uint32x4_t second, F a, F b) {
    return {vbslq_f32(first, a.half[0], b.half[0]), vbslq_f32(second, a.half[1], b.half[1])};
  }
  static I bits(F v) { return {vreinterpretq_s32_f32(v.half[0]), vreinterpretq_s32_f32(v.half[1])}; }
  static F mul_add(F a, F b, F c) {
    return {vfmaq_f32(c.half[0], a.half[0], b.half[0]), vfmaq_f32(c.half[1], a.half[1], b.half[1])};
  }
  static I add_i(I a, I b) { return {vaddq_s32(a.half[0], b.half[0]), vaddq_s32(a.half[1], b.half[1])}; }
  static I sub_i(I a, I b) { return {vsubq_s32(a.half[0], b.half[0]), vsubq_s32(a.half[1], b.half[1])}; }
  static I mul_i(I a, I b) { return {vmulq_s32(a.half[0], b.half[0]), vmulq_s32(a.half[1], b.half[1])}; }
  static I max_i(I a, I b) { return {vmaxq_s32(a.half[0], b.half[0]), vmaxq_s32(a.half[1], b.half[1])}; }
  static I magnitude_bits(F v) {
    const int32x4_t all = vdupq_n_s32(0x7fffffff);
    return {vandq_s32(vreinterpretq_s32_f32(v.half[0]), all), vandq_s32(vreinterpretq_s32_f32(v.half[1]), all)};
  }
  static I to_int(F v) { return {vcvtnq_s32_f32(v.half[0]), vcvtnq_s32_f32(v.half[1])}; }
  static I to_int_nan_zero(F v) { return to_int(v); }  // which gives 0 for NaN here
  static F to_float(I v) { return {vcvtq_f32_s32(v.half[0]), vcvtq_f32_s32(v.half[1])}; }
  // No stores past the caches that are worth it: those of a whole line do not read it first.
  static void stream_f32(float* p, F v) { store_f32(p, v); }
  static void fence() {}
  static uint64_t equal_bits(F a, F b) {
    const uint16x4_t low = vmovn_u32(vceqq_f32(a.half[0], b.half[0])),
                     high = vmovn_u32(vceqq_f32(a.half[1], b.half[1]));
    static constexpr uint8_t kPlaces[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    return vaddv_u8(vand_u8(vmovn_u16(vcombine_u16(low, high)), vld1_u8(kPlaces)));
  }
  // All ones where a lane's bit is set.
  static uint32x4_t lanes_of(uint64_t bits, int half) {
    static constexpr uint32_t kPlaces[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    return vtstq_u32(vdupq_n_u32(static_cast<uint32_t>(bits)), vld1q_u32(kPlaces + 4 * half));
  }
  static F sub_where(F a, F b, uint64_t bits) {
    const auto masked = [&](int h) {
      return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(b.half[h]), lanes_of(bits, h)));
    };
    return {vsubq_f32(a.half[0], masked(0)), vsubq_f32(a.half[1], masked(1))};
  }
  static void keep32(void* to, const void* from, uint64_t bits) {
    for (int j = 0; j < 16; ++j) {
      const uint32x4_t v = vld1q_u32(static_cast<const uint32_t*>(from) + 4 * j);
      vst1q_u32(static_cast<uint32_t*>(to) + 4 * j, vandq_u32(v, lanes_of(bits >> (4 * j), 0)));
    }
  }
  static void keep16(void* to, const void* from, uint64_t bits) {
    static constexpr uint16_t kPlaces[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    for (int j = 0; j < 8; ++j) {
      const uint16x8_t own = vtstq_u16(vdupq_n_u16(static_cast<uint16_t>(bits >> (8 * j))), vld1q_u16(kPlaces));
      const uint16x8_t v = vld1q_u16(static_cast<const uint16_t*>(from) + 8 * j);
      vst1q_u16(static_cast<uint16_t*>(to) + 8 * j, vandq_u16(v, own));
    }
  }
  static int32_t reduce_max_i(I v) { return vmaxvq_s32(vmaxq_s32(v.half[0], v.half[1])); }
  // Of numbers, no NaN; which zero comes out of several is nobody's business.
  static float reduce_min(F v) { return vminvq_f32(vminq_f32(v.half[0], v.half[1])); }
  static float reduce_max(F v) { return vmaxvq_f32(vmaxq_f32(v.half[0], v.half[1])); }
  static float reduce_add(F v) { return vaddvq_f32(vaddq_f32(v.half[0], v.half[1])); }
  static constexpr bool kLooksUp = false;
  // to[i][j] = from[j][i] of 4 by 4 numbers.
  static void transpose_four(const float* from, int64_t ld, float* to, int64_t ldt) {
    const float32x4x2_t top = vtrnq_f32(vld1q_f32(from), vld1q_f32(from + ld));
    const float32x4x2_t end = vtrnq_f32(vld1q_f32(from + 2 * ld), vld1q_f32(from + 3 * ld));
    for (int i = 0; i < 2; ++i) {
      vst1q_f32(to + i * ldt, vcombine_f32(vget_low_f32(top.val[i]), vget_low_f32(end.val[i])));
      vst1q_f32(to + (i + 2) * ldt, vcombine_f32(vget_high_f32(top.val[i]), vget_high_f32(end.val[i])));
    }
  }
  static void transpose(const float* from, int64_t ld, float* to, int64_t ldt) {
    for (int64_t i = 0; i < 8; i += 4)
      for (int64_t j = 0; j < 8; j += 4) transpose_four(from + j * ld + i, ld, to + i * ldt + j, ldt);
  }
  static F spread(const float* p, int64_t count, I index) {
    alignas(16) float entries[8] = {};
    std::memcpy(entries, p, static_cast<size_t>(count) * 4);
    const auto* bytes = reinterpret_cast<const uint8_t*>(entries);
    const uint8x16x2_t table = {{vld1q_u8(bytes), vld1q_u8(bytes + 16)}};
    const auto of = [&](int32x4_t numbers) {  // the four bytes of entry i begin at 4 * i
      const int32x4_t places = vmlaq_n_s32(vdupq_n_s32(0x03020100), numbers, 0x04040404);
      return vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_s32(places)));
    };
    return {of(index.half[0]), of(index.half[1])};
  }
  static F nibble(I v, int at) {
    const int32x4_t up = vdupq_n_s32(28 - 4 * at);
    const auto code = [&](int32x4_t half) { return vcvtq_f32_s32(vshrq_n_s32(vshlq_s32(half, up), 28)); };
    return {code(v.half[0]), code(v.half[1])};
  }
};

}  // namespace
}  // namespace pyquant::cpu
