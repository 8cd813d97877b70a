// A divided K for the mma.sync kernels of integers: grid.z blocks share an output tile when tiles alone do not fill the
// device (few tokens, narrow N). Integer sums commute, so that the result has the same bits whatever the order; float
// families have no such schedule.
//   partition: every block adds its accumulators to the tile's sums in the workspace (red.global.add.s32, one
//   coalesced line per register and warp) and draws a ticket; the block with the last ticket reads the sums and runs
//   the epilogue. No block waits for another, so that any order of blocks is right. workspace: [tiles] tickets, padded
//   to 256 bytes, then [tiles][registers][threads] sums; cleared before the launch.
#pragma once
#include "cuda/gemm/call.h"
#include "plan/split_k.h"

namespace pyquant::cuda {

constexpr int64_t ticket_words80(int64_t tiles) { return ceil_div(tiles, 64) * 64; }

// Adds a thread's sums of this block's share of K to those of its tile, number `tile` of `tiles`. True in the block
// that comes last, whose `total` then holds the sums of all shares; false: another block's task.
template <int kSums, int kThreads, class Total>
__device__ __forceinline__ bool add_shares80(Total&& total, int32_t* workspace, int64_t tile, int64_t tiles) {
  const int thread = static_cast<int>(threadIdx.x);
  int32_t* sums = workspace + ticket_words80(tiles) + tile * kSums * kThreads + thread;
#pragma unroll
  for (int i = 0; i < kSums; ++i) atomicAdd(sums + i * kThreads, total[i]);
  __threadfence();  // this thread's sums before the block's ticket
  __syncthreads();
  const bool last = thread == 0 && atomicAdd(workspace + tile, 1) + 1 == static_cast<int32_t>(gridDim.z);
  if (!__syncthreads_or(last)) return false;
  __threadfence();  // the others' tickets before their sums
#pragma unroll
  for (int i = 0; i < kSums; ++i) total[i] = __ldcg(sums + i * kThreads);
  return true;
}

// How a launch divides K: tiles, and sums and threads of a block.
template <int kTileM, int kTileN, int kTileK, int kSums, int kThreads>
struct SplitK80 {
  explicit SplitK80(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    splits = k_splits(p.m, p.n, p.k, kTileM, kTileN, kTileK, call.device.sm_count);
    codes = ceil_div(ceil_div(p.k, kTileK), splits) * kTileK;
    tiles = ceil_div(p.m, kTileM) * ceil_div(p.n, kTileN);
  }
  Workspace workspace() const {
    const int64_t bytes = splits == 1 ? 0 : 4 * (ticket_words80(tiles) + tiles * kSums * kThreads);
    return {bytes, 0, bytes};
  }

  int64_t splits, codes, tiles;  // blocks of a tile, K of a block but the last
};

}  // namespace pyquant::cuda
