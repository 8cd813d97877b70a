// How a decode kernel divides its work: what the cost model and the launch must agree on. Pure.
#pragma once
#include <cstdint>

namespace pyquant {

constexpr int32_t kDecodeWarps = 8;
constexpr int32_t kDecodeSplitMax = 8;  // blocks of a portable cluster

// What clearing, writing and adding up sums in memory takes, in units of a warp's work: about two microseconds, while
// eight warps take a fifth of one for a unit each that needs no widening, and longer the more there is to widen.
constexpr int32_t decode_sums_units(bool is_float, bool packed_weights) {
  return packed_weights ? 2 : (is_float ? 5 : 8);
}

// Columns of 8 tokens that the kernel of a tile multiplies, those beyond M included.
constexpr int32_t decode_columns(int64_t m, int32_t tile_m) { return tile_m == 16 && m <= 8 ? 1 : tile_m / 8; }

// Activations of every warp's steps under way, without padding.
constexpr int64_t decode_ring_bytes(int32_t stages, int32_t tokens, int32_t codes, int64_t x_bits) {
  return int64_t{stages} * kDecodeWarps * tokens * codes * x_bits / 8;
}

// How many blocks share the K of a tile: the number whose busiest multiprocessor has the fewest units of a warp, where
// filling a block's pipeline counts as one and `sums` are decode_sums_units. A cluster adds its sums for nothing; its
// size is a power of two, so that the chip's groups of multiprocessors, inside of which clusters are placed, are
// filled.
constexpr int32_t decode_split(int64_t tiles, int64_t units, int32_t sm_count, bool cluster, int32_t sums) {
  const int64_t sms = sm_count > 1 ? sm_count : 1;
  int32_t best = 1;
  int64_t fewest = 0;
  for (int32_t split = 1; split <= kDecodeSplitMax; split = cluster ? 2 * split : split + 1) {
    const int64_t stride = int64_t{split} * kDecodeWarps;
    if (split > 1 && units < stride) break;  // every warp keeps one
    const int64_t rounds = (tiles * split + sms - 1) / sms, share = (units + stride - 1) / stride;
    const int64_t busiest = rounds * (share + 1) + (split > 1 && !cluster ? sums : 0);
    if (split > 1 && busiest >= fewest) continue;
    best = split;
    fewest = busiest;
  }
  return best;
}

}  // namespace pyquant
