// The accumulators of a thread in steps of eight sums that a rolled loop can take one after another. In a step every
// lane holds four pairs of neighbouring channels of one token's row, which transpose_quad (transpose.cuh) turns into
// eight.
//   Straight (tokens are the rows of the accumulator): 32 channels of eight tokens a warp; outer steps over channels,
//   inner ones over rows.
//   Swapped (channels are the rows): 16 channels of 16 tokens, each 8 x 8 block turned around; outer steps over the
//   rows of the accumulator, inner ones over tokens.
#pragma once
#include <cute/tensor.hpp>

#include "cuda/gemm/at_step.cuh"
#include "cuda/gemm/transpose.cuh"

namespace pyquant::cuda {

// Fragment: ((2, 2, blocks of eight columns), repeats of 64 rows, instructions along the columns).
template <bool Swapped, class Fragment>
struct Steps90 {
  static constexpr int kBlocks = cute::size<0, 2>(Fragment{}), kRepeats = cute::size<1>(Fragment{}),
                       kColumns = cute::size<2>(Fragment{}) * kBlocks;
  static constexpr int kOuter = Swapped ? kRepeats : kColumns / 4;
  static constexpr int kInner = Swapped ? (kColumns + 1) / 2 : 2 * kRepeats;
  static constexpr int kSteps = kOuter * kInner;
  static_assert(kSteps <= kMostSteps);
  static_assert(Swapped || kColumns == kBlocks, "one instruction spans a straight tile's columns");
  static_assert(Swapped || kBlocks % 4 == 0, "straight tiles are multiples of 32 columns wide");

  static __device__ __forceinline__ int32_t quad() { return static_cast<int32_t>(threadIdx.x) & 3; }
  static __device__ __forceinline__ int32_t lane_row() { return static_cast<int32_t>(threadIdx.x) / 4 % 8; }

  // Of the lane's eight sums, within the tile: first channel, and token.
  template <class Coordinates>
  static __device__ __forceinline__ int32_t channel(const Coordinates& own, int32_t outer) {
    if constexpr (Swapped)
      return static_cast<int32_t>(cute::get<0>(own(cute::make_coord(0, 0, 0), outer, 0))) - lane_row() +
             8 * (quad() % 2);
    else
      return 32 * outer + 8 * quad();
  }
  template <class Coordinates>
  static __device__ __forceinline__ int32_t token(const Coordinates& own, int32_t inner) {
    if constexpr (Swapped)
      return 16 * inner + 8 * (quad() / 2) + lane_row();
    else
      return static_cast<int32_t>(cute::get<0>(own(cute::make_coord(0, inner % 2, 0), inner / 2, 0)));
  }
  // False of the second half of a last step over an odd number of blocks.
  static __device__ __forceinline__ bool inside(int32_t inner) {
    return !Swapped || kColumns % 2 == 0 || 2 * inner + quad() / 2 < kColumns;
  }

  // The sums of a step.
  template <class Acc>
  static __device__ __forceinline__ void take(const Fragment& acc, int32_t step, Acc (&pair)[4][2]) {
    at_step(step, [&](auto s) { copy<s()>(acc, pair); });
    if constexpr (Swapped) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) turn(pair[j]);
    }
  }

 private:
  template <int Step, class Acc>
  static __device__ __forceinline__ void copy(const Fragment& acc, Acc (&pair)[4][2]) {
    constexpr int kOut = Step / kInner, kIn = Step % kInner;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < 2; ++v) {
        if constexpr (Step >= kSteps) continue;
        if constexpr (Swapped) {
          const int column = 2 * kIn + j / 2;
          pair[j][v] =
              column < kColumns ? acc(cute::make_coord(v, j % 2, column % kBlocks), kOut, column / kBlocks) : Acc(0);
        } else {
          pair[j][v] = acc(cute::make_coord(v, kIn % 2, 4 * kOut + j), kIn / 2, 0);
        }
      }
    }
  }

  // Lane 4r + q holds columns 2q, 2q + 1 of row r of an 8 x 8 matrix of words: the same of its transpose.
  template <class Acc>
  static __device__ __forceinline__ void turn(Acc (&pair)[2]) {
    static_assert(sizeof(Acc) == 4, "two half words");
    uint32_t word[2];
    memcpy(word, pair, sizeof word);
    const uint32_t low = turned(__byte_perm(word[0], word[1], 0x5410));
    const uint32_t high = turned(__byte_perm(word[0], word[1], 0x7632));
    word[0] = __byte_perm(low, high, 0x5410);
    word[1] = __byte_perm(low, high, 0x7632);
    memcpy(pair, word, sizeof word);
  }
};

}  // namespace pyquant::cuda
