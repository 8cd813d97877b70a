// Convolution without a matrix of patches for mma.sync: the CUTLASS 2.x main loop and the epilogue of the kernels for a
// matrix (sm80.cuh), whose rows of x are read out of padded images through a window (ImageRows, core/problem.h). Tiles
// of w, order of sums and stores are those of the product of patches, and so are the bits.
//   partition: as sm80.cuh; neighbouring blocks take the channels of the same pixels, which stay in L2.
//   addresses: 16 codes of one tap are a piece. Where a row begins is found once, where the taps of a step of K lie by
//   two divisions (multiplications by CUTLASS) for all rows of a thread. limits: whole pieces of channels and steps;
//   2^31 pieces of images.
#pragma once
#include "cuda/gemm/sm80.cuh"
#include "cuda/image_walk.cuh"

namespace pyquant::cuda {

// Images as the main loop reads them: pieces of 16 codes.
struct ImagePieces80 {
  static constexpr int kPiece = 16;
  const char* x;
  ImageWalk<uint32_t, kPiece> walk;
  int32_t m, k;
};

// Takes the place of MatrixRows, CUTLASS's iterator over tiles of a matrix, with its thread map and its order of K: the
// first tile is the one that may be short.
template <class MatrixRows>
class ImageRows80 {
 public:
  using ThreadMap = typename MatrixRows::ThreadMap;
  using Element = typename MatrixRows::Element;
  using AccessType = typename MatrixRows::AccessType;
  static constexpr int kAccessesPerVector = MatrixRows::kAccessesPerVector;

  __device__ __forceinline__ ImageRows80(const ImagePieces80& images, int first_row, int begin, int end, int thread)
      : images_(images) {
    const auto own = ThreadMap::initial_offset(thread);
    const int residue = (end - begin - 1) % kDepth + 1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first_row + own.strided() + i * ThreadMap::Delta::kStrided;
      rows_ |= (row < images.m ? 1u : 0u) << i;
      begin_[i] = images.walk.begin_of_row(row < images.m ? row : 0);
    }
    mask_ = own.contiguous() < residue ? rows_ : 0;
    to_next_ = residue;
    code_ = begin + own.contiguous();
    place_ = images.walk.place_in_row(code_);
  }

  __device__ __forceinline__ void set_iteration_index(int index) { index_ = index; }
  __device__ __forceinline__ ImageRows80& operator++() {
    ++index_;
    return *this;
  }
  __device__ __forceinline__ bool valid() const { return (mask_ >> index_ & 1u) != 0; }
  __device__ __forceinline__ const AccessType* get() const {
    return reinterpret_cast<const AccessType*>(images_.x + int64_t{begin_[index_] + place_} * ImagePieces80::kPiece);
  }
  __device__ __forceinline__ void clear_mask(bool clear = true) {
    if (clear) mask_ = 0;
  }
  // CUTLASS moves on by one tile along K, and clears the mask when none is left.
  __device__ __forceinline__ void add_tile_offset(const cutlass::MatrixCoord&) {
    if (is_first_) mask_ = rows_;
    code_ += to_next_;
    to_next_ = kDepth;
    is_first_ = false;
    place_ = images_.walk.place_in_row(code_);
  }

 private:
  static constexpr int kDepth = MatrixRows::Shape::kColumn, kRows = ThreadMap::Iterations::kStrided;
  static_assert(ThreadMap::Iterations::kContiguous == 1 && kAccessesPerVector == 1 && kRows <= 32,
                "a thread has one piece of each of its rows");
  static_assert(ThreadMap::kElementsPerAccess == ImagePieces80::kPiece, "plan/family.h says what channels divide by");

  const ImagePieces80& images_;
  uint32_t begin_[kRows], place_, rows_ = 0, mask_;
  int code_, to_next_, index_ = 0;
  bool is_first_ = true;
};

// A main loop with another iterator over x.
template <class Mma, template <class> class Rows>
struct ReadingRows80;
template <class Shape, class X, class SharedX, cutlass::arch::CacheOperation::Kind kCacheX, class W, class SharedW,
          cutlass::arch::CacheOperation::Kind kCacheW, class Sum, class Layout, class Policy, int kStages,
          cutlass::gemm::SharedMemoryClearOption kClear, class Enable, template <class> class Rows>
struct ReadingRows80<cutlass::gemm::threadblock::MmaMultistage<Shape, X, SharedX, kCacheX, W, SharedW, kCacheW, Sum,
                                                               Layout, Policy, kStages, kClear, Enable>,
                     Rows> {
  using type = cutlass::gemm::threadblock::MmaMultistage<Shape, Rows<X>, SharedX, kCacheX, W, SharedW, kCacheW, Sum,
                                                         Layout, Policy, kStages, kClear, Enable>;
};

