// GEMM for mma.sync of int4 weights whose groups have whole-number steps (docs/numerics.md 4.1), weights and steps as
// in a checkpoint, 8-bit activations: the loads and fragments of the kernel for group scales (sm80_w4_groups.cuh),
// whose words are multiplied by their step on the way (steps.cuh). One integer sum runs over all of K.
//   partition, codes: as there. A lane has the steps of its four channels, those of the next group meanwhile.
//   limits: rows of x and w on 16-byte boundaries, a multiple of 32 codes that share a step. Any M, N, output,
//   residual.
#pragma once
#include "core/steps.h"
#include "cuda/gemm/sm80_w4_groups.cuh"
#include "cuda/gemm/steps.cuh"

namespace pyquant::cuda {

template <class T>
struct StepsBlock80 : GroupsBlock80<T> {
  Step step[T::kColumns];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < 4 * T::kRows * T::kColumns; ++i) this->acc[i / 4 / T::kColumns][i / 4 % T::kColumns][i % 4] = 0;
  }

  // Of channels g, 8 + g, 16 + g and 24 + g of the warp in a group, a byte each; nothing beyond N and the last group.
  __device__ __forceinline__ uint32_t load(const uint8_t* steps, int32_t group) const {
    if (this->n0 >= this->p.n || group >= this->o.groups) return 0;
    const uint8_t* row = steps + static_cast<int64_t>(group) * step_row(this->p.n) + this->n0;
    return __ldg(reinterpret_cast<const uint32_t*>(row) + this->g);
  }

  __device__ __forceinline__ void take(uint32_t word) {
#pragma unroll
    for (int j = 0; j < T::kColumns; ++j) step[j] = step_of(word, j);
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    gemm_steps80_kernel(const GroupsOperands80 o, const EpilogueParams p, const uint8_t* steps) {
  extern __shared__ __align__(128) uint8_t steps80_shared[];
  StepsBlock80<T> block{{o, p, shared_address(steps80_shared)}};
  block.start_addresses();
#pragma unroll
  for (int s = 0; s < T::kStages - 1; ++s) block.fetch();
  block.begin();
  block.take(block.load(steps, 0));
  uint32_t next = block.load(steps, 1);
  int32_t step = 0, group = 1,
          left = o.group_codes;  // of the stage; the group whose steps are `next`; codes of this one
  GroupsCodes80<T> codes;
  block.enter_stage();
  block.read(codes, step);
#pragma unroll 1
  for (int32_t k = 0; k < o.k; k += T::kStepCodes) {
    const auto widen = [&](uint32_t word, int j, uint32_t (&bytes)[2]) {
      bytes[0] = times_step(word, block.step[j]);
      bytes[1] = times_step(word >> 4, block.step[j]);
    };
    block.multiply(codes, widen, [&] { block.read_next(codes, step); });
    left -= T::kStepCodes;
    if (left == 0) {
      block.take(next);
      next = block.load(steps, ++group);
      left = o.group_codes;
    }
  }
  wait_for_copies<0>();
  store_warp80(block.acc, p, block.m0, block.n0);
}

template <int kTileM, int kTileN, int kTileK, int kWarpM, int kWarpN, int kWarpK, int kStages>
struct GemmSm80W4Steps : NoWorkspace {
  using Traits = GroupsTraits80<kTileM, kTileN, kTileK, kWarpM, kWarpN, kWarpK, kStages>;

  static void run(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    GroupsOperands80 o{};
    o.x = static_cast<const uint8_t*>(call.operands.x);
    o.w = static_cast<const uint8_t*>(call.operands.w);
    o.ldx_bytes = p.ldx;
    o.ldw_bytes = p.ldw / 2;
    o.k = static_cast<int32_t>(p.k);
    o.group_codes = static_cast<int32_t>(p.step_size);
    o.groups = o.k / o.group_codes;
    o.tiles_m = static_cast<int32_t>((p.m + kTileM - 1) / kTileM);
    o.tiles_n = static_cast<int32_t>((p.n + kTileN - 1) / kTileN);
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(o.tiles_m) * static_cast<unsigned>(o.tiles_n));
    shape.block = dim3(Traits::kThreads);
    shape.shared_bytes = Traits::kSharedBytes;
    launch<gemm_steps80_kernel<Traits>>(call.name, shape, call.context, o, epilogue_params(call), call.operands.w_step);
  }
};

}  // namespace pyquant::cuda
