// GEMM for Hopper of int4 or int8 weights as in a checkpoint and 16-bit activations: more tokens than the decode
// kernels take (docs/numerics.md 8). Where tiles are few, K is divided over blocks (csrc/plan/split_k.h), and the block
// that arrives last adds their sums in ascending order of K.
//   partition: a persistent block takes tiles of 128 channels; one thread of the first warpgroup fetches both operands
//   by TMA, one or two warpgroups widen weights and two multiply, for 64 channels each (main90_weight_only.cuh). Where
//   a step is 256 codes, or weights are rounded to 16 bits, those who multiply widen (main90_weight_only_registers.cuh,
//   main90_weight_only_rounded.cuh), and blocks of neighbouring channels may be a cluster.
//   limits: rows of x and w on 16-byte boundaries; groups of 32, of 64 or of multiples of 128 codes; any M, N, K,
//   output and residual.
#pragma once
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "cuda/gemm/launch90.cuh"
#include "cuda/gemm/main90_weight_only.cuh"
#include "cuda/gemm/main90_weight_only_registers.cuh"
#include "cuda/gemm/main90_weight_only_rounded.cuh"
#include "cuda/gemm/schedule90.cuh"
#include "cuda/gemm/store90.cuh"
#include "cuda/overlap.cuh"
#include "plan/split_k.h"

namespace pyquant::cuda {

// How warps share the work over a kind of tiles: registers of a thread of the warpgroups that fetch, widen and
// multiply, of 96 a thread at launch where there are 640, 128 of 512, 168 of 384; barriers between the latter two.
template <class Tiles>
struct WeightOnlyWarps90;

template <class Math, int Tokens>
struct WeightOnlyWarps90<WeightOnlyTiles90<Math, Tokens>> {
  using Tiles = WeightOnlyTiles90<Math, Tokens>;
  using Main = MainWeightOnly90<Tiles>;
  using Ready = typename Tiles::Ready;
  using ReadyStorage = typename Ready::SharedStorage;
  static constexpr int kFetch = 24, kWiden = Tiles::kWideners == 2 ? 72 : 96;
  static constexpr int kMultiply = Tiles::kWideners == 2 ? 152 : 192;
  static constexpr int kConsumers = 128 * (2 + (Tiles::kAllSee ? Tiles::kWideners : 1));
};

// Whose warps that multiply widen.
template <class Tiles>
struct FragmentWarps90 {
  struct ReadyStorage {};
  static constexpr int kFetch = 40, kWiden = 0, kMultiply = 232, kConsumers = Tiles::kConsumers;
};

template <class Math, int Tokens, int Cluster>
struct WeightOnlyWarps90<RegisterTiles90<Math, Tokens, Cluster>>
    : FragmentWarps90<RegisterTiles90<Math, Tokens, Cluster>> {
  using Main = MainRegisters90<RegisterTiles90<Math, Tokens, Cluster>>;
};

template <class Math, int Tokens, int Cluster>
struct WeightOnlyWarps90<RoundedTiles90<Math, Tokens, Cluster>>
    : FragmentWarps90<RoundedTiles90<Math, Tokens, Cluster>> {
  using Main = MainRounded90<RoundedTiles90<Math, Tokens, Cluster>>;
};

template <class Tiles>
struct WeightOnlyKernel90 {
  static constexpr int kThreads = 128 * (1 + Tiles::kWideners + 2), kCluster = Tiles::kCluster;
  using Warps = WeightOnlyWarps90<Tiles>;
  using Main = typename Warps::Main;
  using Params = WeightOnlyParams90<Tiles>;
  using Pipeline = typename Tiles::Pipeline;
  using State = typename Tiles::State;
  using Sum = typename Main::Sum;
  static_assert(registers_suffice(kThreads,
                                  128 * (Warps::kFetch + Tiles::kWideners * Warps::kWiden + 2 * Warps::kMultiply)));
  static constexpr int kQuarters = cute::size(Sum{}) / 4;
  struct SharedStorage {
    typename Tiles::TensorStorage tensors;
    typename Pipeline::SharedStorage pipeline;
    typename Warps::ReadyStorage ready;
    int32_t arrived[2];  // of the shares of a tile, before this one
  };

  // Of the block in its cluster.
  CUTLASS_DEVICE static int32_t rank() { return kCluster == 1 ? 0 : static_cast<int32_t>(blockIdx.x) % kCluster; }

  // A cluster's part of the work, one after another.
  struct Work {
    int32_t at, tile = 0, share = 0, first = 0, count = 0;

