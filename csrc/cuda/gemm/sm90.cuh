// int8 GEMM for Hopper (sm_90a): CUTLASS 3.x TMA warp-specialised main loop on wgmma, epilogue of our own.
//   partition: one producer warp feeds shared memory by TMA, two consumer warpgroups multiply; pingpong gives each
//   warpgroup a tile of its own (one multiplies while the other stores), cooperative halves one tile between them.
//   Channel operands pass through shared memory, token operands and the residual come straight from global memory in
//   the accumulator's layout; the result leaves by TMA.
//   limits: rows of x, w and out on 16-byte boundaries; any M, N, K (TMA fills and clips the tails), any residual.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/launch.h"

namespace pyquant::cuda {

namespace fusion = cutlass::epilogue::fusion;

// Root of the visitor tree. Children: x_scale, zero point (per token), w_scale, w_sum, bias (per channel).
template <class Out>
struct OrderedEpilogue90 : fusion::Sm90VisitorImpl<> {
  using Arguments = EpilogueParams;
  using Params = EpilogueParams;
  struct SharedStorage {};

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(const ProblemShape&, const Arguments& arguments, void*) {
    return arguments;
  }
  template <class ProblemShape>
  static bool can_implement(const ProblemShape&, const Arguments&) {
    return true;
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

  CUTLASS_HOST_DEVICE OrderedEpilogue90() {}
  CUTLASS_HOST_DEVICE OrderedEpilogue90(const Params& params, const SharedStorage&) : params_(&params) {}

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

  template <class Coordinates>
  struct ConsumerStoreCallbacks : fusion::detail::EmptyConsumerStoreCallbacks {
    CUTLASS_DEVICE ConsumerStoreCallbacks(Coordinates coordinates, const Params* params)
        : at(coordinates), p(params), limits(load_code_limits(*params)) {}

    Coordinates at;  // (CPY, CPY_M, CPY_N, EPI_M, EPI_N) -> (m, n, l)
    const Params* p;
    CodeLimits limits;

    template <int Count>
    CUTLASS_DEVICE cutlass::Array<Out, Count> visit(const cutlass::Array<int32_t, Count>& raw, int epi_v, int epi_m,
                                                    int epi_n, const cutlass::Array<float, Count>& x_scale,
                                                    const cutlass::Array<int32_t, Count>& zero_point,
                                                    const cutlass::Array<float, Count>& w_scale,
                                                    const cutlass::Array<int32_t, Count>& w_sum,
                                                    const cutlass::Array<float, Count>& bias) {
      cutlass::Array<Out, Count> out;
      if constexpr (cute::is_same_v<Out, int32_t>) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Count; ++i) out[i] = corrected(raw[i], zero_point[i], w_sum[i]);
        return out;
      } else {
        float t[Count];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Count; ++i) {
          const int32_t acc = corrected(raw[i], zero_point[i], w_sum[i]);
          t[i] = fadd(scaled(acc, w_scale[i], x_scale[i], p->scale_product_first), bias[i]);
        }
        activate_all(t, *p);
        if (p->residual) {
          const auto tile = at(cute::_, cute::_, cute::_, epi_m, epi_n);
          // The accumulator layout holds columns in neighbouring pairs.
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < Count; i += 2) {
            const auto coordinate = tile(epi_v * Count + i);
            float pair[2] = {t[i], t[i + 1]};
            add_residual(pair, *p, cute::get<0>(coordinate), cute::get<1>(coordinate));
            t[i] = pair[0];
            t[i + 1] = pair[1];
          }
        }
        if constexpr (cute::is_same_v<Out, int8_t>) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < Count; ++i) out[i] = static_cast<int8_t>(code(t[i], limits));
        } else {
          cutlass::Array<float, Count> real;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < Count; ++i) real[i] = t[i];
          out = cutlass::NumericArrayConverter<Out, float, Count, cutlass::FloatRoundStyle::round_to_nearest>{}(real);
        }
        return out;
      }
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::detail::ConsumerStoreArgs<Args...>& args) {
    auto [M, N, K, L] = args.problem_shape_mnkl;
    auto at = fusion::detail::sm90_partition_for_epilogue<ReferenceSrc>(
        cute::make_identity_tensor(cute::make_shape(M, N, L)), args.tile_shape_mnk, args.tile_coord_mnkl, args.epi_tile,
        args.tiled_copy, args.thread_idx);
    return ConsumerStoreCallbacks<decltype(at)>(at, params_);
  }

  const Params* params_ = nullptr;
};

