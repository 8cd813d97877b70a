// From wgmma accumulators to memory: the ordered epilogue of the sm_90a families, without shared memory (a main loop's
// buffers stay full while a tile is stored, and one instance serves every output type). Two forms: straight-line code
// for what most layers run (plain90.cuh), and a loop for everything else (steps90.cuh).
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/detail.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/plain90_straight.cuh"
#include "cuda/gemm/plain90_swapped.cuh"
#include "cuda/gemm/steps90.cuh"
#include "cuda/gemm/transpose.cuh"
#include "cuda/overlap.cuh"

namespace pyquant::cuda {

// AccShift: the accumulator holds 2^AccShift times the sum. FromAnyRow: a swapped tile may begin at any token.
template <class Acc, bool Swapped, int AccShift = 0, bool FromAnyRow = false>
class Store90 {
 public:
  // What CUTLASS asks of an epilogue; C does not exist and D is the accumulator's own affair.
  using DispatchPolicy = cutlass::gemm::EpilogueDefault;
  using ElementAccumulator = Acc;
  using ElementCompute = float;
  using ElementScalar = float;
  using ElementOutput = float;
  using ElementC = void;
  using ElementD = float;
  using StrideC = cute::Stride<int64_t, cute::_1, int64_t>;
  using StrideD = StrideC;
  using Arguments = EpilogueParams;
  using Params = EpilogueParams;
  struct ThreadEpilogueOp {
    using ElementOutput = float;
    using ElementD = float;
    using ElementAccumulator = Acc;
    using ElementCompute = float;
    static constexpr int kCount = 1;
  };
  struct SharedStorage {};

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(const ProblemShape&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(const ProblemShape&, const Arguments&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(const ProblemShape&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }
  template <class ProblemShape>
  static bool can_implement(const ProblemShape&, const Arguments&) {
    return true;
  }

  CUTLASS_HOST_DEVICE explicit Store90(const Params& params, const SharedStorage& = SharedStorage()) : p_(params) {}
  CUTLASS_DEVICE bool is_source_needed() const { return false; }

  template <class Problem, class Tile, class TileAt, class Engine, class Layout, class TiledMma, class Residue>
  CUTLASS_DEVICE void operator()(Problem, Tile tile, TileAt at, const cute::Tensor<Engine, Layout>& acc, TiledMma mma,
                                 Residue, int thread, char*) const {
    const int32_t row0 = cute::get<0>(at) * cute::size<0>(tile), column0 = cute::get<1>(at) * cute::size<1>(tile);
    const auto own = mma.get_thread_slice(thread).partition_C(cute::make_identity_tensor(cute::take<0, 2>(tile)));
    store(acc, own, row0, column0);
  }

  // acc: ((2, 2, N / 8), MMA_M, MMA_N) values of the thread; own: their coordinates within the tile, which starts at
  // (row0, column0) of the product as the tensor cores see it.
  template <class Fragment, class Coordinates>
  CUTLASS_DEVICE void store(const Fragment& acc, const Coordinates& own, int32_t row0, int32_t column0) const {
    // The predecessor in the stream wrote the scales, say.
    const int32_t zero = zero_after_predecessor();
    if (store_plain(acc, own, row0 + zero, column0 + zero, zero)) return;
    store_general(acc, own, row0 + zero, column0 + zero, zero);
  }

 private:
  CUTLASS_DEVICE CodeLimits code_limits(int32_t zero) const {
    Params p = p_;
    p.out_scale = p.out_scale ? p.out_scale + zero : nullptr;
    p.out_zero_point = p.out_zero_point ? p.out_zero_point + zero : nullptr;
    return load_code_limits(p);
  }
  CUTLASS_DEVICE static Acc sum_of(Acc value) {
    if constexpr (AccShift != 0)
      return value >> AccShift;  // exact: the low bits are 0
    else
      return value;
  }

  // False, and nothing is stored, where only the general path below applies.
  template <class Fragment, class Coordinates>
  CUTLASS_DEVICE bool store_plain(const Fragment& acc, const Coordinates& own, int32_t row0, int32_t column0,
                                  int32_t zero) const {
    // With 96 sums and widened weights beside them ptxas has no register left for it and spills.
    constexpr bool kNoRoom = AccShift != 0 && cute::size(Fragment{}) == 96;
    if (kNoRoom || p_.plain90 == PlainOut::none) return false;
    constexpr bool kHasRoom = Swapped || PlainTile90::kHasRoom<Fragment>;
    if (!kHasRoom && p_.plain90 == PlainOut::f32) return false;
    constexpr bool kHasCurves = !Swapped || PlainTile90::kHasCurves<Fragment>;
    if (!kHasCurves && p_.activation != Activation::none && p_.activation != Activation::relu) return false;
    constexpr bool kTakesMore = PlainTile90::kTakesMore<Fragment, AccShift>;
    if (!kTakesMore && (p_.activation != Activation::none || p_.residual)) return false;
    const bool reaches_over = Swapped || column0 + 8 * cute::size<0, 2>(Fragment{}) > p_.n;
    if (reaches_over && (p_.n % 16 != 0 || !kHasRoom)) return false;
    if (Swapped && p_.x_zero_point && p_.x_zero_point_step != 0) return false;
    const CodeLimits limits = code_limits(zero);
    if (p_.plain90 == PlainOut::codes && !PlainCodes::serves(limits)) return false;
    lanes_are_together();
    if constexpr (Swapped)
      return PlainSwapped90<Acc, FromAnyRow>(p_, limits).template store<AccShift>(acc, own, row0, column0);
    static_assert(Swapped || AccShift == 0, "straight accumulators hold plain sums");
    if constexpr (!Swapped) PlainStraight90<Acc>(p_, limits).store(acc, own, row0, column0);
    return true;
  }

  // Everything else. A rolled loop, so that the operations of finish_row and their many branches stand once in a
  // kernel: a step finishes eight sums of each thread, which a jump copies from their registers.
  template <class Fragment, class Coordinates>
  CUTLASS_DEVICE void store_general(const Fragment& acc, const Coordinates& own, int32_t row0, int32_t column0,
                                    int32_t zero) const {
    using Steps = Steps90<Swapped, Fragment>;
    const CodeLimits limits = code_limits(zero);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t outer = 0; outer < Steps::kOuter; ++outer) {
      Channel channel[8];
      const int32_t n = (Swapped ? row0 : column0) + Steps::channel(own, outer);
      load_channels(p_, n, channel);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int32_t inner = 0; inner < Steps::kInner; ++inner) {
        const int32_t m = Steps::inside(inner) ? (Swapped ? column0 : row0) + Steps::token(own, inner) : p_.m;
        const Token token = load_token(p_, m);
        Acc pair[4][2], row[8];
        lanes_are_together();
        Steps::take(acc, outer * Steps::kInner + inner, pair);
        transpose_quad(pair, row);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 8; ++i) row[i] = sum_of(row[i]);
        finish_row(row, channel, token, limits, p_, m, n);
      }
    }
  }

  Params p_;
};

// As CUTLASS's warp-specialised kernels take it.
template <class Acc, bool Swapped, int AccShift = 0>
using Epilogue90 =
    cutlass::epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<Store90<Acc, Swapped, AccShift>>;

}  // namespace pyquant::cuda