    CUTLASS_DEVICE explicit Work(const Params& p) : at(static_cast<int32_t>(blockIdx.x) / kCluster) { find(p); }
    CUTLASS_DEVICE bool is_left(const Params& p) const { return at < p.tiles * p.shares; }
    CUTLASS_DEVICE bool is_last(const Params& p) const { return at + stride() >= p.tiles * p.shares; }
    CUTLASS_DEVICE void advance(const Params& p) {
      at += stride();
      find(p);
    }
    CUTLASS_DEVICE int32_t tile_n(const Params& p) const { return tile % p.tiles_n * kCluster + rank(); }
    CUTLASS_DEVICE int32_t tile_m(const Params& p) const { return tile / p.tiles_n; }

   private:
    CUTLASS_DEVICE static int32_t stride() { return static_cast<int32_t>(gridDim.x) / kCluster; }
    CUTLASS_DEVICE void find(const Params& p) {
      share = at / p.tiles;
      tile = at - share * p.tiles;
      first = share * p.share_steps;
      count = min(p.share_steps, p.steps - first);
    }
  };

  // One thread.
  CUTLASS_DEVICE static void produce(const Params& p, SharedStorage& shared, Pipeline& pipeline) {
    const auto slice_x = p.tma_x.get_slice(rank());
    const auto slice_w = p.tma_w.get_slice(0);
    const auto to_x =
        slice_x.partition_D(cute::as_position_independent_swizzle_tensor(Tiles::shared_x(shared.tensors)));
    const auto to_w = slice_w.partition_D(Tiles::shared_w(shared.tensors));
    const auto every = cute::make_coord(cute::_, cute::_);
    const auto x = cute::local_tile(p.tma_x.get_tma_tensor(cute::make_shape(p.epilogue.m, p.depth)),
                                    typename Tiles::TileX{}, every);
    const auto w = cute::local_tile(p.tma_w.get_tma_tensor(cute::make_shape(p.epilogue.n, p.row_bytes)),
                                    typename Tiles::TileW{}, every);
    wait_for_predecessor();
    State state = cutlass::make_producer_start_state<Pipeline>();
    for (Work work(p); work.is_left(p); work.advance(p)) {
      const auto from_x = slice_x.partition_S(x(cute::_, cute::_, work.tile_m(p), cute::_));
      const auto from_w = slice_w.partition_S(w(cute::_, cute::_, work.tile_n(p), cute::_));
      for (int step = work.first; step < work.first + work.count; ++step, ++state) {
        pipeline.producer_acquire(state);
        uint64_t* barrier = pipeline.producer_get_barrier(state);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Tiles::kParts; ++i)
          cute::copy(p.tma_w.with(*barrier), from_w(cute::_, cute::_, cute::_, Tiles::kParts * step + i),
                     to_w(cute::_, cute::_, cute::_, Tiles::kParts * state.index() + i));
        Tiles::copy_x(p.tma_x, barrier, from_x(cute::_, cute::_, cute::_, step),
                      to_x(cute::_, cute::_, cute::_, state.index()));
      }
    }
    pipeline.producer_tail(state);
  }

