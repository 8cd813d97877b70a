// In which order persistent blocks take the tiles of a product. Those that are at work at one time read few different
// rows of the operands where their tiles make a square: then L2 keeps what they share, and main memory is asked once.
#pragma once
#include <algorithm>
#include <cstdint>

#include "plan/split_k.h"

namespace pyquant {

// Tiles of a product as its scheduler counts them, clusters for tiles where there are clusters.
struct TileGrid {
  int64_t rows, columns;            // of tiles
  int64_t tile_rows, tile_columns;  // of a tile
  int64_t at_once;                  // tiles
};

// Rows of both operands that the tiles of one moment read. They are taken along the shorter side, `swizzle` lines of
// tiles abreast, which is CUTLASS's order (PersistentTileSchedulerSm90).
constexpr int64_t rows_at_once(const TileGrid& g, int64_t swizzle) {
  const bool along_rows = g.columns > g.rows;
  const int64_t length = along_rows ? g.rows : g.columns;
  const int64_t run = std::min(length, ceil_div(g.at_once, swizzle));
  const int64_t lines = swizzle * ceil_div(g.at_once, swizzle * length);
  const int64_t across = std::min(lines, along_rows ? g.columns : g.rows);
  return along_rows ? run * g.tile_rows + across * g.tile_columns : run * g.tile_columns + across * g.tile_rows;
}

// How many lines of tiles abreast read the fewest rows: 1, 2, 4 or 8. Only what divides both sides: CUTLASS fills up a
// side that is no multiple with tiles outside of the product, whose time is lost.
constexpr int32_t tile_swizzle(const TileGrid& g) {
  int32_t best = 1;
  for (const int32_t swizzle : {2, 4, 8})
    if (g.rows % swizzle == 0 && g.columns % swizzle == 0 && rows_at_once(g, swizzle) < rows_at_once(g, best))
      best = swizzle;
  return best;
}

}  // namespace pyquant
