// How a decode kernel divides its work: what the cost model and the launch must agree on. Pure.
#pragma once
#include <cstdint>

namespace pyquant {

constexpr int32_t kDecodeWarps = 8;
constexpr int32_t kDecodeSplitMax = 8;   // blocks of a portable cluster
constexpr int32_t kDecodeSumsUnits = 8;  // clearing, writing and adding up sums in memory, as units of a warp's work

// Columns of 8 tokens that the kernel of a tile multiplies, wanted or not.
constexpr int32_t decode_columns(int64_t m, int32_t tile_m) { return tile_m == 16 && m <= 8 ? 1 : tile_m / 8; }

// Activations of every warp's steps under way, without padding.
constexpr int64_t decode_ring_bytes(int32_t stages, int32_t tokens, int32_t codes, int64_t x_bits) {
  return int64_t{stages} * kDecodeWarps * tokens * codes * x_bits / 8;
}

// How many blocks share the K of a tile: the power of two that leaves a warp the fewest units, doubled while
// multiprocessors are idle and every warp keeps one. A cluster adds its sums for nothing.
constexpr int32_t decode_split(int64_t tiles, int64_t units, int32_t sm_count, bool cluster) {
  int32_t best = 1;
  int64_t fewest = 0;
  for (int32_t split = 1; split <= kDecodeSplitMax; split *= 2) {
    if (split > 1 && (tiles * split / 2 >= sm_count || units < int64_t{split} * kDecodeWarps)) break;
    const int64_t stride = int64_t{split} * kDecodeWarps;
    const int64_t longest = (units + stride - 1) / stride + (split > 1 && !cluster ? kDecodeSumsUnits : 0);
    if (split > 1 && longest >= fewest) continue;
    best = split;
    fewest = longest;
  }
  return best;
}

}  // namespace pyquant
