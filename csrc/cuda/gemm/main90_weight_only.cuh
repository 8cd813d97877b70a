// Main loops for Hopper over integer weights as in a checkpoint, under 16-bit activations, one for each kind of warps.
//   Widener90: loads weights from shared memory, widens them less their zero points, which is exact, and stores them
//   there again as the tensor cores read floats. A lane has eight neighbouring codes at a time, so nothing is exchanged.
//   MainWeightOnly90: multiplies, and adds the float products of groups, scaled: weights are never rounded.
// Both in one warpgroup would wait for each other: what widens has the instructions of a step, what multiplies its
// registers, and operands from registers would hold a warp up until the instruction before them is done.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/cutlass.h>
#include <cutlass/numeric_types.h>
#include <cutlass/pipeline/pipeline.hpp>

#include "cuda/gemm/decode_math.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/group_scales90.cuh"

namespace pyquant::cuda {

template <class Float>
struct WgmmaFloat {
  using type = cutlass::half_t;
};
template <>
struct WgmmaFloat<__nv_bfloat16> {
  using type = cutlass::bfloat16_t;
};

// Shared memory of a tile, 128 channels wide, and its copies: steps of 128 codes.
template <class Math_, int Tokens, int Cluster_>
struct WeightOnlyTiles90 {
  using Math = Math_;
  using X = typename WgmmaFloat<typename Math::X>::type;
  static constexpr int kChannels = 128, kTokens = Tokens, kDepth = 128, kCluster = Cluster_;
  static constexpr int kRowBytes = 64;  // of weights that lie together: their pieces of eight rows are in all banks
  static constexpr int kParts = kDepth * bits_of(Math::kW) / 8 / kRowBytes;
  static constexpr int kWBytes = kChannels * kRowBytes * kParts, kXBytes = Tokens * kDepth * 2;
  static constexpr uint32_t kTransactionBytes = kWBytes + kXBytes;
  static constexpr int kReady = 2, kReadyBytes = kChannels * kDepth * 2;  // steps of widened weights
  static constexpr int kFit = (227 * 1024 - 3 * 1024 - kReady * kReadyBytes) / (kWBytes + kXBytes),
                       kStages = kFit < 8 ? kFit : 8;
  using LayoutX =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<X>{},
                                   cute::make_shape(cute::Int<Tokens>{}, cute::Int<kDepth>{}, cute::Int<kStages>{})));
  using LayoutReady =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<X>{},
                                   cute::make_shape(cute::Int<kChannels>{}, cute::Int<kDepth>{}, cute::Int<kReady>{})));
  using LayoutW = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_K_SW64_Atom<uint8_t>{},
      cute::make_shape(cute::Int<kChannels>{}, cute::Int<kRowBytes>{}, cute::Int<kParts * kStages>{})));
  using TileX = cute::Shape<cute::Int<Tokens>, cute::Int<kDepth>>;
  using TileW = cute::Shape<cute::Int<kChannels>, cute::Int<kRowBytes>>;
  using Stride = cute::Stride<int64_t, cute::_1>;
  using CopyX = cute::conditional_t<kCluster == 1, cute::SM90_TMA_LOAD, cute::SM90_TMA_LOAD_MULTICAST>;
  using Pipeline = cutlass::PipelineTmaAsync<kStages>;
  using State = cutlass::PipelineState<kStages>;
  using Ready = cutlass::PipelineAsync<kReady>;
  using ReadyState = cutlass::PipelineState<kReady>;

  struct TensorStorage : cute::aligned_struct<1024, cute::_0> {
    cute::array_aligned<X, cute::cosize_v<LayoutX>, 1024> x;
    cute::array_aligned<X, cute::cosize_v<LayoutReady>, 1024> ready;
    cute::array_aligned<uint8_t, cute::cosize_v<LayoutW>, 1024> w;
  };

  static auto tensor_map_x(const X* x, int tokens, int depth, int64_t ld) {
    return cute::make_tma_copy(
        CopyX{}, cute::make_tensor(x, cute::make_layout(cute::make_shape(tokens, depth), Stride{ld, {}})),
        LayoutX{}(cute::_, cute::_, cute::Int<0>{}), TileX{}, cute::Int<kCluster>{});
  }
  static auto tensor_map_w(const uint8_t* w, int channels, int bytes, int64_t ld) {
    return cute::make_tma_copy(
        cute::SM90_TMA_LOAD{}, cute::make_tensor(w, cute::make_layout(cute::make_shape(channels, bytes), Stride{ld, {}})),
        LayoutW{}(cute::_, cute::_, cute::Int<0>{}), TileW{}, cute::_1{});
  }
  using TmaX = decltype(tensor_map_x(nullptr, 0, 0, 0));
  using TmaW = decltype(tensor_map_w(nullptr, 0, 0, 0));

  CUTLASS_DEVICE static auto shared_x(TensorStorage& storage) {
    return cute::make_tensor(cute::make_smem_ptr(storage.x.data()), LayoutX{});
  }
  CUTLASS_DEVICE static auto shared_ready(TensorStorage& storage) {
    return cute::make_tensor(cute::make_smem_ptr(storage.ready.data()), LayoutReady{});
  }
  CUTLASS_DEVICE static auto shared_w(TensorStorage& storage) {
    return cute::make_tensor(cute::make_smem_ptr(storage.w.data()), LayoutW{});
  }
};

