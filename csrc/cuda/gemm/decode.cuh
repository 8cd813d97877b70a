// Kernels for few tokens: the weights are read once, at the memory's speed, and everything else hides behind.
//   partition: a block owns 32 or 128 channels of up to 8, 16, 32 or 48 tokens. A warp holds 32 of the channels; the
//   others of its 8 warps hold other channels of the same codes (side by side) or take turns along K, a unit of work
//   each (64 or 128 codes, or scale groups), so that a block reads whole lines of a row at a time. Blocks may share the
//   K of a tile (core/decode_split.h): on sm_90 as a cluster that adds its sums through distributed shared memory,
//   elsewhere through a workspace, where the block that arrives last adds. loads: 16 bytes of weights straight into
//   registers, `Stages` steps ahead, past L1; the activations of a step, once for all warps side by side, go to shared
//   memory by cp.async, equally far ahead: a block of 128 channels asks L2 for them a fourth as often as four of 32.
//   The main loop has one barrier a step, of the warps side by side. group scales of integer codes: the sums of a round
//   of units, one for each part of K, meet in shared memory, already scaled, and one thread per output adds them in
//   ascending order: the same bits as every other kernel. K is then not shared by blocks. group scales of float
//   activations: each warp scales its own sums (outside of the bit contract). limits: rows of x and w on 16-byte
//   boundaries, K a multiple of 16 (int4 weights: 32). Any N, output and residual.
#pragma once
#include "core/bounds.h"
#include "core/steps.h"
#include "cuda/gemm/decode_sums.cuh"
#include "cuda/launch.h"
#include "cuda/overlap.cuh"

namespace pyquant::cuda {

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kResident)
    decode_kernel(const DecodeOperands o, const EpilogueParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  DecodeBlock<T> block{o, p, shared};
  block.start_addresses();
  if constexpr (T::kCluster) {
    block.prefetch();
    release_successor();
    wait_for_predecessor();
  }
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
  Token token{};
  if (thread < T::kTokens) token = load_token(p, block.m0 + thread);
  DecodeStage<T> stage[T::kStages];
  block.begin();
  if constexpr (T::kOrdered) begin_rounds(block);
#pragma unroll
  for (int s = 0; s < T::kStages - 1; ++s) block.load(stage[s], s);
  __shared__ float x_scale[T::kTokens];  // for the epilogue, behind barriers to come
  __shared__ int32_t x_zero_point[T::kTokens];
  if (thread < T::kTokens) x_scale[thread] = token.x_scale, x_zero_point[thread] = token.zero_point;

  // The unit that is multiplied: its step, the codes left of the current group, the group in the unit; the round.
  int32_t step = 0, left = o.group_codes, part = 0, round = 0;
  for (int32_t first = 0; first < o.steps; first += T::kStages) {
#pragma unroll
    for (int s = 0; s < T::kStages; ++s) {
      if (first + s >= o.steps) break;
      wait_for_copies<T::kStages - 2>();
      block.meet();
      const int free = (s + T::kStages - 1) % T::kStages;  // of the step before
      block.load(stage[free], free);
      if constexpr (T::kGrouped) {
        const bool complete = ++step == o.unit_steps;
        block.multiply_groups(stage[s], s, complete, left, part);
        if (complete) {
          step = 0;
          if constexpr (T::kOrdered) add_round(block, round++);
        }
      } else {
        block.multiply_step(stage[s], s);
      }
    }
  }
  wait_for_copies<0>();

  // The channel's operands, the same for all outputs of this thread: asked for here, so that they arrive while sums are
  // added.
  int32_t row, column;
  T::pair(0, block.share, row, column);
  Channel channel[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int32_t n = block.beyond(row) ? p.n : block.n0 + column + c;
    if constexpr (T::kGrouped) {
      channel[c] = Channel{};  // spelled out: nvcc 13.0 initialises the first row of such an array only
      channel[c].bias = p.bias != nullptr && n < p.n ? __ldg(p.bias + n) : -0.f;
    } else {
      channel[c] = load_channel(p, n);
    }
  }
  __syncthreads();  // the ring is read no more
  if constexpr (!T::kOrdered) {
    lay_sums(block);
    __syncthreads();
  }
  const bool shares = !T::kOrdered && gridDim.z > 1;
  if (shares && !share_sums(block)) return;
  const CodeLimits limits = load_code_limits(p);
#pragma unroll 1  // the epilogue's forms for every type are long
  for (int i = 0; i < T::kPairs; ++i) {
    T::pair(i, block.share, row, column);
    if (block.beyond(row)) break;
    const Two<typename T::Sum> v = shares ? add_blocks(block, row, column) : add_parts(block, row, column);
    typename T::Sum sum[2] = {v.a, v.b};
    if constexpr (!T::kOrdered && T::Math::kAccShift != 0) sum[0] >>= T::Math::kAccShift, sum[1] >>= T::Math::kAccShift;
    finish_row(sum, channel, Token{x_scale[row], x_zero_point[row]}, limits, p, block.m0 + row, block.n0 + column);
  }
  if constexpr (T::kCluster) {
    if (shares) cluster_barrier();  // until then others read this block's sums
  }
}

// An instance: tile of tokens x channels x codes, and for each type of activations what multiplies.
template <int kTileM, int kTileN, int kTileK, int kStages, bool kCluster, class... Maths>
struct GemmDecode {
  struct Work {
    DecodeOperands operands{};
    int64_t tiles = 0;
    int32_t split = 1;
  };

