// Rows of x that lie in images, written one after another: the patches under each window, for kernels that read
// matrices.
#include "cuda/image_walk.cuh"
#include "cuda/images.h"
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/parts.cuh"

namespace pyquant::cuda {
namespace {

constexpr int kPiece = 16;              // codes that are copied at once where every step is a multiple of them
constexpr int64_t kMostBlocks = 65535;  // of a grid's second dimension

// blockIdx.y walks rows, blockIdx.x and the threads what a row has.
template <bool kPieces>
__global__ void __launch_bounds__(kBlock)
    gather_patches_kernel(const int8_t* images, ImageWalk<int64_t, 1> walk, int64_t m, int k, int8_t* q, int64_t ldq) {
  wait_for_predecessor();
  release_successor();
  constexpr int kWidth = kPieces ? kPiece : 1;
#pragma unroll 1
  for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < m; row += int64_t{gridDim.y} * blockDim.y) {
    const int8_t* from = images + walk.begin_of_row(static_cast<int>(row));
#pragma unroll 1
    for (int64_t column = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * kWidth; column < ldq;
         column += int64_t{gridDim.x} * blockDim.x * kWidth) {
      const int8_t* at = from + walk.place_in_row(static_cast<int>(column));
      int8_t* to = q + row * ldq + column;
      if constexpr (kPieces)
        *reinterpret_cast<uint4*>(to) = column < k ? *reinterpret_cast<const uint4*>(at) : uint4{};
      else
        *to = column < k ? *at : int8_t{0};
    }
  }
}

}  // namespace

void gather_patches(const int8_t* images, const ImageRows& rows, int64_t m, int64_t k, int8_t* q, int64_t ldq,
                    const Context& context) {
  if (m == 0 || ldq == 0) return;
  int64_t steps = rows.channels | rows.image_step | ldq;
  for (int axis = 0; axis < 2; ++axis) steps |= rows.window_step[axis] | rows.tap_step[axis];
  const bool pieces = steps % kPiece == 0 && is_aligned(images, 0, kPiece) && is_aligned(q, 0, kPiece);
  const int64_t units = pieces ? ldq / kPiece : ldq, wide = units < 32 ? 32 : units < kBlock ? 64 : kBlock;
  const int64_t tall = kBlock / wide, lines = (m + tall - 1) / tall;
  LaunchShape shape;
  shape.block = dim3(static_cast<unsigned>(wide), static_cast<unsigned>(tall));
  shape.grid = dim3(static_cast<unsigned>((units + wide - 1) / wide < 64 ? (units + wide - 1) / wide : 64),
                    static_cast<unsigned>(lines < kMostBlocks ? lines : kMostBlocks));
  shape.overlaps = true;
  const auto start = [&](auto kernel_of) {
    launch<kernel_of()>("gather_patches", shape, context, images, ImageWalk<int64_t, 1>(rows), m, static_cast<int>(k),
                        q, ldq);
  };
  if (pieces)
    start([] { return &gather_patches_kernel<true>; });
  else
    start([] { return &gather_patches_kernel<false>; });
}

}  // namespace pyquant::cuda
