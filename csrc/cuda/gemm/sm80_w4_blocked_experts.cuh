// GEMM of many experts for mma.sync of int4 weights in the layout blocked128 (experts.cuh says which block takes what):
// a tile is that of the kernel for one matrix (sm80_w4_blocked.cuh), so that every row has the bits of its expert's own
// product. K is not divided: experts make tiles enough.
#pragma once
#include "cuda/gemm/experts.cuh"
#include "cuda/gemm/sm80_w4_blocked.cuh"

namespace pyquant::cuda {

struct BlockedExperts80 {
  BlockedOperands80 operands;
  EpilogueParams epilogue;
  Experts experts;
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    gemm_blocked_experts80_kernel(const __grid_constant__ BlockedExperts80 q) {
  extern __shared__ __align__(128) uint8_t blocked_experts80_shared[];
  const auto number = static_cast<int32_t>(blockIdx.x);
  const int32_t n0 = number % q.experts.tiles_n * T::kChannels;
  ExpertTile tile;
  if (!find_expert_tile<T::kTokens>(q.experts, number / q.experts.tiles_n, tile)) return;
  if (tile.expert == q.experts.count) return write_no_expert<T::kTokens, T::kChannels>(q.epilogue, tile, n0);
  // The epilogue asks for it again: the products leave no register for what is not theirs.
  __shared__ struct {
    ExpertTile tile;
    int32_t n0;
  } kept;
  if (threadIdx.x == 0) kept = {tile, n0};
  BlockedOperands80 o = q.operands;
  o.w += q.experts.shift[tile.expert];
  EpilogueParams p = q.epilogue;
  p.m = tile.end;
  BlockedBlock80<T> block{o, p, shared_address(blocked_experts80_shared)};
  block.start_at(tile.begin, n0, 0);
  block.multiply_all();
  take_expert(p, q.experts, kept.tile);  // after many a barrier
  block.place(kept.tile.begin, kept.n0);
  block.store();
}

template <int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK, int kStages>
struct GemmSm80W4BlockedExperts : NoWorkspace {
  using Plain = GemmSm80W4Blocked<kTileM, kTileN, kTileK, kWarpM, kWarpN, kWarpK, kStages>;
  using Traits = typename Plain::Traits;

  static void run(const GemmCall& call) {
    for_experts(call, kTileM, kTileN, [&](const Experts& experts, int64_t blocks) {
      const BlockedExperts80 q{Plain::operands(call), epilogue_params(call), experts};
      LaunchShape shape;
      shape.grid = dim3(static_cast<unsigned>(blocks));
      shape.block = dim3(Traits::kThreads);
      shape.shared_bytes = Traits::kSharedBytes;
      launch<gemm_blocked_experts80_kernel<Traits>>(call.name, shape, call.context, q);
    });
  }
};

}  // namespace pyquant::cuda
