// GEMM of many experts for Hopper (experts90.cuh says which block takes what): the CUTLASS 3.x main loop and the
// epilogue of the kernels for one matrix (sm90.cuh), so that every row has the bits of its expert's own product.
//   partition: as sm90.cuh; a tile is one expert's. K is not divided: experts make tiles enough.
//   limits: as sm90.cuh, and K > 0; x, out and what is of a token lie in the order of the sorted rows.
#pragma once
#include "cuda/gemm/experts90.cuh"
#include "cuda/gemm/sm90.cuh"

namespace pyquant::cuda {

// CUTLASS's main loop, whose rows of x begin anywhere and whose weights lie at any place.
template <class Main, bool kSwapped>
struct ExpertMain90 : Main {
  using Params = typename Main::Params;
  using TileShape = typename Main::TileShape;
  using ClusterShape = typename Main::DispatchPolicy::ClusterShape;
  using Element = typename Main::ElementA;
  struct Arguments {
    const Element *x = nullptr, *w = nullptr;
    int64_t ldx = 0, ldw = 0, unit = 0;
    int32_t places = 0;
  };

  template <class ProblemShape>
  static Params to_underlying_arguments(const ProblemShape& problem, const Arguments& a, void*) {
    const auto [rows, columns, depth, one] = problem;
    using Stored = cute::uint_bit_t<cute::sizeof_bits_v<Element>>;
    const auto given = [&](bool is_x, int count) {
      const auto shape = cute::make_shape(count, depth, is_x ? 1 : a.places);
      const auto stride = cute::make_stride(is_x ? a.ldx : a.ldw, cute::_1{}, is_x ? int64_t{0} : a.unit);
      return cute::make_tensor(reinterpret_cast<const Stored*>(is_x ? a.x : a.w), cute::make_layout(shape, stride));
    };
    const auto stage = cute::make_coord(cute::_, cute::_, cute::Int<0>{});
    return {cute::make_tma_copy_A_sm90(typename Main::GmemTiledCopyA{}, given(!kSwapped, rows),
                                       typename Main::SmemLayoutA{}(stage), TileShape{}, ClusterShape{}),
            cute::make_tma_copy_B_sm90(typename Main::GmemTiledCopyB{}, given(kSwapped, columns),
                                       typename Main::SmemLayoutB{}(stage), TileShape{}, ClusterShape{})};
  }

  // CUTLASS's tiles, whose numbers the kernel reads, and the operands as a whole.
  template <class Problem>
  CUTLASS_DEVICE auto load_init(const Problem& problem, const Params& params) const {
    const auto [rows, columns, depth, one] = problem;
    const auto tiles = Main::load_init(problem, params);
    return cute::make_tuple(cute::get<0>(tiles), cute::get<1>(tiles),
                            params.tma_load_a.get_tma_tensor(cute::make_shape(rows, depth, one)),
                            params.tma_load_b.get_tma_tensor(cute::make_shape(columns, depth, one)));
  }

  template <class Inputs, class TileAt, class KTiles>
  CUTLASS_DEVICE void load(const Params& params, typename Main::MainloopPipeline pipeline,
                           typename Main::PipelineState state, const Inputs& inputs, const TileAt& at, KTiles k_tile,
                           int k_tile_count, int thread, uint32_t rank, typename Main::TensorStorage& storage) {
    constexpr int kRows = kSwapped ? 1 : 0;
    const auto every = cute::make_coord(cute::_, cute::_, cute::_);
    const ExpertRows90& rows = cute::get<kRows>(at);
    const int all = cute::size<0>(cute::get<2 + kRows>(inputs));
    const auto of_x = cute::make_coord(rows.are_ownerless() ? all : rows.begin, 0, 0);  // behind all rows are zeros
    const auto of_w = cute::make_coord(0, 0, cute::get<3>(at));
    const auto left = cute::domain_offset(kSwapped ? of_w : of_x, cute::get<2>(inputs));
    const auto right = cute::domain_offset(kSwapped ? of_x : of_w, cute::get<3>(inputs));
    const auto tiles = cute::make_tuple(
        cute::local_tile(left, TileShape{}, every, cute::Step<cute::_1, cute::Underscore, cute::_1>{}),
        cute::local_tile(right, TileShape{}, every, cute::Step<cute::Underscore, cute::_1, cute::_1>{}));
    const int32_t channels = cute::get<1 - kRows>(at);
    Main::load(params, pipeline, state, tiles,
               cute::make_coord(kSwapped ? channels : 0, kSwapped ? 0 : channels, cute::_, 0), k_tile, k_tile_count,
               thread, rank, storage);
  }
};

template <class Types, int M, int N, int K, int ClusterM, int ClusterN, class Schedule>
struct GemmSm90Experts : NoWorkspace {
  using Plain = GemmSm90<Types, M, N, K, ClusterM, ClusterN, Schedule>;
  static constexpr bool kSwapped = Plain::kSwapped;
  using Main = ExpertMain90<typename Plain::Main, kSwapped>;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Main,
                                           ExpertEpilogue90<typename Plain::Acc, kSwapped>, ExpertsTag90<kSwapped>>;

  static void run(const GemmCall& call) {
    using Element = typename Plain::Element;
    const GemmProblem& p = call.problem;
    launch_experts90<Kernel, kSwapped>(call, [&](const ExpertPlaces90& places) {
      return typename Main::Arguments{static_cast<const Element*>(call.operands.x),
                                      shifted(static_cast<const Element*>(call.operands.w), places.least),
                                      p.ldx,
                                      p.ldw,
                                      places.unit / static_cast<int64_t>(sizeof(Element)),
                                      static_cast<int32_t>(places.count)};
    });
  }
};

}  // namespace pyquant::cuda
