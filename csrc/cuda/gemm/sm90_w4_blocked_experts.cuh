// GEMM of many experts for Hopper, int4 weights in the layout blocked128 (experts90.cuh says which block takes what):
// the main loop and epilogue of the kernels for one matrix (sm90_w4_blocked.cuh), so that every row has the bits of its
// expert's own product.
//   partition: as sm90_w4_blocked.cuh; a tile is one expert's. K is not divided: experts make tiles enough.
//   limits: as sm90_w4_blocked.cuh, and K > 0; x, out and what is of a token lie in the order of the sorted rows.
#pragma once
#include "cuda/gemm/experts90.cuh"
#include "cuda/gemm/sm90_w4_blocked.cuh"

namespace pyquant::cuda {

// The main loop for one matrix, whose rows of x begin anywhere and whose weights lie at any place.
template <class Main>
struct ExpertMainBlocked90 : Main {
  using TileShape = typename Main::TileShape;
  struct Arguments : Main::Arguments {
    int64_t unit = 0;  // bytes from the weights at one place to the next
  };
  struct Params : Main::Params {
    int64_t unit;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape& problem, const Arguments& a, void* workspace) {
    return {Main::to_underlying_arguments(problem, a, workspace), a.unit};
  }

  // The main loop's tiles, and x as a whole.
  template <class Problem>
  CUTLASS_DEVICE auto load_init(const Problem& problem, const Params& params) const {
    const auto [n, m, k, l] = problem;
    const auto tiles = Main::load_init(problem, params);
    return cute::make_tuple(cute::get<0>(tiles), cute::get<1>(tiles),
                            params.tma_x.get_tma_tensor(cute::make_shape(m, k, l)));
  }

  template <class Inputs, class TileAt, class KTiles>
  CUTLASS_DEVICE void load(const Params& params, typename Main::MainloopPipeline pipeline,
                           typename Main::PipelineState state, const Inputs& inputs, const TileAt& at, KTiles k_tile,
                           int k_tile_count, int, uint32_t, typename Main::TensorStorage& storage) {
    const auto [channels, rows, unused, place] = at;
    const auto x = cute::get<2>(inputs);
    // Behind all rows are zeros.
    const int begin = rows.are_ownerless() ? static_cast<int>(cute::size<0>(x)) : rows.begin;
    const auto tiles = cute::local_tile(cute::domain_offset(cute::make_coord(begin, 0, 0), x), TileShape{},
                                        cute::make_coord(cute::_, cute::_, cute::_),
                                        cute::Step<cute::Underscore, cute::_1, cute::_1>{});
    Main::load_tile(params, params.w + params.unit * place, cute::size<3>(cute::get<0>(inputs)), channels,
                    tiles(cute::_, cute::_, 0, cute::_, 0), pipeline, state, k_tile, k_tile_count, storage);
  }
};

template <int M, int N, int K, int ClusterM, int ClusterN, class Schedule, bool kSteps = false>
struct GemmSm90W4BlockedExperts : NoWorkspace {
  using Plain = GemmSm90W4Blocked<M, N, K, ClusterM, ClusterN, Schedule, kSteps>;
  using Main = ExpertMainBlocked90<typename Plain::Main>;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Main,
                                           ExpertEpilogue90<int32_t, true, kSteps ? 0 : 4>, ExpertsTag90<true>>;

  static void run(const GemmCall& call) {
    launch_experts90<Kernel, true>(call, [&](const ExpertPlaces90& places) {
      typename Main::Arguments a;
      a.w = shifted(static_cast<const uint8_t*>(call.operands.w), places.least);
      a.x = static_cast<const int8_t*>(call.operands.x);
      a.stride_x = {call.problem.ldx, {}, 0};
      a.unit = places.unit;
      return a;
    });
  }
};

}  // namespace pyquant::cuda
