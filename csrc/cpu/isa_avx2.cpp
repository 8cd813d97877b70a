// processors: x86_64, flags: -mavx2 -mfma -mf16c -mprfchw
// AVX2 has no exact product of u8 by s8: vpmaddubsw adds two products into an int16 and saturates. Codes of eight bits
// are widened to s16 for vpmaddwd: four instructions where three would do. (The shorter way is exact where two weights
// add up to 128 at most; too many vectors of weights hold a pair that does not, and telling them apart took what it
// won.) Weights of four bits never saturate: eight sums of vpmaddubsw stay within an int16.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "cpu/row_table.h"
#include "cpu/taps_avx2.h"
#include "cpu/tile_rows.h"
#include "cpu/vector_avx2.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kStep = kBlockN * 4;  // bytes of one quad of a block
constexpr int64_t kRows = 48;           // rows of one chunk
static_assert(kRows <= kMaxRowBlock);
constexpr int64_t kChunk = 32;  // quads: 8 KiB of weights stay in the first-level cache for all rows
constexpr int64_t kSums = 8;    // quads of int4 whose sums an int16 holds: 8 * 2 * 255 * 8 = 32 640

__m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

__m256i quad(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}

// Lines that a tile calls in while it multiplies, with every quad one for each two of its J vectors of columns.
template <int J>
PYQ_INLINE void call_in(const int8_t* lines, int64_t q) {
  each<J / 2>(
      PYQ_EACH(i) { _mm_prefetch(reinterpret_cast<const char*>(lines + (q * (J / 2) + i) * 64), _MM_HINT_T0); });
}

// A row of one chunk as the products read it: the even codes of its quads as pairs of s16, then the odd ones.
using Pairs = uint32_t[2][kChunk];

void take_rows(const uint8_t* a, int64_t lda, int64_t rows, int64_t quads, Pairs* x) {
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* row = a + r * lda;
    const auto put = [&](int64_t q, __m256i codes) {
      const auto store = [&](int half, __m256i v) { V::store_i(reinterpret_cast<int32_t*>(x[r][half] + q), v); };
      store(0, _mm256_and_si256(codes, _mm256_set1_epi16(0x00ff)));
      store(1, _mm256_srli_epi16(codes, 8));
    };
    int64_t q = 0;
    for (; q + 8 <= quads; q += 8) put(q, load(row + q * 4));
    if (q == quads) continue;
    alignas(32) uint8_t rest[32] = {};
    std::memcpy(rest, row + q * 4, static_cast<size_t>(quads - q) * 4);
    put(q, load(rest));
  }
}

PYQ_INLINE __m256i widened(const int8_t* w, int half) {
  const __m256i v = load(w);
  return _mm256_srai_epi16(half ? v : _mm256_slli_epi16(v, 8), 8);
}

template <int R, int J>
PYQ_INLINE void begin(__m256i (&c)[R][J], const int32_t* acc, bool add) {
  each<R>(PYQ_EACH(r) {
    each<J>(PYQ_EACH(j) { c[r][j] = add ? load(acc + r * kBlockN + j * 8) : _mm256_setzero_si256(); });
  });
}

// R rows by 8 J columns through one chunk. What is read more than once of rows and weights is kept in registers, as far
// as there are any.
template <int R, int J>
__attribute__((noinline)) void tile_s8(const Pairs* x, const int8_t* b, int64_t quads, int32_t* acc, bool add,
                                       const int8_t* next) {
  __m256i c[R][J];
  begin(c, acc, add);
  for (int64_t q = 0; q < quads; ++q, b += kStep) {
    call_in<J>(next, q);
    each<2>(PYQ_EACH(half) {
      if constexpr (R > 4) {
        __m256i w[J];
        each<J>(PYQ_EACH(j) { w[j] = widened(b + j * 32, half); });
        each<R>(PYQ_EACH(r) {
          const __m256i codes = _mm256_set1_epi32(static_cast<int32_t>(x[r][half][q]));
          each<J>(PYQ_EACH(j) { add_s32(c[r][j], _mm256_madd_epi16(codes, w[j])); });
        });
      } else {
        __m256i codes[R];
        each<R>(PYQ_EACH(r) { codes[r] = _mm256_set1_epi32(static_cast<int32_t>(x[r][half][q])); });
        each<J>(PYQ_EACH(j) {
          const __m256i w = widened(b + j * 32, half);
          each<R>(PYQ_EACH(r) { add_s32(c[r][j], _mm256_madd_epi16(codes[r], w)); });
        });
      }
    });
  }
  each<R>(PYQ_EACH(r) { each<J>(PYQ_EACH(j) { V::store_i(acc + r * kBlockN + j * 8, c[r][j]); }); });
}

