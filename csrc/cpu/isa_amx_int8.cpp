// processors: x86_64, flags: -mamx-tile -mamx-int8 -mavx512bw -mavx512vl -mavx512dq -mfma -mprfchw
// AMX: 16 x 64 byte tiles, 16384 products an instruction. Few rows, and groups that do not fill a tile, run on VNNI.
// g++ 12 takes the deliberately undefined operands inside its own intrinsics for mistakes (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>

#include "cpu/finish_avx512.h"
#include "cpu/kernels.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kMinRows = 5;         // below, vpdpbusd multiplies as fast
constexpr int64_t kStep = kBlockN * 4;  // bytes of one quad of a block
constexpr int64_t kTileQuads = 16;      // quads of one tile: 64 codes along K
constexpr int64_t kTileB = kTileQuads * kStep;
constexpr int64_t kTileRows = 16, kPanelRows = 2 * kTileRows;
constexpr int64_t kLdc = kBlockN * 4;  // bytes of a row of sums
constexpr int64_t kLine = 64;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void begin(int64_t rows) {
  static constexpr TileConfig config{};
  if (rows >= kMinRows) _tile_loadconfig(&config);
}

void end(int64_t rows) {
  if (rows >= kMinRows) _tile_release();
}

// Rows [begin, end) of sums that are finished.
void finish_rows(const Finish& finish, const int32_t* acc, int64_t begin, int64_t end) {
  if (!finish.is_plain()) return finish.rows(begin, end);
  constexpr int R = 2;
  for (; begin + R <= end; begin += R) {
    __m512i c[R][4];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) c[r][j] = _mm512_loadu_si512(acc + (begin + r) * kBlockN + j * 16);
    finish.from_registers(c, begin);
  }
  if (begin == end) return;
  __m512i c[1][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) c[0][j] = _mm512_loadu_si512(acc + begin * kBlockN + j * 16);
  finish.from_registers(c, begin);
}

// What the steps of a product do besides it, a part each, as the unit for tiles leaves the others idle: weights that
// come next are called in, lines of results owned, and the sums of the panel before finished.
class Besides {
 public:
  // finish: null where sums are left as they are.
  Besides(const Ahead& ahead, const Finish* finish, const int32_t* acc, int64_t rows, int64_t steps)
      : ahead_(ahead), finish_(finish), acc_(acc), weights_(static_cast<const char*>(ahead.weights)) {
    const int64_t left = rows % kPanelRows, passes = rows / kPanelRows * 2 + (left > kTileRows ? 2 : left > 0);
    lines_ = (kTileB / kLine + passes - 1) / passes;
    weights_end_ = weights_ ? weights_ + steps * kTileB : nullptr;
    const int64_t visits = std::max<int64_t>(2 * steps, 1);
    owns_ = (kPanelRows * Ahead::kRowLines + visits - 1) / visits;
    each_ = (kPanelRows + visits - 1) / visits;
    each_ += each_ & 1;
  }

  // The panel that is multiplied next: rows [begin, end).
  void start(int64_t begin, int64_t end) {
    first_ = begin;
    line_ = 0;
    last_line_ = ahead_.out ? (end - begin) * Ahead::kRowLines : 0;
  }
  // Its sums are there.
  void multiplied(int64_t end) { there_ = finish_ ? end : done_; }

  PYQ_INLINE void next() {
    for (int64_t i = 0; i < lines_ && weights_ < weights_end_; ++i, weights_ += kLine)
      _mm_prefetch(weights_, _MM_HINT_T1);
    for (int64_t i = 0; i < owns_ && line_ < last_line_; ++i) ahead_.call_line(first_, line_++);
    if (done_ < there_) finish_some(std::min(there_, done_ + each_));
  }

  void finish_all() {
    if (done_ < there_) finish_some(there_);
  }

 private:
  void finish_some(int64_t end) {
    finish_rows(*finish_, acc_, done_, end);
    done_ = end;
  }

  const Ahead& ahead_;
  const Finish* finish_;
  const int32_t* acc_;
  const char *weights_, *weights_end_;
  int64_t lines_, owns_, each_;                   // of each step
  int64_t first_ = 0, line_ = 0, last_line_ = 0;  // of results
  int64_t done_ = 0, there_ = 0;                  // rows finished, rows of sums
};