  template <class Math>
  static Work work_of(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    constexpr int32_t step = 4 * Math::kCodes;
    static_assert(step == kTileK, "the K step follows from the weights' type");
    Work work;
    DecodeOperands& o = work.operands;
    const int32_t group = static_cast<int32_t>(p.group_size);
    o.k = static_cast<int32_t>(p.k);
    o.groups = group == 0 ? 1 : o.k / group;
    o.group_codes = group;
    if (Math::kBlocked) {
      // A unit is whole blocks: two groups where one ends in the middle of a block.
      o.unit_groups = group % step != 0 ? 2 : 1;
      o.unit_codes = group == 0 ? step : group * o.unit_groups;
    } else {
      o.unit_groups = group != 0 && step % group == 0 ? step / group : 1;
      o.unit_codes = group == 0 || step % group == 0 ? step : group;
    }
    o.unit_steps = (o.unit_codes + step - 1) / step;
    o.tiles_m = static_cast<int32_t>((p.m + kTileM - 1) / kTileM);
    work.tiles = o.tiles_m * ((p.n + kTileN - 1) / kTileN);
    const bool ordered = group != 0 && std::is_same_v<typename Math::Acc, int32_t>;
    const int64_t units = (p.k + o.unit_codes - 1) / o.unit_codes;
    const int32_t sums = decode_sums_units(is_float(Math::kX), is_packed(Math::kW));
    if (!ordered) work.split = decode_split(work.tiles, units, kTileN, call.device.sm_count, kCluster, sums);
    const int64_t stride = int64_t{work.split} * decode_depth_warps(kTileN);  // units from one of a warp to its next
    o.steps = static_cast<int32_t>((units + stride - 1) / stride) * o.unit_steps;
    // Beyond K nothing is loaded: there it may be anything larger than K.
    o.ahead = static_cast<int32_t>(std::min(stride * o.unit_codes - (o.unit_steps - 1) * step, kInt32Max));
    return work;
  }

  static int64_t arrival_bytes(const Work& work) { return (work.tiles * 4 + 255) / 256 * 256; }

  static Workspace workspace_of(const Work& work) {
    if (kCluster || work.split == 1) return {};
    return {arrival_bytes(work) + work.tiles * work.split * kTileM * kTileN * 4, 0, arrival_bytes(work)};
  }

  template <class Math, int kTokens, DecodeGroups kGroups>
  static void run_kernel(const GemmCall& call, const Work& work) {
    using Traits = DecodeTraits<Math, kTileN, kTokens, kStages, kGroups, kCluster>;
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(work.tiles), 1, static_cast<unsigned>(work.split));
    shape.block = dim3(Traits::kThreads);
    if (kCluster) shape.cluster = dim3(1, 1, static_cast<unsigned>(work.split));
    shape.overlaps = kCluster;
    shape.shared_bytes = Traits::shared_bytes(work.operands.unit_groups);
    launch<decode_kernel<Traits>>(call.name, shape, call.context, work.operands, epilogue_params(call));
  }

  template <class Math, DecodeGroups kGroups>
  static void run_tokens(const GemmCall& call, const Work& work) {
    if constexpr (kTileM == 16) {
      if (call.problem.m <= 8) return run_kernel<Math, 8, kGroups>(call, work);
    }
    run_kernel<Math, kTileM, kGroups>(call, work);
  }

  template <class Math>
  static void run_math(const GemmCall& call) {
    const GemmProblem& p = call.problem;
    Work work = work_of<Math>(call);
    DecodeOperands& o = work.operands;
    o.x = static_cast<const uint8_t*>(call.operands.x);
    o.w = static_cast<const uint8_t*>(call.operands.w);
    o.ldx_bytes = p.ldx * bits_of(Math::kX) / 8;
    o.ldw_bytes = p.ldw * bits_of(Math::kW) / 8;
    if constexpr (Math::kSteps && !Math::kBlocked) {
      const int64_t shared_twice = p.step_size / 32 * 2;
      o.w_step = call.operands.w_step;
      o.step_row = static_cast<int32_t>(step_row(p.n));
      o.step_share = static_cast<uint32_t>(((int64_t{1} << 32) + shared_twice - 1) / shared_twice);
    }
    o.w_scale = call.operands.w_scale;
    o.w_sum = p.has_zero_point ? call.operands.w_sum : nullptr;
    o.w_zero_point = p.has_w_zero_point ? call.operands.w_zero_point : nullptr;
    if (workspace_of(work).bytes != 0) {
      o.arrivals = static_cast<uint32_t*>(call.operands.workspace);
      o.partials = static_cast<uint8_t*>(call.operands.workspace) + arrival_bytes(work);
    }
    constexpr bool is_float = std::is_same_v<typename Math::Acc, float>;
    if constexpr (Math::kTakesGroups && (is_float || (kTileM == 16 && kCluster == Math::kBlocked))) {
      if constexpr (!Math::kBlocked) {
        if (o.unit_groups > 1) return run_tokens<Math, DecodeGroups::parts>(call, work);
      }
      if (p.group_size != 0) return run_tokens<Math, DecodeGroups::whole>(call, work);
    }
    run_tokens<Math, DecodeGroups::none>(call, work);
  }

  static void run(const GemmCall& call) {
    static_cast<void>(((Maths::takes(call.problem.x) && (run_math<Maths>(call), true)) || ...));
  }

  static Workspace workspace(const GemmCall& call) {
    Workspace needed;
    static_cast<void>(((Maths::takes(call.problem.x) && (needed = workspace_of(work_of<Maths>(call)), true)) || ...));
    return needed;
  }
};

}  // namespace pyquant::cuda