template <class Tiles>
struct WeightOnlyParams90 {
  typename Tiles::TmaX tma_x;
  typename Tiles::TmaW tma_w;
  const float* w_scale;         // [n, groups] or null
  const int32_t* w_zero_point;  // likewise
  EpilogueParams epilogue;      // of the scaled sum
  int32_t depth = 0, row_bytes = 0;
  int32_t groups = 1, group_codes = 0;  // codes: a multiple of 128, 64 or 32
  int32_t tiles = 0, tiles_n = 0;       // of a cluster, which has neighbouring channels
  int32_t steps = 0, shares = 1, share_steps = 0;
  uint32_t* arrivals = nullptr;  // [tile of a block][warpgroup], cleared before the launch
  float4* partials = nullptr;    // [tile of a block][warpgroup][share][quarter of a thread's sums][thread]
};

// One of two warpgroups, for 64 channels.
template <class Tiles>
class Widener90 {
  using Math = typename Tiles::Math;
  using Offset = typename Math::Offset;
  static constexpr int kParts = Tiles::kParts;
  static constexpr bool kNibbles = is_packed(Math::kW);
  static constexpr int kEights = kNibbles ? 4 : 2;  // of codes in a piece of 16 bytes

 public:
  using Params = WeightOnlyParams90<Tiles>;
  using Storage = typename Tiles::TensorStorage;

  CUTLASS_DEVICE Widener90(const Params& params, Storage& storage, typename Tiles::Pipeline& pipeline,
                           typename Tiles::Ready& ready, int thread)
      : p_(params),
        storage_(storage),
        pipeline_(pipeline),
        ready_(ready),
        row_(thread / 32 * 16 + thread % 8),
        piece_(thread % 32 / 8),
        is_first_(thread % 32 == 0),
        ready_state_(cutlass::make_producer_start_state<typename Tiles::Ready>()) {}

