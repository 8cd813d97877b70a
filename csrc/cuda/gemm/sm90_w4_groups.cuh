// GEMM for Hopper with group scales: int4 weights in the layout blocked128, 8-bit activations. The sum over groups is a
// float sum in ascending order, each product and addition rounded (docs/numerics.md 4), so K is not divided and
// CUTLASS's kernels, which keep one accumulator, do not serve.
//   partition: a persistent block takes tiles of 128 channels; one thread of the first warpgroup fetches (as
//   main90_w4.cuh), two warpgroups own 64 channels each. After every group a warpgroup waits for its product and adds
//   it, scaled, to float registers, while the tensor cores work for the other one.
//   limits: as sm90_w4_blocked.cuh; the group size is a multiple of 64, K of the group size.
#pragma once
#include "cuda/gemm/launch90.cuh"
#include "cuda/gemm/main90_w4.cuh"
#include "cuda/gemm/schedule90.cuh"
#include "cuda/gemm/store90.cuh"
#include "cuda/overlap.cuh"

namespace pyquant::cuda {

template <class Tiles>
struct GroupsParams {
  typename Tiles::TmaX tma_x;
  const uint8_t* w;
  const float* w_scale;  // [n, groups] or null
  const int32_t* w_sum;  // [n, groups], with a zero point
  const int32_t* x_zero_point;
  EpilogueParams epilogue;          // of the scaled sum: knows neither of the above
  int32_t depth = 0, blocks_k = 0;  // codes along k, and blocks of 128
  int32_t groups = 0, halves = 0;   // groups, and steps of 64 codes in one
  int32_t tiles = 0, tiles_n = 0;
};

// What a group brings to the two channels of a thread.
struct GroupChannels {
  float scale[2];
  int32_t sum[2];
};

template <class Tiles>
__device__ __forceinline__ GroupChannels load_group(const GroupsParams<Tiles>& p, const int32_t (&channel)[2],
                                                    int32_t group) {
  GroupChannels c{{1.f, 1.f}, {0, 0}};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (channel[h] >= p.epilogue.n || group >= p.groups) continue;
    const int64_t at = static_cast<int64_t>(channel[h]) * p.groups + group;
    if (p.w_scale) c.scale[h] = __ldg(p.w_scale + at);
    if (p.x_zero_point) c.sum[h] = __ldg(p.w_sum + at);
  }
  return c;
}

template <class Tiles>
struct GroupsKernel {
  static constexpr int kThreads = 384, kTokens = cute::size<1>(typename Tiles::TileShape{});
  using Params = GroupsParams<Tiles>;
  using Pipeline = cutlass::PipelineTmaAsync<Tiles::kStages>;
  using State = cutlass::PipelineState<Tiles::kStages>;
  using TiledMma = typename Tiles::TiledMma;
  struct SharedStorage {
    typename Tiles::TensorStorage tensors;
    typename Pipeline::SharedStorage pipeline;
  };

