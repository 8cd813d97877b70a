// processors: x86_64, flags: -mavx512bw -mavx512vl -mavx512dq -mavx512bf16 -mfma -mprefer-vector-width=512
// What processors add that multiply pairs of bfloat16: rows of that type times integer weights. The rest is AVX-512's.
// g++ 12 takes the deliberately undefined operands inside its own intrinsics for mistakes (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <algorithm>
#include <cstring>

#include "cpu/few_pairs_avx512.h"
#include "cpu/kernels.h"
#include "cpu/vector_avx512.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kVector = V::W;
constexpr int kVectors = kBlockN / kVector;
constexpr int64_t kPieceBytes = 4 * kVector;  // of a channel, taken at a time

// Codes of a dword of each channel, less the zero points, as pairs of neighbours: bfloat16 holds whole numbers up to
// 256, and nothing is in the lower half of such a float.
template <DType T, bool kZero>
PYQ_INLINE void pair_dwords(V::I dwords, V::F zero, uint32_t* pairs) {
  constexpr int kCodes = 32 / bits_of(T);
#pragma GCC unroll 4
  for (int i = 0; i < kCodes; i += 2) {
    V::F two[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      if constexpr (is_packed(T)) {
        two[j] = V::nibble(dwords, i + j);
      } else {
        const V::I high = _mm512_slli_epi32(dwords, static_cast<unsigned>(24 - 8 * (i + j)));
        two[j] = V::to_float(_mm512_srai_epi32(high, 24));
      }
      if constexpr (kZero) two[j] = V::sub(two[j], zero);
    }
    V::store_i(reinterpret_cast<int32_t*>(pairs + i / 2 * kBlockN),
               _mm512_or_si512(_mm512_srli_epi32(V::bits(two[0]), 16), V::bits(two[1])));
  }
}

template <DType T, bool kZero>
void pair_codes_of(const PairRun& run) {
  constexpr int64_t kCodes = 32 / bits_of(T), kPiece = kVector * kCodes;
  const int64_t row_bytes = columns_of(T, run.end), first_group = run.begin / run.group_size;
  alignas(64) float lines[kVector * kVector], turned[kVector * kVector];
  for (int64_t at = run.begin; at < run.end; at += kPiece) {
    const int64_t byte = at * bits_of(T) / 8, bytes = std::min(kPieceBytes, row_bytes - byte);
    for (int c = 0; c < kVectors; ++c) {
      for (int64_t l = 0; l < kVector; ++l) {
        auto* line = reinterpret_cast<uint8_t*>(lines + l * kVector);
        const int64_t channel = c * kVector + l, here = channel < run.channels ? bytes : 0;
        if (here < kPieceBytes) std::memset(line, 0, kPieceBytes);
        std::memcpy(line, run.w + channel * run.ldw + byte, static_cast<size_t>(here));
      }
      V::transpose(lines, kVector, turned, kVector);
      for (int64_t d = 0; d < kVector && at + d * kCodes < run.end; ++d) {
        const int64_t column = at + d * kCodes, group = column / run.group_size - first_group;
        const V::F zero = kZero ? V::load_f32(run.zeros + group * kBlockN + c * kVector) : V::set(0.f);
        pair_dwords<T, kZero>(V::bits(V::load_f32(turned + d * kVector)), zero,
                              run.pairs + (column - run.begin) / 2 * kBlockN + c * kVector);
      }
    }
  }
}

void pair_codes(const PairRun& run) {
  if (run.type == DType::s8)
    return run.zeros ? pair_codes_of<DType::s8, true>(run) : pair_codes_of<DType::s8, false>(run);
  run.zeros ? pair_codes_of<DType::s4, true>(run) : pair_codes_of<DType::s4, false>(run);
}

template <int R>
void tile(const uint16_t* x, int64_t ldx, const uint32_t* pairs, int64_t count, const float* scale, float* sum,
          bool add) {
  __m512 acc[R][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) acc[r][c] = _mm512_setzero_ps();
  for (int64_t i = 0; i < count; ++i, pairs += kBlockN) {
    __m512i w[kVectors];
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) w[c] = _mm512_loadu_si512(pairs + c * kVector);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      int32_t two;
      std::memcpy(&two, x + r * ldx + 2 * i, sizeof(two));
      const __m512i v = _mm512_set1_epi32(two);
      // In assembler for the reason of dot (vector_avx512.h).
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) asm("vdpbf16ps %2, %1, %0" : "+v"(acc[r][c]) : "v"(w[c]), "v"(v));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      float* to = sum + r * kBlockN + c * kVector;
      const __m512 before = add ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
      _mm512_storeu_ps(to, _mm512_fmadd_ps(acc[r][c], _mm512_loadu_ps(scale + c * kVector), before));
    }
}

void pair_products(const uint16_t* x, int64_t rows, int64_t ldx, const uint32_t* pairs, int64_t count,
                   const float* scale, float* sum, bool add) {
  for (int64_t done = 0; done < rows;) {
    const int64_t left = rows - done, now = left >= 6 && left != 7 && left != 8 ? 6 : left > 4 ? 4 : left;
    const uint16_t* from = x + done * ldx;
    float* to = sum + done * kBlockN;
    switch (now) {
      case 1: tile<1>(from, ldx, pairs, count, scale, to, add); break;
      case 2: tile<2>(from, ldx, pairs, count, scale, to, add); break;
      case 3: tile<3>(from, ldx, pairs, count, scale, to, add); break;
      case 4: tile<4>(from, ldx, pairs, count, scale, to, add); break;
      default: tile<6>(from, ldx, pairs, count, scale, to, add);
    }
    done += now;
  }
}

}  // namespace

const Kernels& kernels_avx512_bf16() {
  static const Kernels table = [] {
    Kernels k = kernels_avx512_vnni();
    k.isa = Isa::avx512_bf16;
    k.pair_codes = pair_codes;
    k.pair_products = pair_products;
    k.order_pairs = order_pairs;
    k.few_pairs = few_pairs;
    return k;
  }();
  return table;
}

}  // namespace pyquant::cpu
