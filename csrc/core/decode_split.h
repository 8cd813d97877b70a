// How a decode kernel divides its work: what the cost model and the launch must agree on. Pure.
#pragma once
#include <cstdint>

namespace pyquant {

constexpr int32_t kDecodeWarps = 8;
constexpr int32_t kDecodeWarpChannels = 32;
constexpr int32_t kDecodeSplitMax = 8;  // blocks of a portable cluster

// Parts of K that the warps of a block take turns in; as many warps as its channels need work side by side on a part.
constexpr int32_t decode_depth_warps(int32_t tile_n) { return kDecodeWarps * kDecodeWarpChannels / tile_n; }

// What writing and adding up sums in memory takes, in units of a warp's work: about one microsecond, two where a launch
// of its own clears the counters (nothing writes codes of float activations), while eight warps take a fifth of one for
// a unit each that needs no widening, and longer the more there is to widen.
constexpr int32_t decode_sums_units(bool is_float, bool packed_weights) {
  return packed_weights ? (is_float ? 2 : 1) : (is_float ? 5 : 4);
}

// Columns of 8 tokens that the kernel of a tile multiplies, those beyond M included.
constexpr int32_t decode_columns(int64_t m, int32_t tile_m) { return tile_m == 16 && m <= 8 ? 1 : tile_m / 8; }

// Activations of all steps under way, without padding.
constexpr int64_t decode_ring_bytes(int32_t stages, int32_t tile_n, int32_t tokens, int32_t codes, int64_t x_bits) {
  return int64_t{stages} * decode_depth_warps(tile_n) * tokens * codes * x_bits / 8;
}

constexpr int32_t kDecodeSumsPadding = 4;  // 32 lanes of an accumulator register hit 32 banks

// Sums of every part of K, which take the ring's place at the end.
constexpr int32_t decode_sums_bytes(int32_t tile_n, int32_t tokens) {
  return decode_depth_warps(tile_n) * tokens * (tile_n + kDecodeSumsPadding) * 4;
}

// How many blocks share the K of a tile of tile_n channels: the number whose busiest multiprocessor has the fewest
// units of a warp, where filling a block's pipeline counts as one and `sums` are decode_sums_units. A cluster adds its
// sums for nothing; its size is a power of two, so that the chip's groups of multiprocessors, inside of which clusters
// are placed, are filled.
constexpr int32_t decode_split(int64_t tiles, int64_t units, int32_t tile_n, int32_t sm_count, bool cluster,
                               int32_t sums) {
  const int64_t sms = sm_count > 1 ? sm_count : 1;
  int32_t best = 1;
  int64_t fewest = 0;
  for (int32_t split = 1; split <= kDecodeSplitMax; split = cluster ? 2 * split : split + 1) {
    const int64_t stride = int64_t{split} * decode_depth_warps(tile_n);
    if (split > 1 && units < stride) break;  // every part keeps one
    const int64_t rounds = (tiles * split + sms - 1) / sms, share = (units + stride - 1) / stride;
    const int64_t busiest = rounds * (share + 1) + (split > 1 && !cluster ? sums : 0);
    if (split > 1 && busiest >= fewest) continue;
    best = split;
    fewest = busiest;
  }
  return best;
}

}  // namespace pyquant
