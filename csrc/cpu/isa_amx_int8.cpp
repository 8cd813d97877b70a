// processors: x86_64, flags: -mamx-tile -mamx-int8
// (No vector code: what AMX leaves over, few rows and floats, runs in the files of AVX-512.)
// AMX: 16 x 64 byte tiles, 16384 products an instruction. Few rows, and groups that do not fill a tile, run on VNNI.
#include <immintrin.h>

#include "cpu/kernels.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kMinRows = 3;         // below, streaming the weights through vpdpbusd is faster
constexpr int64_t kStep = kBlockN * 4;  // bytes of one quad of a block
constexpr int64_t kTileQuads = 16;      // quads of one tile: 64 codes along K
constexpr int64_t kTileB = kTileQuads * kStep;

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

// 16 rows by 64 columns: accumulators in tiles 0-3, rows in 4, columns through 5-7.
void panel_16(const uint8_t* a, int64_t lda, const int8_t* b, int64_t steps, int32_t* acc, bool add) {
  constexpr int64_t kLdc = kBlockN * 4;
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
  }
  _tile_stored(0, acc, kLdc);
  _tile_stored(1, acc + 16, kLdc);
  _tile_stored(2, acc + 32, kLdc);
  _tile_stored(3, acc + 48, kLdc);
}

// 32 rows by 32 columns: four accumulators share two tiles of rows and two of columns.
void panel_32(const uint8_t* a, int64_t lda, const int8_t* b, int64_t steps, int32_t* acc, bool add) {
  constexpr int64_t kLdc = kBlockN * 4;
  const uint8_t* a1 = a + 16 * lda;
  int32_t* acc1 = acc + 16 * kBlockN;
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
  }
  _tile_stored(0, acc, kLdc);
  _tile_stored(1, acc + 16, kLdc);
  _tile_stored(2, acc1, kLdc);
  _tile_stored(3, acc1 + 16, kLdc);
}

void gemm_s8(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add,
             const Ahead& ahead) {
  if (rows < kMinRows || quads % kTileQuads)
    return kernels_avx512_vnni().gemm_s8(a, lda, rows, b, quads, acc, add, ahead);
  const int64_t steps = quads / kTileQuads;
  for (; rows > 0; rows -= 32, a += 32 * lda, acc += 32 * kBlockN) {
    if (rows <= 16) return panel_16(a, lda, b, steps, acc, add);
    panel_32(a, lda, b, steps, acc, add);
    panel_32(a, lda, b + 128, steps, acc + 32, add);
  }
}

void linear_s8(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, const Tile& tile, int32_t* acc,
               const Ahead& ahead) {
  const Kernels& vectors = kernels_avx512_vnni();
  if (tile.rows < kMinRows || quads % kTileQuads) return vectors.linear_s8(a, lda, b, quads, tile, acc, ahead);
  gemm_s8(a, lda, tile.rows, b, quads, acc, false, ahead);
  vectors.epilogue(tile);
}

}  // namespace

const Kernels& kernels_amx_int8() {
  static const Kernels table = [] {
    Kernels k = kernels_avx512_bf16();
    k.isa = Isa::amx_int8;
    k.row_block = 32;
    k.quad_step = kTileQuads;
    k.begin = begin;
    k.end = end;
    k.gemm_s8 = gemm_s8;
    k.linear_s8 = linear_s8;
    k.groups_s4 = nullptr;  // the tiles win
    k.linear_s4 = nullptr;
    k.code_sums = nullptr;
    return k;
  }();
  return table;
}

}  // namespace pyquant::cpu