// The sums of int16 that c holds join those of int32 in memory.
template <int R, int J>
PYQ_INLINE void finish_s16(const __m256i (&c)[R][J], int32_t* acc, bool add) {
  const __m256i one = _mm256_set1_epi16(1);
  each<R>(PYQ_EACH(r) {
    each<J>(PYQ_EACH(j) {
      int32_t* to = acc + r * kBlockN + j * 8;
      const __m256i sum = _mm256_madd_epi16(c[r][j], one);
      V::store_i(to, add ? _mm256_add_epi32(load(to), sum) : sum);
    });
  });
}

template <int R, int J>
PYQ_INLINE void zero(__m256i (&c)[R][J]) {
  each<R>(PYQ_EACH(r) { each<J>(PYQ_EACH(j) { c[r][j] = _mm256_setzero_si256(); }); });
}

// R rows by 8 J columns of at most kSums quads.
template <int R, int J>
PYQ_INLINE void sum_s16(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, int32_t* acc, bool add,
                        const int8_t* next) {
  __m256i c[R][J];
  zero(c);
  for (int64_t q = 0; q < quads; ++q, a += 4, b += kStep) {
    call_in<J>(next, q);
    __m256i w[J];
    each<J>(PYQ_EACH(j) { w[j] = load(b + j * 32); });
    each<R>(PYQ_EACH(r) {
      const __m256i codes = quad(a + r * lda);
      each<J>(PYQ_EACH(j) { add_s16(c[r][j], _mm256_maddubs_epi16(codes, w[j])); });
    });
  }
  finish_s16(c, acc, add);
}

// R rows by 8 J columns of int4 codes, a byte each, through one chunk.
template <int R, int J>
__attribute__((noinline)) void tile_unpacked_s4(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads,
                                                int32_t* acc, bool add, const int8_t* next) {
  int64_t q = 0;
  do {
    sum_s16<R, J>(a + q * 4, lda, b + q * kStep, std::min(kSums, quads - q), acc, add, next + q * (J / 2) * 64);
    add = true;
    q += kSums;
  } while (q < quads);
}

// Columns of a tile of R rows, in vectors: few rows take many, so that the weights are read in order.
template <int R>
constexpr int kVectors = R > 2 ? 2 : 8 / R;

// Weights to be called in while the tiles of rows of a chunk multiply, a part by each of them: memory then works all
// the time. They begin at `lines`, and are those of so many vectors of columns of this chunk.
struct Call {
  const int8_t* lines;  // null: none
  int64_t vectors, tile, tiles;

  // Where the vectors of columns from j on belong to this tile, their lines.
  const int8_t* part(int64_t j, int64_t quads) const {
    return lines && j < vectors && j * tiles / vectors == tile ? lines + j * quads * 32 : nullptr;
  }
};

// What one call multiplies, and the chunk of it that is being read.
struct Chunk {
  const int8_t* b;
  int64_t quads;
  int32_t* acc;
  bool add;

  // All columns of a block for R rows from `row` on.
  template <int R, class Product>
  PYQ_INLINE void columns(int64_t row, const Call& call, const Product& product) const {
    constexpr int J = kVectors<R>;
    for (int64_t j = 0; j < 8; j += J) {
      const int8_t* lines = call.part(j, quads);
      product(b + j * 32, acc + row * kBlockN + j * 8,
              lines ? lines : b + j * 32);  // what is there costs next to nothing
    }
  }
};