  // Lays the sums of a share down; of the block that comes last, true, and the sums of all.
  CUTLASS_DEVICE static bool add_shares(const Params& p, SharedStorage& shared, Sum& sum, const Work& work,
                                        int thread) {
    const int warpgroup = thread / 128;
    const int64_t at = (int64_t{kCluster} * work.tile + rank()) * 2 + warpgroup;
    float4* partials = p.partials + at * p.shares * kQuarters * 128 + thread % 128;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kQuarters; ++i)
      partials[(work.share * kQuarters + i) * 128] =
          make_float4(sum(4 * i), sum(4 * i + 1), sum(4 * i + 2), sum(4 * i + 3));
    __threadfence();
    cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));
    if (thread % 128 == 0) shared.arrived[warpgroup] = static_cast<int32_t>(atomicAdd(p.arrivals + at, 1u));
    cutlass::arch::NamedBarrier::sync(128, static_cast<uint32_t>(warpgroup));
    // A vote: the compiler sees that a warp stays together, and keeps the descriptors of the main loop's operands in
    // registers of the warp. Without it every instruction of the tensor cores has eight more in front.
    if (!__any_sync(0xffffffffu, shared.arrived[warpgroup] == p.shares - 1)) return false;
    __threadfence();  // the others' arrivals before their sums
    // Quarter i of the share in front, of which loads of all at once would need as many registers as the sums.
    const auto quarter = [&](int i) {
      if (i % 8 == 0) __syncwarp();
      return __ldcg(partials + i * 128);
    };
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kQuarters; ++i) {
      const float4 v = quarter(i);
      sum(4 * i) = v.x, sum(4 * i + 1) = v.y, sum(4 * i + 2) = v.z, sum(4 * i + 3) = v.w;
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t share = 1; share < p.shares; ++share) {
      partials += kQuarters * 128;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kQuarters; ++i) {
        const float4 v = quarter(i);
        const float part[4] = {v.x, v.y, v.z, v.w};
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 4; ++c) sum(4 * i + c) = fadd(sum(4 * i + c), part[c]);
      }
    }
    return true;
  }

  CUTLASS_DEVICE static void multiply(const Params& p, SharedStorage& shared, Main& main, int thread) {
    const int32_t zero = zero_after_predecessor();
    Sum sum;
    for (Work work(p); work.is_left(p); work.advance(p)) {
      const int32_t row0 = work.tile_n(p) * Tiles::kChannels;
      main.run(sum, row0 + zero, work.first, work.count);
      if (work.is_last(p)) release_successor();
      if (p.shares > 1 && !add_shares(p, shared, sum, work, thread)) continue;
      Store90<float, true>(p.epilogue).store(sum, main.own(), row0, work.tile_m(p) * Tiles::kTokens);
    }
  }

  // Of the warpgroups behind the first one, where some widen and some multiply.
  template <class Ready>
  CUTLASS_DEVICE static void share_work(const Params& p, SharedStorage& shared, Pipeline& pipeline, Ready& ready,
                                        int thread) {
    constexpr int kWidening = 128 * Tiles::kWideners;
    if (thread < kWidening) {
      cutlass::arch::warpgroup_reg_dealloc<Warps::kWiden>();
      wait_for_predecessor();
      Widener90<Tiles> widener(p, shared.tensors, pipeline, ready, thread);
      for (Work work(p); work.is_left(p); work.advance(p))
        widener.run(work.tile_n(p) * Tiles::kChannels, work.first, work.count);
    } else {
      cutlass::arch::warpgroup_reg_alloc<Warps::kMultiply>();
      Main main(p, shared.tensors, pipeline, ready, thread - kWidening);
      multiply(p, shared, main, thread - kWidening);
    }
  }

  // Of one block; of a cluster's blocks, before one of them signals to another.
  CUTLASS_DEVICE static void meet() {
    if constexpr (kCluster == 1) {
      __syncthreads();
    } else {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    }
  }

  CUTLASS_DEVICE static void fetch(const Params& p, SharedStorage& shared, Pipeline& pipeline, int warp) {
    cutlass::arch::warpgroup_reg_dealloc<Warps::kFetch>();
    if (warp == 0 && cute::elect_one_sync()) produce(p, shared, pipeline);
  }

  CUTLASS_DEVICE static typename Pipeline::Params pipeline_options(int warpgroup) {
    typename Pipeline::Params options;
    options.transaction_bytes = Tiles::kTransactionBytes;
    options.role = warpgroup == 0 ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
    options.is_leader = threadIdx.x % 128 == 0;
    options.num_consumers = Warps::kConsumers;
    return options;
  }

  CUTLASS_DEVICE static void run(const Params& p, char* raw) {
    auto& shared = *reinterpret_cast<SharedStorage*>(raw);
    const int warpgroup = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();
    const int thread = static_cast<int>(threadIdx.x) - 128;  // of the warpgroups behind the first one
    Pipeline pipeline(shared.pipeline, pipeline_options(warpgroup), typename Tiles::ClusterShape{});
    if constexpr (Tiles::kWideners == 0) {
      meet();
      if (warpgroup == 0) {
        fetch(p, shared, pipeline, warp);
      } else {
        cutlass::arch::warpgroup_reg_alloc<Warps::kMultiply>();
        Main main(p, shared.tensors, pipeline, shared.pipeline, thread);
        multiply(p, shared, main, thread);
      }
    } else {
      using Ready = typename Warps::Ready;
      typename Ready::Params ready_options;
      ready_options.role =
          warpgroup <= Tiles::kWideners ? Ready::ThreadCategory::Producer : Ready::ThreadCategory::Consumer;
      ready_options.producer_arv_count = 4;  // warps
      ready_options.consumer_arv_count = 8;
      Ready ready(shared.ready, ready_options);
      meet();
      if (warpgroup == 0)
        fetch(p, shared, pipeline, warp);
      else
        share_work(p, shared, pipeline, ready, thread);
    }
  }
};

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    gemm_weight_only90_kernel(const __grid_constant__ typename Kernel::Params params) {
  extern __shared__ __align__(1024) char weight_only90_shared[];
  Kernel::run(params, weight_only90_shared);
}

