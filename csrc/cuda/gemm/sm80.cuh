// GEMM for mma.sync (sm_80 and every later chip, through PTX where no machine code is there): CUTLASS 2.x multistage
// main loop, epilogue of our own.
//   partition: a block owns tile_m x tile_n outputs, its warps tile K by cp.async through `Stages` shared buffers;
//   after the last k the accumulators pass through shared memory, 8 rows at a time, so that each thread holds eight
//   neighbouring columns of a row: 16-byte stores, one load of the channel operands per thread. Schedule `splitk`
//   divides K over blocks too (splitk80.cuh). limits: x and w rows on 16-byte boundaries and K a multiple of the codes
//   in 16 bytes (predication is per 16 bytes); any M, N, ldo, any output type (chosen at run time: an instance costs 10
//   CPU seconds), any residual.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>
// after the kernel: it relies on what that includes
#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/plain80.cuh"
#include "cuda/gemm/splitk80.cuh"
#include "cuda/launch.h"

namespace pyquant::cuda {

// What the CUTLASS 2.x kernels hand to their epilogue.
struct EpilogueParams80 : EpilogueParams {
  int32_t* workspace;  // null: K is not divided
};

// The row of the matrices that a row of a block's tiles is.
__device__ __forceinline__ int32_t row_of(const EpilogueParams80&, int32_t m) { return m; }

// The visitor tree is one leaf: it owns loads, arithmetic and stores of the thread's eight columns.
template <class ThreadMap, class Parameters = EpilogueParams80>
struct OrderedEpilogue80 {
  using Arguments = Parameters;
  using Params = Parameters;
  struct SharedStorage {};
  static constexpr int kWidth = ThreadMap::kElementsPerAccess;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(const ProblemShape&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(const ProblemShape&, const Arguments&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE OrderedEpilogue80() {}
  CUTLASS_HOST_DEVICE OrderedEpilogue80(const Params& params, const SharedStorage&) : params_(&params) {}

  template <class Coordinates>
  struct Callbacks : cutlass::epilogue::threadblock::detail::EmptyCallbacks {
    static constexpr int kColumns = decltype(cute::size<1>(Coordinates{}))::value;
    CUTLASS_DEVICE Callbacks(Coordinates coordinates, const Params* params) : at(coordinates), p(params) {}

    Coordinates at;  // (vector, column, row, iteration) -> (m, n, l)
    const Params* p;
    Channel channel[kColumns][kWidth];
    CodeLimits limits;

    CUTLASS_DEVICE void begin_epilogue() {
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kColumns; ++c) {
        load_channels(*p, cute::get<1>(at(0, c, 0, 0)), channel[c]);
      }
      limits = load_code_limits(*p);
    }

    template <class ElementAccumulator, int Count>
    CUTLASS_DEVICE auto visit(int iteration, int row, int column, int,
                              const cutlass::Array<ElementAccumulator, Count>& acc) {
      const auto coordinate = at(0, column, row, iteration);
      const int32_t m = row_of(*p, cute::get<0>(coordinate)), n = cute::get<1>(coordinate);
      ElementAccumulator raw[Count];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Count; ++i) raw[i] = acc[i];
      finish_row(raw, channel[column], load_token(*p, m), limits, *p, m, n);
      return acc;
    }
  };

  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord tile, int thread, ProblemShape shape) {
    auto at = cute::group_modes<3, 6>(ThreadMap::partition(cute::make_identity_tensor(shape), thread, tile));
    return Callbacks<decltype(at)>(at, params_);
  }

  const Params* params_ = nullptr;
};

// Tiles that plain80.cuh can store go there, from registers; all others through Epilogue and shared memory.
template <class Epilogue, class Warp>
class PlainFirst80 : public Epilogue {
 public:
  using Params = typename Epilogue::Params;
  using Sums = typename Epilogue::AccumulatorTile;
  using Tile = typename Epilogue::Shape;
  // With more sums a thread ptxas has no register left for it and spills.
  static constexpr bool kHasRoom = Sums::kElements <= 128;
  static constexpr int kParts = Epilogue::kPartitionsK;  // of each step of K, a warp's each
  static constexpr int kThreads = 32 * (Tile::kM / Warp::kM) * (Tile::kN / Warp::kN) * kParts;

  CUTLASS_DEVICE PlainFirst80(const Params& params, typename Epilogue::SharedStorage& shared, int thread, int warp,
                              int lane)
      : Epilogue(params, shared, thread, warp, lane), params_(params), shared_(&shared), warp_(warp) {}