// 16 rows by 64 columns: accumulators in tiles 0-3, rows in 4, columns through 5-7.
template <class Work>
void panel_16(const uint8_t* a, int64_t lda, const int8_t* b, int64_t steps, int32_t* acc, bool add, Work& besides) {
  if (add) {
    _tile_loadd(0, acc, kLdc);
    _tile_loadd(1, acc + 16, kLdc);
    _tile_loadd(2, acc + 32, kLdc);
    _tile_loadd(3, acc + 48, kLdc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s) {
    const int8_t* w = b + s * kTileB;
    _tile_loadd(4, a + s * 64, lda);
    _tile_loadd(5, w, kStep);
    _tile_loadd(6, w + 64, kStep);
    _tile_loadd(7, w + 128, kStep);
    _tile_dpbusd(0, 4, 5);
    _tile_loadd(5, w + 192, kStep);
    _tile_dpbusd(1, 4, 6);
    _tile_dpbusd(2, 4, 7);
    _tile_dpbusd(3, 4, 5);
    besides.next();
  }
  _tile_stored(0, acc, kLdc);
  _tile_stored(1, acc + 16, kLdc);
  _tile_stored(2, acc + 32, kLdc);
  _tile_stored(3, acc + 48, kLdc);
}

// 32 rows by 32 columns: four accumulators share two tiles of rows and two of columns.
template <class Work>
void panel_32(const uint8_t* a, int64_t lda, const int8_t* b, int64_t steps, int32_t* acc, bool add, Work& besides) {
  const uint8_t* a1 = a + kTileRows * lda;
  int32_t* acc1 = acc + kTileRows * kBlockN;
  if (add) {
    _tile_loadd(0, acc, kLdc);
    _tile_loadd(1, acc + 16, kLdc);
    _tile_loadd(2, acc1, kLdc);
    _tile_loadd(3, acc1 + 16, kLdc);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t s = 0; s < steps; ++s) {
    const int8_t* w = b + s * kTileB;
    _tile_loadd(6, w, kStep);
    _tile_loadd(4, a + s * 64, lda);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(7, w + 64, kStep);
    _tile_dpbusd(1, 4, 7);
    _tile_loadd(5, a1 + s * 64, lda);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
    besides.next();
  }
  _tile_stored(0, acc, kLdc);
  _tile_stored(1, acc + 16, kLdc);
  _tile_stored(2, acc1, kLdc);
  _tile_stored(3, acc1 + 16, kLdc);
}

// Up to kPanelRows rows by 64 columns.
template <class Work>
void panel(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t steps, int32_t* acc, bool add,
           Work& besides) {
  if (rows <= kTileRows) return panel_16(a, lda, b, steps, acc, add, besides);
  panel_32(a, lda, b, steps, acc, add, besides);
  panel_32(a, lda, b + kStep / 2, steps, acc + kBlockN / 2, add, besides);
}

void product(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t steps, int32_t* acc, bool add,
             const Ahead& ahead, const Finish* finish) {
  Besides besides(ahead, finish, acc, rows, steps);
  for (int64_t r = 0; r < rows; r += kPanelRows) {
    const int64_t last = std::min(r + kPanelRows, rows);
    besides.start(r, last);
    panel(a + r * lda, lda, last - r, b, steps, acc + r * kBlockN, add, besides);
    besides.multiplied(last);
  }
  besides.finish_all();
}

void gemm_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add,
             const Ahead& ahead) {
  if (rows < kMinRows || quads % kTileQuads)
    return kernels_avx512_vnni().gemm_s8(a, lda, rows, b, quads, acc, add, ahead);
  product(a, lda, rows, b, quads / kTileQuads, acc, add, ahead, nullptr);
}

void linear_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, const Tile& tile, int32_t* acc,
               const Ahead& ahead) {
  if (tile.rows < kMinRows || quads % kTileQuads)
    return kernels_avx512_vnni().linear_s8(a, lda, b, quads, tile, acc, ahead);
  const Finish finish(tile);
  product(a, lda, tile.rows, b, quads / kTileQuads, acc, false, ahead, &finish);
}

// The sums of one group, which are scaled and added up, a part with each step, while the next group is multiplied.
class GroupBefore {
 public:
  explicit GroupBefore(int64_t steps) : each_((kPanelRows + 2 * steps - 1) / (2 * steps)) {}

  void multiplied(const Tile& group, float* sum, bool first) {
    group_ = group;
    sum_ = sum;
    first_ = first;
  }

  PYQ_INLINE void next() {
    if (group_.rows > 0) add(std::min(each_, group_.rows));
  }
  void all() {
    if (group_.rows > 0) add(group_.rows);
  }

 private:
  void add(int64_t rows) {
    Tile some = group_;
    some.rows = rows;
    if (some.x_zero_step)
      Rows<V>::accumulate(some, sum_, first_);
    else
      add_with_one_zero(some, sum_, first_);
    group_.rows -= rows;
    group_.acc += rows * kBlockN;
    group_.x_zero += rows * group_.x_zero_step;
    sum_ += rows * kBlockN;
  }