// Main loops over scaled sums, of weights that are never rounded, and over rounded weights: names for the kernel table.
template <class Math, int M, int K, int Cluster>
struct ScaledSums90 {
  static_assert(K == 256 || (K == 128 && Cluster == 1), "steps of 256 codes are widened in registers");
  using Tiles = cute::conditional_t<K == 256, RegisterTiles90<Math, M, Cluster>, WeightOnlyTiles90<Math, M>>;
};
template <class Math, int M, int K, int Cluster>
struct RoundedWeights90 {
  using Tiles = RoundedTiles90<Math, M, Cluster>;
  static_assert(Tiles::kDepth == K, "64 bytes of a channel are a step");
};

template <template <class, int, int, int> class Loop, template <class> class Math, int M, int N, int K, int ClusterM,
          int ClusterN, class Schedule>
struct GemmSm90WeightOnly {
  static_assert(Schedule::kSwapped && N == 128 && ClusterM == 1);
  template <class Float>
  using Tiles = typename Loop<Math<Float>, M, K, ClusterN>::Tiles;

  // How a launch divides K, and what it needs for that.
  struct Shares {
    int64_t tiles, count, steps;  // of clusters; of K: shares, and steps of one

    explicit Shares(const GemmCall& call) {
      const GemmProblem& p = call.problem;
      tiles = ceil_div(p.m, M) * ceil_div(p.n, N * ClusterN);
      count = k_splits(p.m, p.n, p.k, M, N * ClusterN, K, clusters(call));
      steps = ceil_div(ceil_div(p.k, K), count);
    }
    static int64_t clusters(const GemmCall& call) { return std::max(call.device.sm_count / ClusterN, 1); }
    int64_t arrival_bytes() const { return ceil_div(tiles * ClusterN * 2 * 4, 256) * 256; }
    Workspace workspace() const {
      if (count == 1) return {};
      return {arrival_bytes() + tiles * ClusterN * count * M * N * 4, 0, arrival_bytes()};
    }
  };

  static Workspace workspace(const GemmCall& call) { return Shares(call).workspace(); }

  template <class Float>
  static void run_as(const GemmCall& call) {
    using Copies = Tiles<Float>;
    using Kernel = WeightOnlyKernel90<Copies>;
    const GemmProblem& p = call.problem;
    const DeviceGuard guard(call.context.device);  // whose tensor maps are looked up
    const int64_t codes_per_byte = 8 / bits_of(Copies::Math::kW);
    const int32_t row_bytes = static_cast<int32_t>(ceil_div(p.k, codes_per_byte));
    const Shares shares(call);
    typename Kernel::Params params{Copies::tensor_map_x(static_cast<const typename Copies::X*>(call.operands.x),
                                                        static_cast<int>(p.m), static_cast<int>(p.k), p.ldx),
                                   Copies::tensor_map_w(static_cast<const uint8_t*>(call.operands.w),
                                                        static_cast<int>(p.n), row_bytes, p.ldw / codes_per_byte),
                                   call.operands.w_scale, p.has_w_zero_point ? call.operands.w_zero_point : nullptr,
                                   epilogue_params(call)};
    params.epilogue.w_scale = nullptr;
    params.epilogue.plain90 = plain_out90(params.epilogue, p.out_align);  // scales are in the sums
    params.depth = static_cast<int32_t>(p.k);
    params.row_bytes = row_bytes;
    params.groups = p.group_size == 0 ? 1 : static_cast<int32_t>(p.k / p.group_size);
    params.steps = static_cast<int32_t>(ceil_div(p.k, K));
    params.group_codes =
        static_cast<int32_t>(p.group_size == 0 ? std::max<int64_t>(params.steps, 1) * K : p.group_size);
    params.tiles_n = static_cast<int32_t>(ceil_div(p.n, N * ClusterN));
    params.tiles = static_cast<int32_t>(shares.tiles);
    params.shares = static_cast<int32_t>(shares.count);
    params.share_steps = static_cast<int32_t>(shares.steps);
    if (shares.count > 1) {
      params.arrivals = static_cast<uint32_t*>(call.operands.workspace);
      params.partials =
          reinterpret_cast<float4*>(static_cast<uint8_t*>(call.operands.workspace) + shares.arrival_bytes());
    }
    LaunchShape shape;
    const int64_t work = std::max<int64_t>(shares.tiles * shares.count, 1);
    shape.grid = dim3(static_cast<unsigned>(std::min(work, Shares::clusters(call)) * ClusterN));
    shape.cluster = dim3(ClusterN);
    shape.block = dim3(Kernel::kThreads);
    shape.shared_bytes = static_cast<int>(sizeof(typename Kernel::SharedStorage));
    shape.overlaps = true;
    launch<gemm_weight_only90_kernel<Kernel>>(call.name, shape, call.context, params);
  }

  static void run(const GemmCall& call) {
    call.problem.x == DType::f16 ? run_as<__half>(call) : run_as<__nv_bfloat16>(call);
  }
};

}  // namespace pyquant::cuda