template <class Types, class Schedule, class Tile, class Warp, int Stages>
struct ConvSm80 {
  using Product = GemmSm80<Types, Schedule, Tile, Warp, Stages>;
  using Mma = typename ReadingRows80<typename Product::Base::Mma, ImageRows80>::type;
  using Epilogue = typename Product::Epilogue;
  using Shares = typename Product::Shares;
  static constexpr int kThreads = Product::Kernel::kThreadCount;

  union SharedStorage {
    typename Mma::SharedStorage main_loop;
    typename Epilogue::SharedStorage epilogue;
  };
  static_assert(sizeof(SharedStorage) == sizeof(typename Product::Kernel::SharedStorage), "plan/accept.cpp counts so");

  struct Params {
    ImagePieces80 images;
    typename Mma::IteratorB::Params w_layout;
    typename Mma::IteratorB::Pointer w;
    int32_t tiles_n, share;  // blocks of the same pixels; codes of K of a block but the last
    EpilogueParams80 epilogue;
  };

  static __device__ __forceinline__ void block(const Params& p, SharedStorage& shared) {
    const auto number = static_cast<int32_t>(blockIdx.x);
    const int32_t tile_m = number / p.tiles_n, tile_n = number % p.tiles_n, n = p.epilogue.n;
    const int32_t begin = static_cast<int32_t>(blockIdx.z) * p.share, end = min(begin + p.share, p.images.k);
    const int thread = static_cast<int>(threadIdx.x), warp = cutlass::canonical_warp_idx_sync(), lane = thread % 32;
    typename Mma::IteratorA x_tiles(p.images, tile_m * Tile::kM, begin, end, thread);
    typename Mma::IteratorB w_tiles(p.w_layout, p.w, {end, n}, thread, {begin, tile_n * Tile::kN});
    Mma multiply(shared.main_loop, thread, warp, lane);
    typename Mma::FragmentC sums;
    sums.clear();
    multiply((end - begin + Tile::kK - 1) / Tile::kK, sums, x_tiles, w_tiles, sums);
    Epilogue epilogue(p.epilogue, shared.epilogue, thread, warp, lane);
    epilogue(sums, {tile_m, tile_n, 0}, cute::make_shape(p.images.m, n, 1), thread);
  }

  static Workspace workspace(const GemmCall& call) { return Product::workspace(call); }
  static void run(const GemmCall& call);
};

template <class Conv>
__global__ void __launch_bounds__(Conv::kThreads)
    gemm_conv80_kernel(const __grid_constant__ typename Conv::Params params) {
  extern __shared__ __align__(128) uint8_t conv80_shared[];
  Conv::block(params, *reinterpret_cast<typename Conv::SharedStorage*>(conv80_shared));
}

template <class Types, class Schedule, class Tile, class Warp, int Stages>
void ConvSm80<Types, Schedule, Tile, Warp, Stages>::run(const GemmCall& call) {
  const GemmProblem& p = call.problem;
  const int64_t tiles_m = ceil_div(p.m, Tile::kM), tiles_n = ceil_div(p.n, Tile::kN);
  LaunchShape shape;
  int64_t share = ceil_div(p.k, Tile::kK) * Tile::kK;
  if constexpr (Schedule::kSplit) {
    const Shares split(call);
    share = split.codes;
    shape.grid.z = static_cast<unsigned>(split.splits);
  }
  shape.grid.x = static_cast<unsigned>(tiles_m * tiles_n);
  shape.block = dim3(kThreads);
  shape.shared_bytes = static_cast<int>(sizeof(SharedStorage));
  const ImagePieces80 images{static_cast<const char*>(call.operands.x),
                             ImageWalk<uint32_t, ImagePieces80::kPiece>(p.image), static_cast<int32_t>(p.m),
                             static_cast<int32_t>(p.k)};
  const Params params{images,
                      typename Mma::IteratorB::Layout(p.ldw),
                      static_cast<typename Mma::IteratorB::Pointer>(const_cast<void*>(call.operands.w)),
                      static_cast<int32_t>(tiles_n),
                      static_cast<int32_t>(share),
                      {epilogue_params(call), static_cast<int32_t*>(call.operands.workspace)}};
  launch<gemm_conv80_kernel<ConvSm80>>(call.name, shape, call.context, params);
}

}  // namespace pyquant::cuda