struct ChunkS8 : Chunk {
  Pairs* x;

  void take(const uint8_t* a, int64_t lda, int64_t rows) { take_rows(a, lda, rows, quads, x); }

  // The next chunk; after the last one what the caller names.
  Call calls(int64_t /*done*/, bool last, const void* ahead) const {
    return {last ? static_cast<const int8_t*>(ahead) : b + quads * kStep, 8, 0, 1};
  }

  template <int R>
  void tile(int64_t row, const Call& call) const {
    columns<R>(row, call, [&](const int8_t* w, int32_t* sums, const int8_t* lines) {
      tile_s8<R, kVectors<R>>(x + row, w, quads, sums, add, lines);
    });
  }
};

struct ChunkUnpackedS4 : Chunk {
  const uint8_t* a = nullptr;
  int64_t lda = 0;

  void take(const uint8_t* from, int64_t stride, int64_t /*rows*/) {
    a = from;
    lda = stride;
  }

  // The nibbles that are unpacked next, half as many bytes as this call reads; its own have just been written.
  Call calls(int64_t done, bool last, const void* ahead) const {
    if (ahead) return {static_cast<const int8_t*>(ahead) + done * kStep / 2, 4, 0, 1};
    return {last ? nullptr : b + quads * kStep, 8, 0, 1};
  }

  template <int R>
  void tile(int64_t row, const Call& call) const {
    columns<R>(row, call, [&](const int8_t* w, int32_t* sums, const int8_t* lines) {
      tile_unpacked_s4<R, kVectors<R>>(a + row * lda, lda, w, quads, sums, add, lines);
    });
  }
};

int64_t count_tiles(int64_t rows) {
  int64_t tiles = 0;
  for (; rows > 0; rows -= tile_rows(rows)) ++tiles;
  return tiles;
}

template <class Part>
void multiply_rows(const Part& part, int64_t rows, Call call) {
  call.tiles = count_tiles(rows);
  for (int64_t done = 0; done < rows; ++call.tile) {
    const int64_t r = tile_rows(rows - done);
    switch (r) {
      case 1: part.template tile<1>(done, call); break;
      case 2: part.template tile<2>(done, call); break;
      case 3: part.template tile<3>(done, call); break;
      case 4: part.template tile<4>(done, call); break;
      case 5: part.template tile<5>(done, call); break;
      default: part.template tile<6>(done, call);
    }
    done += r;
  }
}

// At most kRows rows, chunk by chunk.
template <class Part>
void multiply_chunks(Part part, const uint8_t* a, int64_t lda, int64_t rows, int64_t quads, const Ahead& ahead) {
  const int8_t* const b = part.b;
  for (int64_t done = 0; done < quads || done == 0; done += kChunk) {
    part.b = b + done * kStep;
    part.quads = std::min(kChunk, quads - done);
    part.take(a + done * 4, lda, rows);
    const bool last = done + part.quads >= quads;
    if (last) ahead.call_out(0, rows);
    multiply_rows(part, rows, part.calls(done, last, ahead.weights));
    part.add = true;
    if (quads == 0) return;
  }
}

void gemm_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add,
             const Ahead& ahead) {
  alignas(32) Pairs x[kRows];
  for (int64_t done = 0; done < rows; done += kRows)
    multiply_chunks(ChunkS8{{b, quads, acc + done * kBlockN, add}, x}, a + done * lda, lda,
                    std::min(kRows, rows - done), quads, ahead);
}

void gemm_unpacked_s4(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc,
                      bool add, const Ahead& ahead) {
  for (int64_t done = 0; done < rows; done += kRows)
    multiply_chunks(ChunkUnpackedS4{{b, quads, acc + done * kBlockN, add}}, a + done * lda, lda,
                    std::min(kRows, rows - done), quads, ahead);
}