  CUTLASS_DEVICE void run(int32_t row0, int32_t first, int32_t count) {
    Points now{}, next{};
    load(now, row0, first);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t step = first; step < first + count; ++step) {
      load(next, row0, step + 1);
      pipeline_.consumer_wait(state_);
      uint4 words[2][kParts];
      const uint8_t* w = storage_.w.data() + state_.index() * Tiles::kWBytes + row_ * Tiles::kRowBytes +
                         (piece_ ^ (row_ / 2 % 4)) * 16;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kParts; ++i)
        words[i % 2][i / 2] =
            *reinterpret_cast<const uint4*>(w + (i / 2 * Tiles::kChannels + i % 2 * 8) * Tiles::kRowBytes);
      ready_.producer_acquire(ready_state_);
      auto* to = reinterpret_cast<uint8_t*>(storage_.ready.data()) + ready_state_.index() * Tiles::kReadyBytes + row_ * 128;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kParts; ++i) {
        const int h = i % 2, part = i / 2;
        const Offset offset = Math::offset(now.zero_point[h][part]);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < kEights; ++e) {
          // Of the 16 eights of a step: halves of 128 rows of 128 bytes each, whose pieces trade places by row.
          const int eight = kNibbles ? 4 * piece_ + e : 8 * part + 2 * piece_ + e;
          *reinterpret_cast<uint4*>(to + eight / 8 * (Tiles::kReadyBytes / 2) + h * 8 * 128 +
                                    (eight % 8 ^ row_ % 8) * 16) = widen(words[h][part], e, offset);
        }
      }
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (is_first_) ready_.producer_commit(ready_state_);
      pipeline_.consumer_release(state_);
      ++ready_state_;
      ++state_;
      now = next;
    }
  }

 private:
  // Zero points of what a lane has of a step: channels g and g + 8.
  struct Points {
    int32_t zero_point[2][kParts];
  };

  CUTLASS_DEVICE void load(Points& points, int32_t row0, int32_t step) const {
    if (p_.w_zero_point == nullptr) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kParts; ++i) {
      const int32_t n = row0 + row_ + i % 2 * 8;
      const int32_t group = (step * Tiles::kDepth + i / 2 * 64 + piece_ * 8 * kEights) / p_.group_codes;
      points.zero_point[i % 2][i / 2] =
          n < p_.epilogue.n && group < p_.groups ? __ldg(p_.w_zero_point + int64_t{n} * p_.groups + group) : 0;
    }
  }

  // Eight neighbouring codes as floats.
  CUTLASS_DEVICE static uint4 widen(const uint4& words, int e, const Offset& offset) {
    uint32_t out[4];
    if constexpr (kNibbles) {
      // Math takes the low nibbles of both halves: of a byte, and of it shifted.
      const uint32_t word = word_of(words, e), shifted = word >> 4;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        uint32_t pair[4];
        Math::weights(make_uint4(__byte_perm(word, shifted, 0x0400 + 0x0101 * i), 0, 0, 0), 0, offset, pair);
        out[i] = pair[0];
      }
    } else {
      Math::weights(words, e, offset, out);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }

  const Params& p_;
  Storage& storage_;
  typename Tiles::Pipeline& pipeline_;
  typename Tiles::Ready& ready_;
  const int row_, piece_;
  const bool is_first_;
  typename Tiles::State state_;
  typename Tiles::ReadyState ready_state_;
};

// One of two warpgroups, for 64 channels.
template <class Tiles>
class MainWeightOnly90 {
  using X = typename Tiles::X;
  static constexpr int kTokens = Tiles::kTokens;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<X, X, float, cute::Shape<cute::_64, cute::Int<kTokens>, cute::_64>>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  static constexpr int kInstructions = Tiles::kDepth / 16;  // of a step

