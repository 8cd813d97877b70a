// GEMM of many experts for mma.sync of int4 or int8 weights under 16-bit activations (experts.cuh says which block
// takes what): a tile is that of the kernel for one matrix (sm80_weight_only.cuh). Every sum runs over the whole of K
// in one order, whatever the tile, so that a row's result depends on nothing but the row and its expert. K is not
// divided: experts make tiles enough.
//   Rows of x need not be sorted: a thread asks a table once which ones it copies.
//   Operands of an expert are tensors of their own: four distances an expert, 16 KiB of parameters.
#pragma once
#include "cuda/gemm/experts.cuh"
#include "cuda/gemm/sm80_weight_only.cuh"

namespace pyquant::cuda {

struct WeightOnlyExperts80 {
  WeightOnlyOperands80 operands;
  EpilogueParams epilogue;
  Experts experts;  // its distances are those of the weights
  int64_t to_scale[kExpertsAtOnce], to_zero_point[kExpertsAtOnce], to_bias[kExpertsAtOnce];
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    gemm_weight_only_experts80_kernel(const __grid_constant__ WeightOnlyExperts80 q) {
  extern __shared__ __align__(128) uint8_t weight_only_experts80_shared[];
  const auto number = static_cast<int32_t>(blockIdx.x);
  const int32_t n0 = number % q.experts.tiles_n * T::kChannels;
  ExpertTile tile;
  if (!find_expert_tile<T::kTokens>(q.experts, number / q.experts.tiles_n, tile)) return;
  if (tile.expert == q.experts.count) return write_no_expert<T::kTokens, T::kChannels>(q.epilogue, tile, n0);
  WeightOnlyOperands80 o = q.operands;
  o.w += q.experts.shift[tile.expert];
  o.w_scale = shifted(o.w_scale, q.to_scale[tile.expert]);
  o.w_zero_point = shifted(o.w_zero_point, q.to_zero_point[tile.expert]);
  EpilogueParams p = q.epilogue;
  p.m = tile.end;
  WeightOnlyBlock80<T> block{o, p, shared_address(weight_only_experts80_shared)};
  block.start_addresses_at(tile.begin, n0);
  multiply_weight_only80(block, 0, o.k);
  const int64_t to_bias = q.to_bias[tile.expert];
  p.bias = shifted(p.bias, to_bias);
  if (to_bias % 8 != 0) p.plain = PlainOut::none;  // which reads it by twos
  store_warp80(block.sum, p, block.m0, block.n0);
}

template <template <class> class Math, int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK,
          int kStages>
struct GemmSm80WeightOnlyExperts : NoWorkspace {
  template <class Float>
  static void run_as(const GemmCall& call) {
    using Traits = WeightOnlyTraits80<Math<Float>, kTileM, kTileN, kTileK, kWarpM, kWarpN, kWarpK, kStages, true>;
    WeightOnlyExperts80 q{};
    q.operands = weight_only_operands80<typename Traits::Math>(call);
    q.epilogue = weight_only_epilogue80(call);
    q.operands.x_rows = call.operands.x_rows;
    if (q.operands.ldx_bytes > INT32_MAX)
      throw std::runtime_error(std::string(call.name) + ": rows of x are " + std::to_string(q.operands.ldx_bytes) +
                               " bytes apart; allowed: below 2^31");
    for_experts(call, kTileM, kTileN, [&](const Experts& experts, int64_t blocks) {
      q.experts = experts;
      int64_t* const tables[] = {q.to_scale, q.to_zero_point, q.to_bias};
      for (int i = 0; i < 3; ++i)
        std::copy_n(call.operands.expert_shifts + (i + 1) * call.problem.experts + experts.first, experts.count,
                    tables[i]);
      LaunchShape shape;
      shape.grid = dim3(static_cast<unsigned>(blocks));
      shape.block = dim3(Traits::kThreads);
      shape.shared_bytes = Traits::kSharedBytes;
      launch<gemm_weight_only_experts80_kernel<Traits>>(call.name, shape, call.context, q);
    });
  }

  static void run(const GemmCall& call) {
    call.problem.x == DType::f16 ? run_as<__half>(call) : run_as<__nv_bfloat16>(call);
  }
};

}  // namespace pyquant::cuda