  // One thread.
  CUTLASS_DEVICE static void produce(const Params& p, SharedStorage& shared, Pipeline& pipeline) {
    const int first_row = static_cast<int>(blockIdx.x) % p.tiles_n;
    const int64_t row_bytes = p.blocks_k * kBlocked128BlockBytes;
    // The weights' first blocks come into the L2 while the kernel that writes x still runs.
    for (int k = 0; k < Tiles::kStages && k < p.blocks_k; ++k)
      cute::SM90_BULK_COPY_G2S::PREFETCH::copy(p.w + first_row * row_bytes + k * kBlocked128BlockBytes,
                                               static_cast<int32_t>(kBlocked128BlockBytes));
    wait_for_predecessor();
    const auto slice = p.tma_x.get_slice(0);
    const auto to = slice.partition_D(cute::as_position_independent_swizzle_tensor(Tiles::shared_x(shared.tensors)));
    const auto x = cute::local_tile(p.tma_x.get_tma_tensor(cute::make_shape(p.epilogue.m, p.depth, 1)),
                                    typename Tiles::TileShape{}, cute::make_coord(cute::_, cute::_, cute::_),
                                    cute::Step<cute::Underscore, cute::_1, cute::_1>{});
    State state = cutlass::make_producer_start_state<Pipeline>();
    for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles; tile += static_cast<int>(gridDim.x)) {
      const auto from = slice.partition_S(x(cute::_, cute::_, tile / p.tiles_n, cute::_, 0));
      const uint8_t* w = p.w + tile % p.tiles_n * row_bytes;
      for (int k = 0; k < p.blocks_k; ++k, ++state) {
        pipeline.producer_acquire(state);
        Tiles::fetch(p.tma_x, w + k * kBlocked128BlockBytes, from, to, shared.tensors,
                     pipeline.producer_get_barrier(state), k, state.index());
      }
    }
    pipeline.producer_tail(state);
  }

  // Adds a group's product, 16 times too large, to the sum.
  template <class Product, class Sum>
  CUTLASS_DEVICE static void promote(const Product& product, Sum& sum, const GroupChannels& group,
                                     const int32_t (&zero_point)[kTokens / 4], bool corrects) {
    const auto each = [&](auto value_of) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTokens / 8; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int h = 0; h < 2; ++h) {
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 2; ++v) {
            const auto at = cute::make_coord(cute::make_coord(v, h, j), 0, 0);
            sum(at) = fadd(sum(at), fmul(__int2float_rn(value_of(product(at) >> 4, 2 * j + v, h)), group.scale[h]));
          }
        }
      }
    };
    if (corrects)
      each([&](int32_t acc, int token, int h) { return corrected(acc, zero_point[token], group.sum[h]); });
    else
      each([](int32_t acc, int, int) { return acc; });
  }

  CUTLASS_DEVICE static void consume(const Params& p, SharedStorage& shared, Pipeline& pipeline, int thread) {
    wait_for_predecessor();
    TiledMma mma;
    const int warpgroup = __shfl_sync(0xffffffffu, thread / 128, 0);
    const auto weights_of = mma.get_slice(128 * warpgroup);
    const auto x = weights_of.make_fragment_B(weights_of.partition_B(Tiles::shared_x(shared.tensors)));
    const auto own = mma.get_thread_slice(thread).partition_C(
        cute::make_identity_tensor(cute::Shape<cute::_128, cute::Int<kTokens>>{}));
    auto product = cute::partition_fragment_C(mma, cute::Shape<cute::_128, cute::Int<kTokens>>{});
    auto sum = cute::make_fragment_like<float>(product);
    using Fragment = decltype(mma.get_thread_slice(thread).partition_fragment_A(
        cute::make_tensor(static_cast<int8_t*>(nullptr), cute::Layout<cute::Shape<cute::_128, cute::_64>>{})));
    Fragment even, odd;
    const auto widen = [&](int stage, int step, Fragment& w) {
      widen_codes(Tiles::words_of(shared.tensors, stage, thread, step), w(cute::_, 0, 0), w(cute::_, 0, 1));
    };
    State state;
    for (int tile = static_cast<int>(blockIdx.x); tile < p.tiles; tile += static_cast<int>(gridDim.x)) {
      const int32_t row0 = tile % p.tiles_n * 128, column0 = tile / p.tiles_n * kTokens;
      const int32_t channel[2] = {row0 + cute::get<0>(own(cute::make_coord(0, 0, 0), 0, 0)),
                                  row0 + cute::get<0>(own(cute::make_coord(0, 1, 0), 0, 0))};
      int32_t zero_point[kTokens / 4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTokens / 4; ++i) {
        const int32_t m = column0 + cute::get<1>(own(cute::make_coord(i % 2, 0, i / 2), 0, 0));
        zero_point[i] = p.x_zero_point && m < p.epilogue.m
                            ? __ldg(p.x_zero_point + static_cast<int64_t>(m) * p.epilogue.x_zero_point_step)
                            : 0;
      }
      cute::fill(sum, 0.f);
      GroupChannels group = load_group(p, channel, 0);
      int32_t at_group = 0, at_half = 0;
      mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
      // 64 codes of all channels. While the tensor cores work, `meanwhile` prepares the next ones.
      const auto multiply = [&](const Fragment& w, int stage, int step, auto meanwhile) {
        cute::warpgroup_fence_operand(product);
        cute::warpgroup_arrive();
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          cute::gemm(mma, w(cute::_, cute::_, i), x(cute::_, cute::_, 2 * step + i, stage), product);
          mma.accumulate_ = cute::GMMA::ScaleOut::One;
        }
        cute::warpgroup_commit_batch();
        const bool ends = ++at_half == p.halves;
        GroupChannels next = group;
        if (ends) next = load_group(p, channel, ++at_group);
        meanwhile();
        cute::warpgroup_wait<0>();
        cute::warpgroup_fence_operand(product);
        if (!ends) return;
        promote(product, sum, group, zero_point, p.x_zero_point != nullptr);
        group = next;
        at_half = 0;
        mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
      };
      pipeline.consumer_wait(state);
      widen(state.index(), 0, even);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int k = 0; k < p.blocks_k; ++k) {
        const State here = state;
        ++state;
        const bool whole = 128 * k + 64 < p.depth;
        multiply(even, here.index(), 0, [&] {
          if (whole) widen(here.index(), 1, odd);
        });
        if (whole) {
          multiply(odd, here.index(), 1, [&] {
            if (k + 1 == p.blocks_k) return;
            pipeline.consumer_wait(state);
            widen(state.index(), 0, even);
          });
        }
        pipeline.consumer_release(here);
      }
      if (tile + static_cast<int>(gridDim.x) >= p.tiles) release_successor();
      Store90<float, true>(p.epilogue).store(sum, own, row0, column0);
    }
  }

  CUTLASS_DEVICE static void run(const Params& p, char* raw) {
    auto& shared = *reinterpret_cast<SharedStorage*>(raw);
    const int warpgroup = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();
    typename Pipeline::Params options;
    options.transaction_bytes = Tiles::kTransactionBytes;
    options.role = warpgroup == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
    options.is_leader = threadIdx.x % 128 == 0;
    options.num_consumers = kThreads - 128;
    Pipeline pipeline(shared.pipeline, options, cute::Shape<cute::_1, cute::_1, cute::_1>{});
    __syncthreads();
    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<40>();
      if (warp == 0 && cute::elect_one_sync()) produce(p, shared, pipeline);
    } else {
      cutlass::arch::warpgroup_reg_alloc<232>();
      consume(p, shared, pipeline, static_cast<int>(threadIdx.x) - 128);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_groups90_kernel(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ __align__(1024) char groups90_shared[];
  Kernel::run(params, groups90_shared);
}

template <int M, int N, int K, int ClusterM, int ClusterN, class Schedule>
struct GemmSm90W4Groups : NoWorkspace {
  static_assert(Schedule::kSwapped && !Schedule::kSplits && K == kBlocked128Side && ClusterM * ClusterN == 1);
  using Tiles = BlockedTiles90<N, M, stages_blocked90(M)>;
  using Kernel = GroupsKernel<Tiles>;

  static void run(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    typename Kernel::Params params{Tiles::tensor_map_x(static_cast<const int8_t*>(call.operands.x),
                                                       static_cast<int>(p.m), static_cast<int>(p.k), {p.ldx, {}, 0}),
                                   static_cast<const uint8_t*>(call.operands.w),
                                   call.operands.w_scale,
                                   call.operands.w_sum,
                                   p.has_zero_point ? call.operands.x_zero_point : nullptr,
                                   epilogue_params(call)};
    params.epilogue.w_scale = nullptr;
    params.epilogue.x_zero_point = nullptr;
    params.epilogue.plain = plain_out(params.epilogue, p.out_align);  // zero points and scales are in the sums
    params.depth = static_cast<int32_t>(p.k);
    params.blocks_k = static_cast<int32_t>(blocked128_padded(p.k) / kBlocked128Side);
    params.groups = static_cast<int32_t>(p.k / p.group_size);
    params.halves = static_cast<int32_t>(p.group_size / 64);
    params.tiles_n = static_cast<int32_t>(blocked128_padded(p.n) / kBlocked128Side);
    params.tiles = params.tiles_n * static_cast<int32_t>((p.m + M - 1) / M);
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(params.tiles < call.device.sm_count ? params.tiles : call.device.sm_count));
    shape.block = dim3(Kernel::kThreads);
    shape.shared_bytes = static_cast<int>(sizeof(typename Kernel::SharedStorage));
    shape.overlaps = true;
    launch<gemm_groups90_kernel<Kernel>>(call.name, shape, call.context, params);
  }
};

}  // namespace pyquant::cuda
