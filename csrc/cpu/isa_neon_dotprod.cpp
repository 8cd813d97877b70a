// processors: aarch64, flags: -march=armv8.2-a+dotprod
// SDOT multiplies signed bytes, and the codes of rows are unsigned: they are taken less 128, and 128 times the sum of
// the weights is added, which a product with a constant gives. Only the first rows that meet a piece of the weights
// count it.
#include <arm_neon.h>

#include <algorithm>
#include <cstring>

#include "cpu/each.h"
#include "cpu/row_table.h"
#include "cpu/taps_neon.h"
#include "cpu/vector_neon.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kStep = kBlockN * 4;  // bytes of one quad of a block
constexpr int64_t kRows = 48;           // rows of one call
static_assert(kRows <= kMaxRowBlock);
constexpr int64_t kChunk = 64;  // quads: 16 KiB of weights stay in the first-level cache for all rows

// Four quads of a row, or the last of them and zeros.
PYQ_INLINE int8x16_t four_quads(const uint8_t* a) { return signed_codes(vld1q_u8(a)); }
PYQ_INLINE int8x16_t one_quad(const uint8_t* a) {
  uint32_t codes;
  std::memcpy(&codes, a, 4);
  return signed_codes(vreinterpretq_u8_u32(vdupq_n_u32(codes)));
}

// Of the rows of a tile: their sums; and -128 times those of the weights.
template <int R, int J>
struct Sums {
  int32x4_t rows[R][J], weights[J];

  PYQ_INLINE void begin(const int32_t* acc, bool add) {
    each<J>(PYQ_EACH(j) {
      weights[j] = vdupq_n_s32(0);
      each<R>(PYQ_EACH(r) { rows[r][j] = add ? vld1q_s32(acc + r * kBlockN + j * 4) : vdupq_n_s32(0); });
    });
  }

  template <bool kCounts, int kQuad>
  PYQ_INLINE void multiply(const int8x16_t (&x)[R], const int8_t* b) {
    asm("" ::: "memory");  // else g++ 12 loads the weights of four quads at once, and sums go to the stack
    each<J>(PYQ_EACH(j) {
      const int8x16_t w = vld1q_s8(b + j * 16);
      if constexpr (kCounts) weights[j] = vdotq_s32(weights[j], w, vdupq_n_s8(-128));
      each<R>(PYQ_EACH(r) { rows[r][j] = vdotq_laneq_s32(rows[r][j], w, x[r], kQuad); });
    });
  }

  // counted: of the weights' sums; written where this tile counts them, else read.
  template <bool kCounts>
  PYQ_INLINE void end(int32_t* acc, int32_t* counted) const {
    each<J>(PYQ_EACH(j) {
      if constexpr (kCounts) vst1q_s32(counted + j * 4, weights[j]);
      const int32x4_t term = kCounts ? weights[j] : vld1q_s32(counted + j * 4);
      each<R>(PYQ_EACH(r) { vst1q_s32(acc + r * kBlockN + j * 4, vsubq_s32(rows[r][j], term)); });
    });
  }
};

// R rows by 4 J columns through one chunk.
template <int R, int J, bool kCounts>
__attribute__((noinline)) void tile_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, int32_t* acc,
                                       bool add, int32_t* counted) {
  Sums<R, J> sums;
  sums.begin(acc, add);
  int64_t q = 0;
  for (; q + 4 <= quads; q += 4, b += 4 * kStep) {
    int8x16_t x[R];
    each<R>(PYQ_EACH(r) { x[r] = four_quads(a + r * lda + q * 4); });
    each<4>(PYQ_EACH(i) { sums.template multiply<kCounts, i>(x, b + i * kStep); });
  }
  for (; q < quads; ++q, b += kStep) {
    int8x16_t x[R];
    each<R>(PYQ_EACH(r) { x[r] = one_quad(a + r * lda + q * 4); });
    sums.template multiply<kCounts, 0>(x, b);
  }
  sums.template end<kCounts>(acc, counted);
}

// Columns of a tile of R rows, in vectors: few rows take many, so that the weights are read in order.
template <int R>
constexpr int kVectors = 4 * (R > 2 ? 1 : 2);

// All columns of a block.
template <int R>
void columns_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, int32_t* acc, bool add, int32_t* counted,
                bool counts) {
  constexpr int J = kVectors<R>;
  for (int64_t c = 0; c < kBlockN; c += J * 4)
    if (counts)
      tile_s8<R, J, true>(a, lda, b + c * 4, quads, acc + c, add, counted + c);
    else
      tile_s8<R, J, false>(a, lda, b + c * 4, quads, acc + c, add, counted + c);
}

