// What the kernels for mma.sync of our own share: which tile a block takes, and how a warp stores its 32 channels.
#pragma once
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/plain80.cuh"
#include "cuda/gemm/transpose.cuh"

namespace pyquant::cuda {

// First token and channel of the tile of this block. Blocks go through eight rows of tiles, column by column, then the
// next eight, so that those that run together share activations and weights in L2.
template <int kTokens, int kChannels>
__device__ __forceinline__ void tile_of_block80(int32_t tiles_m, int32_t tiles_n, int32_t& m0, int32_t& n0) {
  constexpr int32_t kBand = 8;
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  const int32_t band = block / (kBand * tiles_n) * kBand, width = min(kBand, tiles_m - band);
  const int32_t at = block - band * tiles_n;
  m0 = (band + at % width) * kTokens, n0 = at / width * kChannels;
}

// The sums of a warp, 16 kRows tokens from m0 on x 32 channels from n0 on, a row of 32 at a time: a lane of a quad
// takes eight of them. The loop is not unrolled, for the epilogue would be there once per row: the sums move up
// instead.
template <class Sum, int kRows>
__device__ __forceinline__ void store_rows80(Sum (&sum)[kRows][4][4], const EpilogueParams& p, int32_t m0, int32_t n0) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, n = n0 + 8 * (lane % 4);
  Channel channel[8];
  load_channels(p, n, channel);
  const CodeLimits limits = load_code_limits(p);
#pragma unroll 1
  for (int32_t i = 0; i < 2 * kRows; ++i) {
    const int32_t m = m0 + 8 * i + lane / 4;
    Sum pair[4][2], row[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) pair[j / 2][j % 2] = sum[0][j / 2][j % 2];
    transpose_quad(pair, row);
    finish_row(row, channel, load_token(p, m), limits, p, m, n);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum[r][j / 2][j % 2] = sum[r][j / 2][2 + j % 2];
        if (r + 1 < kRows) sum[r][j / 2][2 + j % 2] = sum[r + 1][j / 2][j % 2];
      }
    }
  }
}

// The same by straight-line code where that is enough (plain80.cuh).
template <class Sum, int kRows>
__device__ __forceinline__ void store_warp80(Sum (&sum)[kRows][4][4], const EpilogueParams& p, int32_t m0, int32_t n0) {
  const auto sum_of = [&](int r, int j, int i) -> auto& { return sum[r / 2][j][2 * (r % 2) + i]; };
  if (p.plain != PlainOut::none && n0 + 32 <= p.n && store_plain80<2 * kRows, 1>(p, m0, n0, sum_of)) return;
  store_rows80(sum, p, m0, n0);
}

}  // namespace pyquant::cuda