template <int M, int N, int K>
using TileShape = cute::Shape<cute::Int<M>, cute::Int<N>, cute::Int<K>>;

template <class Out, class Tile, class Cluster, bool Cooperative>
struct GemmSm90 {
  using MainSchedule = cute::conditional_t<Cooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                                           cutlass::gemm::KernelTmaWarpSpecializedPingpong>;
  using StoreSchedule = cute::conditional_t<Cooperative, cutlass::epilogue::TmaWarpSpecializedCooperative,
                                            cutlass::epilogue::TmaWarpSpecialized>;
  using PerToken = cute::Stride<bool, cute::_0, cute::_0>;  // false: one scalar for all tokens
  using PerChannel = cute::Stride<cute::_0, cute::_1, cute::_0>;
  template <class T>
  using TokenOperand = fusion::Sm90ColBroadcast<0, Tile, T, T, PerToken>;
  template <class T>
  using ChannelOperand = fusion::Sm90RowBroadcast<0, Tile, T, T, PerChannel>;
  using Tree = fusion::Sm90EVT<OrderedEpilogue90<Out>, TokenOperand<float>, TokenOperand<int32_t>,
                               ChannelOperand<float>, ChannelOperand<int32_t>, ChannelOperand<float>>;
  static constexpr int kOutAlign = 128 / cutlass::sizeof_bits<Out>::value;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, int32_t, float, void, cutlass::layout::RowMajor, kOutAlign, Out,
      cutlass::layout::RowMajor, kOutAlign, StoreSchedule, Tree>::CollectiveOp;
  using Main = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, cutlass::layout::RowMajor, 16, int8_t,
      cutlass::layout::ColumnMajor, 16, int32_t, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      MainSchedule>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Main, Epilogue>;

  static void run(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    const EpilogueParams e = epilogue_params(call);
    const int m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);
    cutlass::KernelHardwareInfo hardware;
    hardware.device_id = call.context.device;
    hardware.sm_count = call.device.sm_count;
    const int32_t* w_sum = e.x_zero_point ? e.w_sum : nullptr;
    typename Tree::Arguments tree{{e.x_scale, 1.f, {e.x_scale_step != 0, {}, {}}},
                                  {e.x_zero_point, 0, {e.x_zero_point_step != 0, {}, {}}},
                                  {e.w_scale, 1.f, {}},
                                  {w_sum, 0, {}},
                                  {e.bias, -0.f, {}},
                                  e};
    typename Kernel::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                         {m, n, k, 1},
                                         {static_cast<const int8_t*>(call.operands.x),
                                          {p.ldx, {}, {}},
                                          static_cast<const int8_t*>(call.operands.w),
                                          {p.ldw, {}, {}}},
                                         {tree, nullptr, {}, static_cast<Out*>(call.operands.out), {p.ldo, {}, {}}},
                                         hardware};
    DeviceGuard guard(call.context.device);
    const typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, nullptr);
    LaunchShape shape;
    shape.grid = Kernel::get_grid_shape(params);
    shape.block = Kernel::get_block_shape();
    shape.cluster = dim3(cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), 1);
    shape.shared_bytes = Kernel::SharedStorageSize;
    launch<cutlass::device_kernel<Kernel>>(call.row.name, shape, call.context, params);
  }
};

}  // namespace pyquant::cuda