 public:
  using Params = WeightOnlyParams90<Tiles>;
  using Storage = typename Tiles::TensorStorage;
  using Sum = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_128, cute::Int<kTokens>>{}));

  CUTLASS_DEVICE MainWeightOnly90(const Params& params, Storage& storage, typename Tiles::Pipeline& pipeline,
                                  typename Tiles::Ready& ready, int thread)
      : p_(params),
        storage_(storage),
        pipeline_(pipeline),
        ready_(ready),
        thread_(thread),
        warpgroup_(__shfl_sync(0xffffffffu, thread / 128, 0)) {
    if (warpgroup_ == 1) pass_turn();
  }

  // Coordinates of the thread's sums within a tile.
  CUTLASS_DEVICE auto own() const {
    return Mma{}.get_thread_slice(thread_).partition_C(
        cute::make_identity_tensor(cute::Shape<cute::_128, cute::Int<kTokens>>{}));
  }

  // The sums over `count` steps, from step `first` on, of the tile that starts at channel row0.
  CUTLASS_DEVICE void run(Sum& sum, int32_t row0, int32_t first, int32_t count) {
    cute::fill(sum, 0.f);
    if (count <= 0) return;
    const int32_t group = first * Tiles::kDepth / p_.group_codes;
    const int32_t row = 64 * warpgroup_ + thread_ % 128 / 32 * 16 + thread_ % 32 / 4;
    Groups groups({p_.w_scale, nullptr, p_.epilogue.n, p_.groups}, row0 + row, group);
    if (p_.group_codes == 32)
      multiply<4>(sum, groups, 0, count);
    else if (p_.group_codes == 64)
      multiply<2>(sum, groups, 0, count);
    else
      multiply<1>(sum, groups, (group + 1) * (p_.group_codes / Tiles::kDepth) - first, count);
  }

 private:
  using Groups = GroupScales<false>;

  // Multiplies kCount instructions of the step that is due, and ends them.
  template <int kCount>
  CUTLASS_DEVICE void multiply_part(int first, Sum& product, bool adds) const {
    const auto slice = Mma{}.get_slice(128 * warpgroup_);
    const auto w = slice.make_fragment_A(slice.partition_A(Tiles::shared_ready(storage_)));
    const auto x = slice.make_fragment_B(slice.partition_B(Tiles::shared_x(storage_)));
    const int stage = state_.index(), ready = ready_state_.index();
    Mma mma;
    mma.accumulate_ = adds ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero;
    cute::warpgroup_fence_operand(product);
    await_turn();
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int i = first; i < first + kCount; ++i) {
      cute::gemm(mma, w(cute::_, cute::_, i, ready), x(cute::_, cute::_, i, stage), product);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
      if (i == first + kCount - 2) cute::warpgroup_commit_batch();
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<1>();
    pass_turn();  // the other's instructions queue behind the last one
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(product);
  }

  static CUTLASS_DEVICE void add(const Sum& product, Sum& sum, const GroupFactors& group) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < cute::size(Sum{}); ++i) sum(i) = ffma(product(i), group.scale[i / 2 % 2], sum(i));
  }

  // Count: groups of a step; 1: a group is a step or several, `left` of them the first one.
  template <int Count>
  CUTLASS_DEVICE void multiply(Sum& sum, Groups& groups, int32_t left, int32_t count) {
    Sum product;
    int32_t taken = 0;
    bool adds = false;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int32_t step = 0; step < count; ++step) {
      ready_.consumer_wait(ready_state_);
      pipeline_.consumer_wait(state_);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Count; ++i) {
        multiply_part<kInstructions / Count>(i * kInstructions / Count, product, adds);
        if (i == Count - 1) release();
        // A share may end in the middle of a group.
        adds = Count == 1 && --left != 0 && step + 1 < count;
        if (adds) continue;
        add(product, sum, groups.take(taken++));
        left = p_.group_codes / Tiles::kDepth;
      }
    }
  }

  CUTLASS_DEVICE void release() {
    if (thread_ % 32 == 0) ready_.consumer_release(ready_state_);
    pipeline_.consumer_release(state_);
    ++ready_state_;
    ++state_;
  }

  // The warpgroups take turns at the tensor cores: while they work for one, the other adds. Left alone both would do the
  // same at the same time.
  CUTLASS_DEVICE void await_turn() const {
    cutlass::arch::NamedBarrier::sync(256, static_cast<uint32_t>(kTurns + warpgroup_));
  }
  CUTLASS_DEVICE void pass_turn() const {
    cutlass::arch::NamedBarrier::arrive(256, static_cast<uint32_t>(kTurns + 1 - warpgroup_));
  }

  static constexpr int kTurns = 2;  // barriers 0 and 1 are those of a warpgroup's own threads (sm90_weight_only.cuh)
  const Params& p_;
  Storage& storage_;
  typename Tiles::Pipeline& pipeline_;
  typename Tiles::Ready& ready_;
  const int thread_, warpgroup_;
  typename Tiles::State state_;
  typename Tiles::ReadyState ready_state_;
};

}  // namespace pyquant::cuda
