// A divided K for the CUTLASS 2.x kernels: grid.z blocks share an output tile when tiles alone do not fill the device
// (few tokens, narrow N). Integer sums commute, so that the result has the same bits whatever the order; float families
// have no such schedule.
//   partition: every block adds its accumulators to the tile's sums in the workspace (red.global.add.s32, one
//   coalesced line per register and warp) and draws a ticket; the block with the last ticket reads the sums and runs
//   the epilogue. No block waits for another, so that any order of blocks is right. workspace: [tiles] tickets, padded
//   to 256 bytes, then [tiles][registers][threads] sums; cleared before the launch.
#pragma once
#include <cutlass/cutlass.h>
#include <cutlass/gemm_coord.h>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/launch.h"
#include "plan/split_k.h"

namespace pyquant::cuda {

// What the CUTLASS 2.x kernels hand to their epilogue.
struct EpilogueParams80 : EpilogueParams {
  int32_t* workspace;  // null: K is not divided
};

constexpr int64_t ticket_words80(int64_t tiles) { return ceil_div(tiles, 64) * 64; }

// The epilogue of a block that may have summed only a share of K.
template <class Epilogue>
class SplitEpilogue80 : public Epilogue {
 public:
  using Params = typename Epilogue::Params;
  using Accumulators = typename Epilogue::AccumulatorTile;

  CUTLASS_DEVICE SplitEpilogue80(const Params& params, typename Epilogue::SharedStorage& shared, int thread, int warp,
                                 int lane)
      : Epilogue(params, shared, thread, warp, lane), workspace_(params.workspace) {}

  template <class ProblemShape>
  CUTLASS_DEVICE void operator()(const Accumulators& share, cutlass::gemm::GemmCoord tile, ProblemShape shape,
                                 int thread) {
    // One call of the epilogue for both cases: two would be inlined twice and cost registers.
    Accumulators total = share;
    if (gridDim.z > 1 && !add_shares(total, tile, shape, thread)) return;
    Epilogue::operator()(total, tile, shape, thread);
  }

 private:
  // A share becomes the sum; false: another block's task.
  template <class ProblemShape>
  CUTLASS_DEVICE bool add_shares(Accumulators& total, cutlass::gemm::GemmCoord tile, ProblemShape shape, int thread) {
    const int32_t tiles_m = (cute::get<0>(shape) + Epilogue::Shape::kM - 1) / Epilogue::Shape::kM;
    const int32_t tiles_n = (cute::get<1>(shape) + Epilogue::Shape::kN - 1) / Epilogue::Shape::kN;
    const int64_t index = int64_t{tile.n()} * tiles_m + tile.m();
    int32_t* sums =
        workspace_ + ticket_words80(int64_t{tiles_m} * tiles_n) + index * Accumulators::kElements * blockDim.x + thread;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Accumulators::kElements; ++i) atomicAdd(sums + i * blockDim.x, total[i]);
    __threadfence();  // this thread's sums before the block's ticket
    __syncthreads();
    const bool last = thread == 0 && atomicAdd(workspace_ + index, 1) + 1 == static_cast<int32_t>(gridDim.z);
    if (!__syncthreads_or(last)) return false;
    __threadfence();  // the others' tickets before their sums
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Accumulators::kElements; ++i) total[i] = __ldcg(sums + i * blockDim.x);
    return true;
  }

  int32_t* workspace_;
};

// How a launch of Kernel divides K.
template <class Kernel>
struct SplitK80 {
  using Shape = typename Kernel::ThreadblockShape;

  explicit SplitK80(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    splits = k_splits(p.m, p.n, p.k, Shape::kM, Shape::kN, Shape::kK, call.device.sm_count);
    codes = ceil_div(ceil_div(p.k, Shape::kK), splits) * Shape::kK;
    tiles = ceil_div(p.m, Shape::kM) * ceil_div(p.n, Shape::kN);
  }
  Workspace workspace() const {
    constexpr int64_t kTileWords = int64_t{Kernel::Mma::FragmentC::kElements} * Kernel::kThreadCount;
    const int64_t bytes = splits == 1 ? 0 : 4 * (ticket_words80(tiles) + tiles * kTileWords);
    return {bytes, 0, bytes};
  }

  int64_t splits, codes, tiles;  // blocks of a tile, K of a block but the last
};

}  // namespace pyquant::cuda
