// The shape of a block of a decode kernel (decode.cuh): who holds which channels and which part of K, what lies where
// in shared memory, and the operands of a launch.
#pragma once
#include <algorithm>

#include "core/blocked128.h"
#include "core/decode_split.h"
#include "cuda/gemm/decode_math.cuh"

namespace pyquant::cuda {

// Passed by value to kernels.
struct DecodeOperands {
  const uint8_t *x, *w;
  int64_t ldx_bytes, ldw_bytes;
  const float* w_scale;         // with group scales: [n, groups]
  const int32_t* w_sum;         // likewise, null without a zero point
  const int32_t* w_zero_point;  // [n] or [n, groups], or null
  int32_t k, groups;            // groups: entries of a channel in the arrays above
  int32_t unit_codes;           // what a warp takes at a time: a step, or a scale group larger than a step
  int32_t unit_steps;
  int32_t unit_groups;    // scale groups in a unit: 1, or more that share a step
  int32_t group_codes;    // size of a scale group
  int32_t tiles_m;        // tiles of tokens
  int32_t steps;          // of every warp, those beyond K included
  int32_t ahead;          // codes from a warp's last step of a unit to its next unit
  const uint8_t* w_step;  // natural weights with steps (core/steps.h)
  int32_t step_row;       // bytes
  uint32_t step_share;    // 2^32 / (twice the pieces of 32 codes that share a step), rounded up
  void* partials;         // [tile][split][token][channel] sums of blocks that share K
  uint32_t* arrivals;     // [tile], cleared before the launch
};

// What a row's schedule makes of its arithmetic: decode256 asks L2 for 256 bytes at a time (decode_move.cuh).
namespace decode_schedule {
template <class Math>
using decode = Math;
template <class Math>
struct decode256 : Math {
  static constexpr int kAhead = 256;
};
}  // namespace decode_schedule

template <class Math, class = void>
inline constexpr int kAheadOf = 0;
template <class Math>
inline constexpr int kAheadOf<Math, decltype(void(Math::kAhead))> = Math::kAhead;

// Scale groups: none, whole steps of K in each, or (weights as in a checkpoint) several in a step.
enum class DecodeGroups { none, whole, parts };

// Which outputs of a tile a block finishes: every `split`th 64 from `rank` on.
struct DecodeShare {
  int32_t split = 1, rank = 0;
};

template <class Math_, int kTileN, int kTileM, int kStages_, DecodeGroups kGroups_, bool kCluster_>
struct DecodeTraits {
  using Math = Math_;
  using Acc = typename Math::Acc;
  static constexpr bool kGrouped = kGroups_ != DecodeGroups::none, kParts = kGroups_ == DecodeGroups::parts,
                        kCluster = kCluster_;
  static constexpr bool kOrdered = kGrouped && std::is_same_v<Acc, int32_t>;
  using Sum = std::conditional_t<kOrdered, float, Acc>;  // what blocks and warps add
  // Blocks that a multiprocessor shall hold (csrc/plan/cost.cpp counts on it). Fragments of more than 16 tokens, or of
  // 16 of 16 bits, do not fit into half of its registers.
  static constexpr int kResident = kTileM > 16 || (is_float(Math::kX) && kTileM > 8) ? 1 : 2;
  // Scales take the place of a stage.
  static constexpr int kStages = kGrouped && kResident > 1 ? kStages_ - 1 : kStages_, kWarps = kDecodeWarps,
                       kThreads = 32 * kWarps;
  // Warps side by side hold 32 channels each and share the activations of their part of K.
  static constexpr int kDepthWarps = decode_depth_warps(kTileN), kSideWarps = kWarps / kDepthWarps;
  static constexpr int kSharers = 32 * kSideWarps;  // threads that share activations
  static constexpr int kChannels = kTileN, kTokens = kTileM;
  static constexpr int kAhead = kAheadOf<Math>;
  static constexpr int kRows = kDecodeWarpChannels / 16, kColumns = kTileM / 8;
  static constexpr int kXBits = bits_of(Math::kX), kWBits = bits_of(Math::kW);
  static constexpr int kStep = 4 * Math::kCodes;                 // codes that a quad takes at a time
  static constexpr int kUnits = Math::kCodes * kXBits / 8 / 16;  // 16-byte units of a token's x per lane
  static constexpr bool kBlocked = Math::kBlocked;               // weights lie as core/blocked128.h says
  static constexpr int kBlockBytes = static_cast<int>(blocked128_bytes(kBlocked128Side, kBlocked128Side, Math::kSteps));
  // A token's x in shared memory. Blocked weights ask for four separate words: the padding moves tokens to other banks.
  static constexpr int kTokenBytes = 64 * kUnits + (kBlocked ? 16 : 0);
  static constexpr int kSlotBytes = kTokens * kTokenBytes;  // x of one part of K and stage
  static constexpr int kStageBytes = kDepthWarps * kSlotBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kTokensApart = kSharers / (4 * kUnits);  // tokens that the sharers copy at once
  static constexpr int kPitch = kChannels + kDecodeSumsPadding;
  static constexpr int kSumsBytes = decode_sums_bytes(kChannels, kTokens);
  static constexpr int kPairs = (kTokens * kChannels / 2 + kThreads - 1) / kThreads;  // outputs of a thread, by twos

  // Where the sum of a token and a channel lies: `which` is a part of K, or a scale group of a round.
  static __device__ __forceinline__ int32_t place_of_sum(int32_t which, int32_t token, int32_t column) {
    return (which * kTokens + token) * kPitch + column;
  }

  // Output pair `i` of this thread, of those that its block finishes: token and first channel, within the tile. Beyond
  // the tile: a token from kTokens on. Pairs go to blocks 32 at a time. The channel is the same for every i.
  static __device__ __forceinline__ void pair(int i, const DecodeShare& of, int32_t& token, int32_t& column) {
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    const int32_t index = ((thread / 32 + kWarps * i) * of.split + of.rank) * 32 + thread % 32;
    token = index / (kChannels / 2);
    column = 2 * (index % (kChannels / 2));
  }

  static_assert(kThreads % (kChannels / 2) == 0, "one channel a thread");
  static_assert(kRows == 2, "steps of 32 channels");
  static_assert(kBlocked || kGrouped || kRingBytes == decode_ring_bytes(kStages, kChannels, kTokens, kStep, kXBits));

  static int shared_bytes(int unit_groups) {
    if (!kOrdered) return std::max(kRingBytes, kSumsBytes);
    return kRingBytes + unit_groups * kSumsBytes + kTokens * kPitch * 4;  // products of a round, sums of all
  }
};

}  // namespace pyquant::cuda