  template <class ProblemShape>
  CUTLASS_DEVICE void operator()(const Sums& sums, cutlass::gemm::GemmCoord tile, ProblemShape shape, int thread) {
    if constexpr (kHasRoom) {
      const bool is_plain = params_.plain != PlainOut::none && (tile.n() + 1) * Tile::kN <= params_.n;
      if (is_plain && store_plain(sums, tile, thread)) return;
    }
    Epilogue::operator()(sums, tile, shape, thread);
  }

 private:
  static constexpr int kTall = Warp::kM / 16, kWarpsM = Tile::kM / Warp::kM, kWarps = kThreads / 32 / kParts;

  CUTLASS_DEVICE bool store_plain(const Sums& sums, cutlass::gemm::GemmCoord tile, int thread) const {
    const int32_t m0 = row_of(params_, tile.m() * Tile::kM + warp_ % kWarpsM * Warp::kM);
    const int32_t n0 = tile.n() * Tile::kN + warp_ % kWarps / kWarpsM * Warp::kN;
    // CUTLASS keeps the products of 16 x 8 column by column.
    const auto at = [](int r, int j, int i) { return 4 * (j * kTall + r / 2) + 2 * (r % 2) + i; };
    if constexpr (kParts == 1) {
      Sums own = sums;
      return store_plain80<2 * kTall, Warp::kN / 32>(params_, m0, n0,
                                                     [&](int r, int j, int i) -> auto& { return own[at(r, j, i)]; });
    } else {  // two warps have sums of one tile: each takes the half of its columns
      static_assert(kParts == 2 && Warp::kN == 64, "halves of 32 columns");
      cutlass::Array<typename Sums::Element, Sums::kElements / 2> half;
      const bool upper = warp_ >= kWarps;
      add_parts(half, sums, upper, thread);
      return store_plain80<2 * kTall, 1>(params_, m0, n0 + (upper ? 32 : 0),
                                         [&](int r, int j, int i) -> auto& { return half[at(r, j, i)]; });
    }
  }

  // half = this warp's half of the columns, of both parts. The other half goes through the buffers of the main loop.
  template <class Half>
  CUTLASS_DEVICE void add_parts(Half& half, const Sums& sums, bool upper, int thread) const {
    using Sum = typename Sums::Element;
    struct alignas(16) Piece {
      Sum sum[4];
    };
    Piece* pieces = reinterpret_cast<Piece*>(shared_);
    const auto exchange = [&](int own, int given) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Half::kElements; i += 4) {
        const Piece piece{sums[given + i], sums[given + i + 1], sums[given + i + 2], sums[given + i + 3]};
        pieces[i / 4 * kThreads + thread] = piece;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Half::kElements; ++i) half[i] = sums[own + i];
    };
    __syncthreads();
    if (upper)
      exchange(Half::kElements, 0);
    else
      exchange(0, Half::kElements);
    __syncthreads();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Half::kElements; i += 4) {
      const Piece piece = pieces[i / 4 * kThreads + (thread ^ (kThreads / 2))];
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < 4; ++c) half[i + c] = half[i + c] + piece.sum[c];
    }
  }

  const Params& params_;
  typename Epilogue::SharedStorage* shared_;
  int warp_;
};

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
    const int32_t tiles_m = (cute::get<0>(shape) + Epilogue::Shape::kM - 1) / Epilogue::Shape::kM;
    const int32_t tiles_n = (cute::get<1>(shape) + Epilogue::Shape::kN - 1) / Epilogue::Shape::kN;
    if (gridDim.z > 1 && !add_shares80<Accumulators::kElements, Epilogue::kThreads>(
                             total, workspace_, int64_t{tile.n()} * tiles_m + tile.m(), int64_t{tiles_m} * tiles_n))
      return;
    Epilogue::operator()(total, tile, shape, thread);
  }

 private:
  int32_t* workspace_;
};

template <int M, int N, int K>
using Shape80 = cutlass::gemm::GemmShape<M, N, K>;

// Operands of a family. The instruction's K is 32 bytes of the wider operand.
template <class Left, class Right, class Accumulator, class Multiply, int Depth>
struct Types80 {
  using X = Left;
  using W = Right;
  using Acc = Accumulator;
  using Operator = Multiply;
  using Instruction = Shape80<16, 8, Depth>;
};
// Saturating is what CUTLASS has for integers; the bound of K leaves nothing to saturate.
using Sm80S8S8 = Types80<int8_t, int8_t, int32_t, cutlass::arch::OpMultiplyAddSaturate, 32>;
using Sm80U8S8 = Types80<uint8_t, int8_t, int32_t, cutlass::arch::OpMultiplyAddSaturate, 32>;
using Sm80S8S4 = Types80<int8_t, cutlass::int4b_t, int32_t, cutlass::arch::OpMultiplyAddMixedInputUpcast, 32>;
using Sm80S4S4 = Types80<cutlass::int4b_t, cutlass::int4b_t, int32_t, cutlass::arch::OpMultiplyAddSaturate, 64>;
using Sm80F16 = Types80<cutlass::half_t, cutlass::half_t, float, cutlass::arch::OpMultiplyAdd, 16>;
using Sm80Bf16 = Types80<cutlass::bfloat16_t, cutlass::bfloat16_t, float, cutlass::arch::OpMultiplyAdd, 16>;

