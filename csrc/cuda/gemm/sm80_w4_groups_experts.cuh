// GEMM of many experts for mma.sync with group scales (experts.cuh says which block takes what): a tile is that of the
// kernel for one matrix (sm80_w4_groups.cuh), so that every row has the bits of its expert's own product.
#pragma once
#include "cuda/gemm/experts.cuh"
#include "cuda/gemm/sm80_w4_groups.cuh"

namespace pyquant::cuda {

struct GroupsExperts80 {
  GroupsOperands80 operands;
  EpilogueParams epilogue;
  Experts experts;
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    gemm_groups_experts80_kernel(const __grid_constant__ GroupsExperts80 q) {
  extern __shared__ __align__(128) uint8_t groups_experts80_shared[];
  const auto number = static_cast<int32_t>(blockIdx.x);
  const int32_t n0 = number % q.experts.tiles_n * T::kChannels;
  ExpertTile tile;
  if (!find_expert_tile<T::kTokens>(q.experts, number / q.experts.tiles_n, tile)) return;
  if (tile.expert == q.experts.count) return write_no_expert<T::kTokens, T::kChannels>(q.epilogue, tile, n0);
  const int64_t shift = q.experts.shift[tile.expert];
  GroupsOperands80 o = q.operands;
  o.w += shift;
  o.w_scale = shifted(o.w_scale, shift);
  o.w_sum = shifted(o.w_sum, shift);
  if (q.epilogue.x_zero_point_step == 0) o.x_zero_point = shifted(o.x_zero_point, shift);
  EpilogueParams p = q.epilogue;
  take_expert(p, q.experts, tile);
  GroupsBlock80<T> block{o, p, shared_address(groups_experts80_shared)};
  block.start_addresses_at(tile.begin, n0);
  multiply_groups80(block);
}

template <int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK, int kStages>
struct GemmSm80W4GroupsExperts : NoWorkspace {
  using Plain = GemmSm80W4Groups<kTileM, kTileN, kTileK, kWarpM, kWarpN, kWarpK, kStages>;
  using Traits = typename Plain::Traits;

  static void run(const GemmCall& call) {
    for_experts(call, kTileM, kTileN, [&](const Experts& experts, int64_t blocks) {
      const GroupsExperts80 q{Plain::operands(call), Plain::epilogue(call), experts};
      LaunchShape shape;
      shape.grid = dim3(static_cast<unsigned>(blocks));
      shape.block = dim3(Traits::kThreads);
      shape.shared_bytes = Traits::kSharedBytes;
      launch<gemm_groups_experts80_kernel<Traits>>(call.name, shape, call.context, q);
    });
  }
};

}  // namespace pyquant::cuda