  // The same for rows that share a zero point: what belongs to the channels stays in registers.
  static void add_with_one_zero(const Tile& t, float* sum, bool first) {
    const __m512i zero = _mm512_set1_epi32(t.x_zero[0]);
    __m512i term[4];
    __m512 scale[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      term[j] = _mm512_mullo_epi32(zero, _mm512_loadu_si512(t.w_sum + j * 16));
      scale[j] = _mm512_loadu_ps(t.w_scale + j * 16);
    }
    const int32_t* acc = t.acc;
    for (int64_t r = t.rows; r > 0; --r, acc += kBlockN, sum += kBlockN) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const __m512i real = _mm512_sub_epi32(_mm512_loadu_si512(acc + j * 16), term[j]);
        const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(real), scale[j]);
        const __m512 before = first ? _mm512_setzero_ps() : _mm512_loadu_ps(sum + j * 16);
        _mm512_storeu_ps(sum + j * 16, _mm512_add_ps(before, value));
      }
    }
  }

  int64_t each_;
  Tile group_;
  float* sum_ = nullptr;
  bool first_ = false;
};

// A tile times groups of codes, which codes_of(group) gives: all rows meet a group while its codes are near.
template <class Codes>
void grouped(const uint8_t* a, int64_t lda, int64_t steps, int64_t groups, const Tile& tile, float* sum,
             Codes codes_of) {
  alignas(64) int32_t acc[2][kPanelRows * kBlockN];
  GroupBefore before(steps);
  int64_t turn = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int8_t* codes = codes_of(g);
    for (int64_t r = 0; r < tile.rows; r += kPanelRows, turn ^= 1) {
      Tile group = tile;
      group.rows = std::min(kPanelRows, tile.rows - r);
      group.x_zero += r * tile.x_zero_step;
      group.acc = acc[turn];
      group.w_sum += g * kBlockN;
      group.w_scale += g * kBlockN;
      panel(a + r * lda + g * steps * 64, lda, group.rows, codes, steps, acc[turn], false, before);
      before.all();
      before.multiplied(group, sum + r * kBlockN, g == 0);
    }
  }
  before.all();
}

constexpr int64_t kTileOcts = kTileQuads / 2;

void linear_s4(const uint8_t* a, int64_t lda, const uint8_t* b, int8_t* codes, bool fill, int64_t octs, int64_t groups,
               const Tile& tile, float* sum, const Ahead& ahead) {
  const Kernels& vectors = kernels_avx512_vnni();
  if (tile.rows < kMinRows || octs % kTileOcts || octs == 0)
    return vectors.linear_s4(a, lda, b, codes, fill, octs, groups, tile, sum, ahead);
  Tile summed = tile;
  summed.acc = nullptr;
  summed.sum = sum;
  const Finish finish(summed);
  grouped(a, lda, octs / kTileOcts, groups, tile, sum, [&](int64_t g) {
    int8_t* of_group = codes + g * octs * 2 * kStep;
    if (fill) vectors.unpack_s4(b + g * octs * kStep, octs, of_group);
    if (g + 1 == groups) ahead.call_out(0, tile.rows);
    return of_group;
  });
  finish.rows(0, tile.rows);
}

void groups_s4(const uint8_t* a, int64_t lda, const int32_t* a_sum, const uint8_t* b, int64_t octs, int64_t groups,
               const Tile& tile, float* sum, const Ahead& ahead) {
  const Kernels& vectors = kernels_avx512_vnni();
  constexpr int64_t kMostOcts = 4 * kTileOcts;  // of a group that is unpacked on the stack
  if (tile.rows < kMinRows || octs % kTileOcts || octs == 0 || octs > kMostOcts)
    return vectors.groups_s4(a, lda, a_sum, b, octs, groups, tile, sum, ahead);
  alignas(64) int8_t codes[2 * kMostOcts * kStep];
  grouped(a, lda, octs / kTileOcts, groups, tile, sum, [&](int64_t g) {
    vectors.unpack_s4(b + g * octs * kStep, octs, codes);
    return codes;
  });
}

}  // namespace

const Kernels& kernels_amx_int8() {
  static const Kernels table = [] {
    Kernels k = kernels_avx512_bf16();
    k.isa = Isa::amx_int8;
    k.row_block = 96;
    k.quad_step = kTileQuads;
    k.begin = begin;
    k.end = end;
    k.gemm_s8 = gemm_s8;
    k.linear_s8 = linear_s8;
    k.groups_s4 = groups_s4;
    k.linear_s4 = linear_s4;
    return k;
  }();
  return table;
}

}  // namespace pyquant::cpu