// What a row's schedule makes of the epilogue.
namespace schedule80 {
struct multistage {
  static constexpr bool kSplit = false;
  template <class Epilogue>
  using Wrapped = Epilogue;
};
struct splitk {
  static constexpr bool kSplit = true;
  template <class Epilogue>
  using Wrapped = SplitEpilogue80<Epilogue>;
};
}  // namespace schedule80

template <class Types, class Schedule, class Tile, class Warp, int Stages>
struct GemmSm80 {
  using X = typename Types::X;
  using W = typename Types::W;
  using Acc = typename Types::Acc;
  // half with eight per access: the thread map that gives every thread eight columns, whatever is stored.
  using Out = cutlass::half_t;
  static constexpr int kWidth = 8;
  template <class Element>
  static constexpr int kBits = cutlass::sizeof_bits<Element>::value;
  using ThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, Warp, Out, kWidth, 1>;
  using Callbacks = OrderedEpilogue80<ThreadMap>;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
  // kZfill: rows beyond M and N are zeros in shared memory, not leftovers, so that every accumulator is defined.
  using Base = typename cutlass::gemm::kernel::DefaultGemmUniversal<
      X, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, 128 / kBits<X>, W, cutlass::layout::ColumnMajor,
      cutlass::ComplexTransform::kNone, 128 / kBits<W>, Out, cutlass::layout::RowMajor, Acc,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Tile, Warp, typename Types::Instruction,
      cutlass::epilogue::thread::LinearCombination<Out, kWidth, Acc, float>, Swizzle, Stages, typename Types::Operator,
      cutlass::gemm::SharedMemoryClearOption::kZfill>::GemmKernel;
  // Not unrolled over its iterations: the activations would be there once per iteration.
  using Epilogue = typename Schedule::template Wrapped<PlainFirst80<
      cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<typename Base::Epilogue, Callbacks, 1, false>,
      Warp>>;
  using Kernel = cutlass::gemm::kernel::GemmWithEpilogueVisitor<typename Base::Mma, Epilogue, Swizzle>;
  static_assert(sizeof(typename Kernel::SharedStorage) ==
                    Stages * Tile::kK * (Tile::kM * kBits<X> + Tile::kN * kBits<W>) / 8,
                "plan/accept.cpp counts so");
  using Shares = SplitK80<Tile::kM, Tile::kN, Tile::kK, Kernel::Mma::FragmentC::kElements, Kernel::kThreadCount>;
  static_assert(!Schedule::kSplit || std::is_same_v<Acc, int32_t>, "the order of float sums is the result");

  static Workspace workspace(const GemmCall& call) {
    if constexpr (Schedule::kSplit) return Shares(call).workspace();
    return {};
  }

  static void run(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    const cutlass::gemm::GemmCoord size(static_cast<int>(p.m), static_cast<int>(p.n), static_cast<int>(p.k));
    const EpilogueParams80 epilogue{epilogue_params(call), static_cast<int32_t*>(call.operands.workspace)};
    const typename Kernel::Arguments arguments(cutlass::gemm::GemmUniversalMode::kGemm, size, 1, epilogue,
                                               call.operands.x, call.operands.w, nullptr, nullptr, p.m * p.ldx,
                                               p.n * p.ldw, 0, 0, p.ldx, p.ldw, 0, 0);
    typename Kernel::Params params(arguments, call.device.sm_count, 1);
    if constexpr (Schedule::kSplit) {
      const Shares split(call);
      params.grid_tiled_shape.k() = static_cast<int>(split.splits);
      params.gemm_k_size = static_cast<int>(split.codes);
    }
    LaunchShape shape;
    shape.grid = params.get_grid_dims();
    shape.block = dim3(Kernel::kThreadCount);
    shape.shared_bytes = static_cast<int>(sizeof(typename Kernel::SharedStorage));
    launch<cutlass::Kernel2<Kernel>>(call.name, shape, call.context, params);
  }
};

}  // namespace pyquant::cuda
