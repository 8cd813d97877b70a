// taps.h by SDOT: codes less 128, and 128 times the sum of a channel's weights, which all pixels of a tile share.
#pragma once
#include <arm_neon.h>

#include <cstring>

#include "cpu/each.h"
#include "cpu/kernels.h"
#include "cpu/vector_neon.h"

namespace pyquant::cpu {
namespace {

PYQ_INLINE int8x16_t signed_codes(uint8x16_t codes) { return vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(0x80))); }

// The dwords of four channels. places: of the bytes of their dwords from `at` on (near); dwords: their numbers (far).
template <Spread kSpread>
PYQ_INLINE uint8x16_t tap_codes(const uint8_t* at, uint8x16_t places, const int32_t* dwords) {
  if constexpr (kSpread == Spread::side_by_side) return vld1q_u8(at);
  if constexpr (kSpread == Spread::near) {
    const uint8x16x2_t near = {{vld1q_u8(at), vld1q_u8(at + 16)}};
    return vqtbl2q_u8(near, places);
  }
  uint32_t codes[4];
  if constexpr (kSpread == Spread::one) {
    std::memcpy(codes, at, 4);
    return vreinterpretq_u8_u32(vdupq_n_u32(codes[0]));
  }
  for (int i = 0; i < 4; ++i) std::memcpy(codes + i, at + int64_t{dwords[i] - dwords[0]} * 4, 4);
  return vreinterpretq_u8_u32(vld1q_u32(codes));
}

// Sixteen channels from `channel` on, P pixels.
template <Spread kSpread, int P>
__attribute__((noinline)) void tap_tile(const TapRun& run, int64_t pixel, int64_t channel) {
  if constexpr (P == 4 && (kSpread == Spread::near || kSpread == Spread::far)) {  // for which there are no registers
    tap_tile<kSpread, 2>(run, pixel, channel);
    tap_tile<kSpread, 2>(run, pixel + 2, channel);
    return;
  }
  constexpr int kVectors = 4;
  int32x4_t c[P][kVectors], counted[kVectors];
  uint8x16_t places[kVectors];
  const uint8_t* codes[kVectors];
  const int32_t* dwords[kVectors];
  each<kVectors>(PYQ_EACH(v) {
    dwords[v] = run.dwords + channel + v * 4;
    codes[v] = run.codes + pixel * run.step +
               (kSpread == Spread::side_by_side ? (channel + v * 4) * 4 : int64_t{dwords[v][0]} * 4);
    const int32x4_t from_first = vsubq_s32(vld1q_s32(dwords[v]), vdupq_n_s32(dwords[v][0]));
    places[v] = vreinterpretq_u8_s32(vmlaq_n_s32(vdupq_n_s32(0x03020100), from_first, 0x04040404));
    counted[v] = vdupq_n_s32(0);
    each<P>(PYQ_EACH(p) { c[p][v] = vdupq_n_s32(0); });
  });
  const int8_t* weights = run.weights + channel * 4;
  const int64_t step = run.step;
  for (int64_t t = 0; t < run.taps; ++t, weights += kBlockN * 4) {
    const int64_t offset = run.offsets[t];
    each<kVectors>(PYQ_EACH(v) {
      asm("" ::: "memory");  // else g++ 12 loads the weights of all vectors at once, and sums go to the stack
      const int8x16_t w = vld1q_s8(weights + v * 16);
      counted[v] = vdotq_s32(counted[v], w, vdupq_n_s8(-128));
      each<P>(PYQ_EACH(p) {
        const uint8x16_t a = tap_codes<kSpread>(codes[v] + offset + p * step, places[v], dwords[v]);
        c[p][v] = vdotq_s32(c[p][v], signed_codes(a), w);
      });
    });
  }
  each<P>(PYQ_EACH(p) {
    each<kVectors>(
        PYQ_EACH(v) { vst1q_s32(run.acc + (pixel + p) * run.ld + channel + v * 4, vsubq_s32(c[p][v], counted[v])); });
  });
}

}  // namespace
}  // namespace pyquant::cpu

#include "cpu/taps_by_four.h"

namespace pyquant::cpu {
namespace {

void interleave(const Interleave& given) {
  const Interleave run = given;  // what is written are bytes, which may be anything
  for (int64_t p = 0; p < run.pixels; ++p)
    for (int64_t c = 0; c < run.channels; c += 16) {
      uint8x16x4_t lines = {};
      for (int i = 0; i < run.count; ++i) lines.val[i] = vld1q_u8(run.lines[i] + p * run.strides[i] + c);
      vst4q_u8(run.to + p * run.step + c * 4, lines);
    }
}

}  // namespace
}  // namespace pyquant::cpu