// int4 as nibbles: the low ones are code + 8, the high ones two's complement.
struct Nibbles {
  __m256i low, eight, table;

  Nibbles()
      : low(_mm256_set1_epi8(15)),
        eight(_mm256_set1_epi8(8)),
        table(_mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1))) {}

  PYQ_INLINE __m256i low_codes(__m256i v) const { return _mm256_sub_epi8(_mm256_and_si256(v, low), eight); }
  PYQ_INLINE __m256i high_codes(__m256i v) const {
    return _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
  }
};

void unpack_s4(const uint8_t* b, int64_t octs, int8_t* out) {
  const Nibbles nibbles;
  for (int64_t o = 0; o < octs; ++o)
    for (int64_t i = 0; i < kStep; i += 32) {
      const __m256i v = load(b + o * kStep + i);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * o * kStep + i), nibbles.low_codes(v));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (2 * o + 1) * kStep + i), nibbles.high_codes(v));
    }
}

constexpr int64_t kPage = 4096;  // bytes ahead of a stream of int4: the prefetchers of the machine stop at its end

// R rows by 8 J columns of at most kSums / 2 octs.
template <int R, int J>
PYQ_INLINE void sum_nibbles(const Nibbles& nibbles, const uint8_t* a, int64_t lda, const uint8_t* b, int64_t octs,
                            int32_t* acc, bool add) {
  __m256i c[R][J];
  zero(c);
  for (int64_t o = 0; o < octs; ++o, a += 8, b += kStep) {
    call_in<J>(reinterpret_cast<const int8_t*>(b) + kPage, 0);
    each<J>(PYQ_EACH(j) {
      const __m256i v = load(b + j * 32), low = nibbles.low_codes(v), high = nibbles.high_codes(v);
      each<R>(PYQ_EACH(r) {
        add_s16(c[r][j], _mm256_maddubs_epi16(quad(a + r * lda), low));
        add_s16(c[r][j], _mm256_maddubs_epi16(quad(a + r * lda + 4), high));
      });
    });
  }
  finish_s16(c, acc, add);
}

// One or two rows by 8 J columns, from nibbles, through `octs` <= kChunk.
template <int R, int J>
__attribute__((noinline)) void tile_s4(const uint8_t* a, int64_t lda, const uint8_t* b, int64_t octs, int32_t* acc,
                                       bool add) {
  const Nibbles nibbles;
  for (int64_t o = 0; o < octs; o += kSums / 2, add = true)
    sum_nibbles<R, J>(nibbles, a + o * 8, lda, b + o * kStep, std::min(kSums / 2, octs - o), acc, add);
}

void gemm_s4(const uint8_t* a, int64_t lda, int64_t rows, const uint8_t* b, int64_t octs, int32_t* acc) {
  if (octs == 0) std::fill(acc, acc + rows * kBlockN, 0);
  for (int64_t done = 0; done < octs; done += kChunk) {
    const int64_t now = std::min(kChunk, octs - done);
    const uint8_t *x = a + done * 8, *w = b + done * kStep;
    int64_t r = 0;
    for (; r + 2 <= rows; r += 2)
      for (int64_t j = 0; j < 8; j += 4)
        tile_s4<2, 4>(x + r * lda, lda, w + j * 32, now, acc + r * kBlockN + j * 8, done > 0);
    if (r < rows) tile_s4<1, 8>(x + r * lda, lda, w, now, acc + r * kBlockN, done > 0);
  }
}

}  // namespace

// Reads like that of every other set; the functions are those of this file alone.
const Kernels& kernels_avx2() {
  static constexpr Kernels table = [] {
    Kernels k = row_table<V>(Isa::avx2);
    k.row_block = kRows;
    k.gemm_s8 = gemm_s8;
    k.gemm_unpacked_s4 = gemm_unpacked_s4;
    k.gemm_s4 = gemm_s4;
    k.unpack_s4 = unpack_s4;
    k.taps = taps;
    k.interleave = interleave;
    return k;
  }();
  return table;
}

}  // namespace pyquant::cpu
