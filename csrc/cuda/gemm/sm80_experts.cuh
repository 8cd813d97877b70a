// GEMM of many experts for mma.sync (experts.cuh says which block takes what): the CUTLASS 2.x main loop and the
// epilogue of the kernels for one matrix (sm80.cuh), so that every row has the bits of its expert's own product.
//   partition: a block owns one tile of one expert. K is not divided: experts make tiles enough.
//   limits: as sm80.cuh; x, out and what is of a token lie in the order of the sorted rows.
#pragma once
#include "cuda/gemm/experts.cuh"
#include "cuda/gemm/sm80.cuh"

namespace pyquant::cuda {

// The epilogue of a tile whose first row is any row of the matrices.
struct ExpertEpilogue80 : EpilogueParams {
  int32_t first_row;
};

__device__ __forceinline__ int32_t row_of(const ExpertEpilogue80& p, int32_t m) { return p.first_row + m; }

template <class Types, class Tile, class Warp, int Stages>
struct GemmSm80Experts : NoWorkspace {
  using Plain = GemmSm80<Types, schedule80::multistage, Tile, Warp, Stages>;
  using Mma = typename Plain::Base::Mma;
  using Epilogue = PlainFirst80<
      cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<
          typename Plain::Base::Epilogue, OrderedEpilogue80<typename Plain::ThreadMap, ExpertEpilogue80>, 1, false>,
      Warp>;
  static constexpr int kTileM = Tile::kM, kTileN = Tile::kN, kTileK = Tile::kK;
  static constexpr int kThreads = 32 * Mma::WarpCount::kCount;

  union SharedStorage {
    typename Mma::SharedStorage main_loop;
    typename Epilogue::SharedStorage epilogue;
  };
  static_assert(sizeof(SharedStorage) == sizeof(typename Plain::Kernel::SharedStorage), "plan/accept.cpp counts so");

  struct Params {
    typename Mma::IteratorA::Params x_layout;
    typename Mma::IteratorB::Params w_layout;
    typename Mma::IteratorA::Pointer x;
    typename Mma::IteratorB::Pointer w;
    int32_t k;
    EpilogueParams epilogue;
    Experts experts;
  };

  static __device__ __forceinline__ void block(const Params& p, SharedStorage& shared) {
    const auto number = static_cast<int32_t>(blockIdx.x);
    const int32_t n0 = number % p.experts.tiles_n * kTileN, n = p.epilogue.n;
    ExpertTile tile;
    if (!find_expert_tile<kTileM>(p.experts, number / p.experts.tiles_n, tile)) return;
    if (tile.expert == p.experts.count) return write_no_expert<kTileM, kTileN>(p.epilogue, tile, n0);
    const int thread = static_cast<int>(threadIdx.x), warp = cutlass::canonical_warp_idx_sync(), lane = thread % 32;
    const auto* w = shifted(reinterpret_cast<const char*>(p.w), p.experts.shift[tile.expert]);
    typename Mma::IteratorA x_tiles(p.x_layout, p.x, {tile.end, p.k}, thread, {tile.begin, 0});
    typename Mma::IteratorB w_tiles(p.w_layout,
                                    reinterpret_cast<typename Mma::IteratorB::Pointer>(const_cast<char*>(w)), {p.k, n},
                                    thread, {0, n0});
    Mma multiply(shared.main_loop, thread, warp, lane);
    typename Mma::FragmentC sums;
    sums.clear();
    if (p.k > 0) multiply((p.k + kTileK - 1) / kTileK, sums, x_tiles, w_tiles, sums);  // CUTLASS knows no K of 0
    ExpertEpilogue80 finish{p.epilogue, tile.begin};
    take_expert(finish, p.experts, tile);
    Epilogue epilogue(finish, shared.epilogue, thread, warp, lane);
    epilogue(sums, {0, n0 / kTileN, 0}, cute::make_shape(tile.end, n, 1), thread);
  }

  static void run(const GemmCall& call);
};

template <class Gemm>
__global__ void __launch_bounds__(Gemm::kThreads)
    gemm_experts80_kernel(const __grid_constant__ typename Gemm::Params params) {
  extern __shared__ __align__(128) uint8_t experts80_shared[];
  Gemm::block(params, *reinterpret_cast<typename Gemm::SharedStorage*>(experts80_shared));
}

template <class Types, class Tile, class Warp, int Stages>
void GemmSm80Experts<Types, Tile, Warp, Stages>::run(const GemmCall& call) {
  const GemmProblem& p = call.problem;
  using PointerX = typename Mma::IteratorA::Pointer;
  using PointerW = typename Mma::IteratorB::Pointer;
  for_experts(call, kTileM, kTileN, [&](const Experts& experts, int64_t blocks) {
    const Params params{typename Mma::IteratorA::Layout(p.ldx),
                        typename Mma::IteratorB::Layout(p.ldw),
                        static_cast<PointerX>(const_cast<void*>(call.operands.x)),
                        static_cast<PointerW>(const_cast<void*>(call.operands.w)),
                        static_cast<int32_t>(p.k),
                        epilogue_params(call),
                        experts};
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(blocks));
    shape.block = dim3(kThreads);
    shape.shared_bytes = static_cast<int>(sizeof(SharedStorage));
    launch<gemm_experts80_kernel<GemmSm80Experts>>(call.name, shape, call.context, params);
  });
}

}  // namespace pyquant::cuda
