// From wgmma accumulators to memory: the ordered epilogue of the sm_90a families, without shared memory (a main loop's
// buffers stay full while a tile is stored, and one instance serves every output type).
//   Straight (tokens are the rows of the accumulator): lanes of a quad hold neighbouring pairs of columns; a 4 x 4
//   transposition by shuffles gives each lane eight neighbouring columns of every fourth block: 16-byte stores.
//   Swapped (channels are the rows): lanes four apart hold neighbouring channels; one exchange gives each lane a pair
//   of channels of one token.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/detail.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/plain90.cuh"
#include "cuda/gemm/transpose.cuh"
#include "cuda/overlap.cuh"

namespace pyquant::cuda {

// AccShift: the accumulator holds 2^AccShift times the sum.
template <class Acc, bool Swapped, int AccShift = 0>
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
    // The predecessor in the stream wrote the scales, say. The operands are read through the cache for constants, whose
    // loads the compiler may move over a wait: so their addresses depend on it.
    const int32_t zero = zero_after_predecessor();
    if (store_plain(acc, own, row0 + zero, column0 + zero, zero)) return;
    if constexpr (Swapped)
      store_swapped(acc, own, row0 + zero, column0 + zero, zero);
    else
      store_straight(acc, own, row0 + zero, column0 + zero, zero);
  }

 private:
  CUTLASS_DEVICE static int32_t zero_after_predecessor() {
    int32_t zero;
    wait_for_predecessor();
    asm volatile("mov.b32 %0, 0;" : "=r"(zero)::"memory");
    return zero;
  }
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
    if (kNoRoom || p_.plain == PlainOut::none) return false;
    if (Swapped ? p_.n % 16 != 0 : column0 + 8 * cute::size<0, 2>(Fragment{}) > p_.n) return false;
    const CodeLimits limits = code_limits(zero);
    if (p_.plain == PlainOut::f16)
      return store_as(Plain90<PlainHalves<true>, Acc>(p_, limits), acc, own, row0, column0);
    if (p_.plain == PlainOut::bf16)
      return store_as(Plain90<PlainHalves<false>, Acc>(p_, limits), acc, own, row0, column0);
    if (limits.zero_point != 0 || !(fabsf(limits.recip) < kInfinity)) return false;
    return store_as(Plain90<PlainCodes, Acc>(p_, limits), acc, own, row0, column0);
  }
  template <class Plain, class Fragment, class Coordinates>
  CUTLASS_DEVICE static bool store_as(const Plain& plain, const Fragment& acc, const Coordinates& own, int32_t row0,
                                      int32_t column0) {
    if constexpr (Swapped) return plain.template swapped<AccShift>(acc, own, row0, column0);
    static_assert(Swapped || AccShift == 0, "straight accumulators hold plain sums");
    if constexpr (!Swapped) plain.straight(acc, own, row0, column0);
    return true;
  }

  template <class Fragment, class Coordinates>
  CUTLASS_DEVICE void store_straight(const Fragment& acc, const Coordinates& own, int32_t row0, int32_t column0,
                                     int32_t zero) const {
    constexpr int kBlocks = cute::size<0, 2>(Fragment{}), kRepeats = cute::size<1>(Fragment{});
    static_assert(cute::size<2>(Fragment{}) == 1, "one instruction spans a straight tile's columns");
    static_assert(kBlocks % 4 == 0, "straight tiles are multiples of 32 columns wide");
    const CodeLimits limits = code_limits(zero);
    Token token[kRepeats][2];
    int32_t m[kRepeats][2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRepeats; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        m[i][h] = row0 + cute::get<0>(own(cute::make_coord(0, h, 0), i, 0));
        token[i][h] = load_token(p_, m[i][h]);
      }
    }
    const int32_t lane_block = 8 * (static_cast<int32_t>(threadIdx.x) & 3);
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kBlocks / 4; ++g) {
      const int32_t n = column0 + 32 * g + lane_block;
      Channel channel[8];
      load_channels(p_, n, channel);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRepeats; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) {
          Acc pair[4][2], row[8];
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 4; ++j) {
            pair[j][0] = sum_of(acc(cute::make_coord(0, h, 4 * g + j), i, 0));
            pair[j][1] = sum_of(acc(cute::make_coord(1, h, 4 * g + j), i, 0));
          }
          transpose_quad(pair, row);
          finish_row(row, channel, token[i][h], limits, p_, m[i][h], n);
        }
      }
    }
  }

  template <class Fragment, class Coordinates>
  CUTLASS_DEVICE void store_swapped(const Fragment& acc, const Coordinates& own, int32_t row0, int32_t column0,
                                    int32_t zero) const {
    constexpr int kBlocks = cute::size<0, 2>(Fragment{}), kRepeats = cute::size<1>(Fragment{}),
                  kColumns = cute::size<2>(Fragment{}) * kBlocks;  // of eight tokens, over all instructions of the tile
    const CodeLimits limits = code_limits(zero);
    const bool odd = threadIdx.x & 4;  // odd channel: takes the odd token of the pair
    Channel channel[kRepeats][2][2];
    int32_t n[kRepeats][2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRepeats; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        n[i][h] = row0 + (cute::get<0>(own(cute::make_coord(0, h, 0), i, 0)) & ~1);
        channel[i][h][0] = load_channel(p_, n[i][h]);
        channel[i][h][1] = load_channel(p_, n[i][h] + 1);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kColumns; ++c) {
      const int j = c % kBlocks, part = c / kBlocks;
      const int32_t m = column0 + cute::get<1>(own(cute::make_coord(0, 0, j), 0, part)) + (odd ? 1 : 0);
      const Token token = load_token(p_, m);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRepeats; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) {
          const Acc even_token = sum_of(acc(cute::make_coord(0, h, j), i, part));
          const Acc odd_token = sum_of(acc(cute::make_coord(1, h, j), i, part));
          const Acc got = __shfl_xor_sync(0xffffffffu, odd ? even_token : odd_token, 4);
          const Acc pair[2] = {odd ? got : even_token, odd ? odd_token : got};
          finish_row(pair, channel[i][h], token, limits, p_, m, n[i][h]);
        }
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
