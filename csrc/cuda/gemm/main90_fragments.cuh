// What the main loops for Hopper share whose warps widen integer weights in their own registers, from where the tensor
// cores take them as the left operand (main90_weight_only_registers.cuh, main90_weight_only_rounded.cuh).
#pragma once
#include "cuda/gemm/group_scales90.cuh"
#include "cuda/gemm/weight_only_tiles90.cuh"

namespace pyquant::cuda {

// Copies, and as many buffers of them as there is room for.
template <class Copies_>
struct FragmentTiles90 : WeightOnlyBuffers90<Copies_, stages_weight_only90(Copies_::kTransactionBytes, 0)> {
  using Copies = Copies_;
  static constexpr int kWideners = 0;
  // Each warp says for itself to each block of the cluster that it has read a buffer: what a warpgroup's products wait
  // for orders no other warp's reads. The pipeline counts warpgroups where there are clusters.
  static constexpr int kConsumers = Copies::kCluster == 1 ? 8 : 8 * 128;

  struct TensorStorage : cute::aligned_struct<1024, cute::_0> {
    cute::array_aligned<typename Copies::X, cute::cosize_v<typename FragmentTiles90::LayoutX>, 1024> x;
    cute::array_aligned<uint8_t, cute::cosize_v<typename FragmentTiles90::LayoutW>, 1024> w;
  };
};

// One of two warpgroups, for 64 channels. Params: a launch's, or what a tile of many experts has of them.
template <class Tiles, class Params_ = WeightOnlyParams90<Tiles>>
class MainFragments90 {
 protected:
  using X = typename Tiles::X;
  static constexpr int kTokens = Tiles::kTokens, kDepth = Tiles::kDepth;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<X, X, float, cute::Shape<cute::_64, cute::Int<kTokens>, cute::_64>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>(),
      cute::Layout<cute::Shape<cute::_2, cute::_1, cute::_1>>{}));
  using Groups = GroupScales<false>;
  template <int Codes>
  using Fragment = decltype(Mma{}.get_thread_slice(0).partition_fragment_A(
      cute::make_tensor(static_cast<X*>(nullptr), cute::Layout<cute::Shape<cute::_128, cute::Int<Codes>>>{})));

 public:
  using Params = Params_;
  using Storage = typename Tiles::TensorStorage;
  using Sum = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_128, cute::Int<kTokens>>{}));
  using Barriers = typename Tiles::Pipeline::SharedStorage;

  CUTLASS_DEVICE MainFragments90(const Params& params, Storage& storage, typename Tiles::Pipeline& pipeline,
                                 Barriers& barriers, int thread)
      : p_(params),
        storage_(storage),
        pipeline_(pipeline),
        barriers_(barriers),
        thread_(thread),
        warpgroup_(__shfl_sync(0xffffffffu, thread / 128, 0)) {}

  // Coordinates of the thread's sums within a tile.
  CUTLASS_DEVICE auto own() const {
    return Mma{}.get_thread_slice(thread_).partition_C(
        cute::make_identity_tensor(cute::Shape<cute::_128, cute::Int<kTokens>>{}));
  }

 protected:
  // Of the tile that starts at channel row0, from group `first` on.
  CUTLASS_DEVICE Groups groups_of(int32_t row0, int32_t first) const {
    const int32_t row = thread_ / 32 * 16 + thread_ % 32 / 4;
    return Groups({p_.w_scale, p_.w_zero_point, p_.epilogue.n, p_.groups}, row0 + row, first);
  }

  // Starts the products of fragment `at` of a step, buffer `stage` of activations that lie as LayoutX says. `first`:
  // whether they begin a sum, or go on with one.
  template <int Codes, class LayoutX>
  CUTLASS_DEVICE void start(const Fragment<Codes>& w, Sum& product, int stage, int at, cute::GMMA::ScaleOut first) {
    const auto slice = Mma{}.get_slice(128 * warpgroup_);
    const auto x =
        slice.make_fragment_B(slice.partition_B(cute::make_tensor(cute::make_smem_ptr(storage_.x.data()), LayoutX{})));
    Mma mma;
    mma.accumulate_ = first;
    cute::warpgroup_fence_operand(product);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < Codes / 16; ++k) {
      cute::gemm(mma, w(cute::_, cute::_, k), x(cute::_, cute::_, at * (Codes / 16) + k, stage), product);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
  }

  CUTLASS_DEVICE void release() {
    const uint32_t block = thread_ % 32;
    barriers_.empty_barrier_[released_.index()].arrive(block, block < Tiles::kCluster);
    ++released_;
  }

  const Params& p_;
  Storage& storage_;
  typename Tiles::Pipeline& pipeline_;
  Barriers& barriers_;
  const int thread_, warpgroup_;
  typename Tiles::State state_, released_;  // of the step in front, of the one that is released next
};

}  // namespace pyquant::cuda
