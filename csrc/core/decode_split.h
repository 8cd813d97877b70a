// How a decode kernel divides its work: what the cost model and the launch must agree on. Pure.
#pragma once
#include <cstdint>

namespace pyquant {

constexpr int32_t kDecodeWarps = 8;
constexpr int32_t kDecodeWarpChannels = 32;
constexpr int32_t kDecodeSplitMax = 8;  // blocks of a portable cluster

// Parts of K that the warps of a block take turns in; as many warps as its channels need work side by side on a part.
constexpr int32_t decode_depth_warps(int32_t tile_n) { return kDecodeWarps * kDecodeWarpChannels / tile_n; }

// What writing and adding up sums in memory takes, in units of a warp's work: about two microseconds, three where a
// launch of its own clears the counters (nothing writes codes of float activations), beyond what filling a pipeline
// takes anyway. Eight warps take a third of a microsecond for a unit each that needs no widening, and longer the more
// there is to widen.
constexpr int32_t decode_sums_units(bool is_float, bool packed_weights) {
  return packed_weights ? (is_float ? 2 : 3) : (is_float ? 5 : 4);
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

// Blocks in clusters of `split` that are at work at a time, one a multiprocessor. A cluster stays inside of one of the
// chip's groups of multiprocessors, of which some are no multiple: 128 blocks in clusters of four take two rounds of an
// H200's 132 (`python -m bench.rows`: 35.6 us where 16.5 were expected).
constexpr int32_t cluster_slots(int32_t sm_count, int32_t split) {
  const int32_t reached = split <= 2 ? sm_count : split <= 4 ? sm_count * 10 / 11 : sm_count * 17 / 20;
  return reached > split ? reached / split * split : split;
}

// Units that a warp could have done while its block fills its pipeline and hands over its sums, which takes as long as
// two or three steps of the quickest kernels (`python -m bench.rows` on an H200: 2.6 us for a block that follows
// another, 1.3 us where two are at work; a step of eight warps takes 0.4 us, of widened weights 0.9).
constexpr int32_t kDecodeFillUnits = 3;

// How many blocks share the K of a tile of tile_n channels: the number whose busiest multiprocessor has the fewest
// units of a warp, those that filling takes included; `sums` are decode_sums_units. A cluster adds its sums within its
// filling; its size is a power of two, so that the chip's groups of multiprocessors are filled.
constexpr int32_t decode_split(int64_t tiles, int64_t units, int32_t tile_n, int32_t sm_count, bool cluster,
                               int32_t sums) {
  const int64_t sms = sm_count > 1 ? sm_count : 1;
  int32_t best = 1;
  int64_t fewest = 0;
  for (int32_t split = 1; split <= kDecodeSplitMax; split = cluster ? 2 * split : split + 1) {
    const int64_t stride = int64_t{split} * decode_depth_warps(tile_n);
    if (split > 1 && units < stride) break;  // every part keeps one
    const int64_t at_once = cluster ? cluster_slots(static_cast<int32_t>(sms), split) : sms;
    const int64_t rounds = (tiles * split + at_once - 1) / at_once, share = (units + stride - 1) / stride;
    const int64_t busiest = rounds * (share + kDecodeFillUnits) + (split > 1 && !cluster ? sums : 0);
    if (split > 1 && busiest >= fewest) continue;
    best = split;
    fewest = busiest;
  }
  return best;
}

}  // namespace pyquant