void gemm_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add,
             const Ahead& ahead) {
  alignas(64) int32_t counted[kBlockN];
  for (int64_t done = 0; done < quads || done == 0; done += kChunk) {
    const int64_t now = std::min(kChunk, quads - done);
    const int8_t* w = b + done * kStep;
    if (done + now >= quads) ahead.call_out(0, rows);
    for (int64_t r = 0; r < rows;) {
      const uint8_t* x = a + r * lda + done * 4;
      int32_t* to = acc + r * kBlockN;
      switch (std::min<int64_t>(4, rows - r)) {
        case 1: columns_s8<1>(x, lda, w, now, to, add, counted, r == 0), r += 1; break;
        case 2: columns_s8<2>(x, lda, w, now, to, add, counted, r == 0), r += 2; break;
        case 3: columns_s8<3>(x, lda, w, now, to, add, counted, r == 0), r += 3; break;
        default: columns_s8<4>(x, lda, w, now, to, add, counted, r == 0), r += 4;
      }
    }
    add = true;
    if (quads == 0) return;
  }
}

// int4 as nibbles: the low ones are code + 8, the high ones two's complement.
PYQ_INLINE int8x16_t low_codes(uint8x16_t v) {
  return vsubq_s8(vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(15))), vdupq_n_s8(8));
}
PYQ_INLINE int8x16_t high_codes(uint8x16_t v) { return vshrq_n_s8(vreinterpretq_s8_u8(v), 4); }

void unpack_s4(const uint8_t* b, int64_t octs, int8_t* out) {
  for (int64_t o = 0; o < octs; ++o, out += 2 * kStep)
    for (int64_t i = 0; i < kStep; i += 16) {
      const uint8x16_t v = vld1q_u8(b + o * kStep + i);
      vst1q_s8(out + i, low_codes(v));
      vst1q_s8(out + kStep + i, high_codes(v));
    }
}

// R rows by 4 J columns, from nibbles. Both become code + 8, and UDOT multiplies them by the codes of rows as they are:
// eight times the sum of a row's codes is too much.
template <int R, int J>
__attribute__((noinline)) void tile_s4(const uint8_t* a, int64_t lda, const uint8_t* b, int64_t octs, int32_t* acc) {
  uint32x4_t c[R][J], codes[R];
  each<R>(PYQ_EACH(r) {
    codes[r] = vdupq_n_u32(0);
    each<J>(PYQ_EACH(j) { c[r][j] = vdupq_n_u32(0); });
  });
  for (int64_t o = 0; o < octs; ++o, b += kStep) {
    uint8x16_t x[R];  // both quads of the oct, twice
    each<R>(PYQ_EACH(r) {
      const uint8x8_t pair = vld1_u8(a + r * lda + o * 8);
      x[r] = vcombine_u8(pair, pair);
      codes[r] = vdotq_u32(codes[r], x[r], vdupq_n_u8(4));  // in two of four lanes each quad: half of eight
    });
    each<J>(PYQ_EACH(j) {
      asm("" ::: "memory");  // as above
      const uint8x16_t v = vld1q_u8(b + j * 16);
      const uint8x16_t low = vandq_u8(v, vdupq_n_u8(15)), high = vshrq_n_u8(veorq_u8(v, vdupq_n_u8(0x80)), 4);
      each<R>(PYQ_EACH(r) {
        c[r][j] = vdotq_laneq_u32(c[r][j], low, x[r], 0);
        c[r][j] = vdotq_laneq_u32(c[r][j], high, x[r], 1);
      });
    });
  }
  each<R>(PYQ_EACH(r) {
    const uint32x4_t term = vdupq_n_u32(vaddvq_u32(codes[r]));
    each<J>(PYQ_EACH(j) { vst1q_s32(acc + r * kBlockN + j * 4, vreinterpretq_s32_u32(vsubq_u32(c[r][j], term))); });
  });
}

template <int R>
void columns_s4(const uint8_t* a, int64_t lda, const uint8_t* b, int64_t octs, int32_t* acc) {
  constexpr int J = kVectors<R>;
  for (int64_t c = 0; c < kBlockN; c += J * 4) tile_s4<R, J>(a, lda, b + c * 4, octs, acc + c);
}

void gemm_s4(const uint8_t* a, int64_t lda, int64_t rows, const uint8_t* b, int64_t octs, int32_t* acc) {
  switch (rows) {
    case 0: return;
    case 1: return columns_s4<1>(a, lda, b, octs, acc);
    case 2: return columns_s4<2>(a, lda, b, octs, acc);
    case 3: return columns_s4<3>(a, lda, b, octs, acc);
    default: columns_s4<4>(a, lda, b, octs, acc);
  }
}
static_assert(kDirectRows == 4);

}  // namespace

// Reads like that of every other set; the functions are those of this file alone.
const Kernels& kernels_neon_dotprod() {
  static constexpr Kernels table = [] {
    Kernels k = row_table<V>(Isa::neon_dotprod);
    k.row_block = kRows;
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
