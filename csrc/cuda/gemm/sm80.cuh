// int8 GEMM for mma.sync (sm_80 and every later chip, through PTX where no machine code is there): CUTLASS 2.x
// multistage main loop, epilogue of our own.
//   partition: a block owns tile_m x tile_n outputs, its warps tile K by cp.async through `Stages` shared buffers;
//   after the last k the accumulators pass through shared memory, 8 rows at a time, so that each thread holds eight
//   neighbouring columns of a row: 16-byte stores, one load of the channel operands per thread.
//   limits: x and w rows on 16-byte boundaries and K a multiple of 16 (predication is per 16 codes); any M, N, ldo,
//   any output type (chosen at run time: an instance costs 10 CPU seconds), any residual.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>
// after the kernel: it relies on what that includes
#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/launch.h"

namespace pyquant::cuda {

// The visitor tree is one leaf: it owns loads, arithmetic and stores of the thread's eight columns.
template <class ThreadMap>
struct OrderedEpilogue80 {
  using Arguments = EpilogueParams;
  using Params = EpilogueParams;
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
        const int32_t n = cute::get<1>(at(0, c, 0, 0));
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kWidth; ++i) channel[c][i] = load_channel(*p, n + i);
      }
      limits = load_code_limits(*p);
    }

    template <class ElementAccumulator, int Count>
    CUTLASS_DEVICE auto visit(int iteration, int row, int column, int,
                              const cutlass::Array<ElementAccumulator, Count>& acc) {
      const auto coordinate = at(0, column, row, iteration);
      const int32_t m = cute::get<0>(coordinate), n = cute::get<1>(coordinate);
      int32_t raw[Count];
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

template <class Tile, class Warp, int Stages>
struct GemmSm80 : NoWorkspace {
  // half with eight per access: the thread map that gives every thread eight columns, whatever is stored.
  using Out = cutlass::half_t;
  static constexpr int kWidth = 8;
  using ThreadMap = cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, Warp, Out, kWidth, 1>;
  using Callbacks = OrderedEpilogue80<ThreadMap>;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
  // kZfill: rows beyond M and N are zeros in shared memory, not leftovers, so that every accumulator is defined.
  using Base = typename cutlass::gemm::kernel::DefaultGemmUniversal<
      int8_t, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, 16, int8_t, cutlass::layout::ColumnMajor,
      cutlass::ComplexTransform::kNone, 16, Out, cutlass::layout::RowMajor, int32_t, cutlass::arch::OpClassTensorOp,
      cutlass::arch::Sm80, Tile, Warp, cutlass::gemm::GemmShape<16, 8, 32>,
      cutlass::epilogue::thread::LinearCombination<Out, kWidth, int32_t, float>, Swizzle, Stages,
      cutlass::arch::OpMultiplyAddSaturate, cutlass::gemm::SharedMemoryClearOption::kZfill>::GemmKernel;
  // Not unrolled over its iterations: the activations would be there once per iteration.
  using Epilogue =
      cutlass::epilogue::threadblock::EpilogueWithVisitorCallbacks<typename Base::Epilogue, Callbacks, 1, false>;
  using Kernel = cutlass::gemm::kernel::GemmWithEpilogueVisitor<typename Base::Mma, Epilogue, Swizzle>;

  static void run(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    const cutlass::gemm::GemmCoord size(static_cast<int>(p.m), static_cast<int>(p.n), static_cast<int>(p.k));
    typename Kernel::Arguments arguments(cutlass::gemm::GemmUniversalMode::kGemm, size, 1, epilogue_params(call),
                                         call.operands.x, call.operands.w, nullptr, nullptr, p.m * p.ldx, p.n * p.ldw,
                                         0, 0, p.ldx, p.ldw, 0, 0);
    const typename Kernel::Params params(arguments, call.device.sm_count, 1);
    LaunchShape shape;
    shape.grid = params.get_grid_dims();
    shape.block = dim3(Kernel::kThreadCount);
    shape.shared_bytes = static_cast<int>(sizeof(typename Kernel::SharedStorage));
    launch<cutlass::Kernel2<Kernel>>(call.name, shape, call.context, params);
  }
};

}  // namespace pyquant::cuda
