// How the sums of a decode kernel (decode.cuh) come together: groups of a round, warps of a block, blocks of a tile.
// Always in one order, so that float results repeat from run to run.
#pragma once
#include "cuda/gemm/decode_block.cuh"

namespace pyquant::cuda {

// A round of units, one a warp, is complete: its groups are added in ascending order.
template <class T>
__device__ __forceinline__ void add_round(DecodeBlock<T>& block, int32_t round) {
  const float* products = reinterpret_cast<const float*>(block.shared + T::kRingBytes);
  const int32_t per_round = T::kWarps * block.o.unit_groups, count = min(per_round, block.o.groups - round * per_round);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < T::kPairs; ++i) {
    int32_t token, column;
    T::pair(i, token, column);
    if (block.beyond(token)) break;
    for (int32_t entry = 0; entry < count; ++entry) {
      const float2 v = *reinterpret_cast<const float2*>(products + T::place_of_sum(entry, token, column));
      block.ordered[i][0] = fadd(block.ordered[i][0], v.x);
      block.ordered[i][1] = fadd(block.ordered[i][1], v.y);
    }
  }
  __syncthreads();
}

// Adds the sums of this block's warps.
template <class T>
__device__ __forceinline__ void add_warps(const DecodeBlock<T>& block, typename T::Sum (&sum)[T::kPairs][2]) {
  using Sum = typename T::Sum;
  Sum* sums = reinterpret_cast<Sum*>(block.shared);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4 * T::kRows * T::kColumns; ++i) {
    const int r = i / 4 / T::kColumns, j = i / 4 % T::kColumns, c = i % 2, half = i % 4 / 2;
    Sum value;
    if constexpr (T::kGrouped)
      value = block.total[r][j][i % 4];
    else
      value = block.acc[r][j][i % 4];
    sums[T::place_of_sum(block.warp, 8 * j + 2 * block.t + c, 16 * r + 8 * half + block.g)] = value;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < T::kPairs; ++i) {
    int32_t token, column;
    T::pair(i, token, column);
    sum[i][0] = sum[i][1] = 0;
    if (block.beyond(token)) break;
#pragma unroll
    for (int32_t w = 0; w < T::kWarps; ++w) {
      const Two<Sum> part = *reinterpret_cast<const Two<Sum>*>(sums + T::place_of_sum(w, token, column));
      sum[i][0] += part.a;
      sum[i][1] += part.b;
    }
  }
}

// Adds the sums of the blocks that share a tile; the result is whole where true is returned.
template <class T>
__device__ __forceinline__ bool add_blocks(const DecodeBlock<T>& block, int i, typename T::Sum (&sum)[2]) {
  using Sum = typename T::Sum;
  int32_t token, column;
  T::pair(i, token, column);
  const int32_t index = static_cast<int32_t>(threadIdx.x) + T::kThreads * i;
  if (block.beyond(token)) return false;
  if constexpr (T::kCluster) {
    if ((index / 32) % gridDim.z != blockIdx.z) return false;  // the warps of a tile's blocks take turns
    const Sum* sums = reinterpret_cast<const Sum*>(block.shared) + T::place_of_sum(0, token, column);
    sum[0] = sum[1] = 0;
    for (uint32_t rank = 0; rank < gridDim.z; ++rank) {
      const Two<Sum> part = load_of_block(sums, rank);
      sum[0] += part.a;
      sum[1] += part.b;
    }
  } else {
    const int64_t tile = blockIdx.x;
    const Sum* sums = static_cast<const Sum*>(block.o.partials) + tile * gridDim.z * T::kTokens * T::kChannels +
                      token * T::kChannels + column;
    sum[0] = sum[1] = 0;
    for (uint32_t rank = 0; rank < gridDim.z; ++rank) {
      const Two<Sum> part = load_uncached(sums + static_cast<int64_t>(rank) * T::kTokens * T::kChannels);
      sum[0] += part.a;
      sum[1] += part.b;
    }
  }
  return true;
}

// Hands this block's sums to the block (or blocks) that finish the tile; false: nothing is left to do here.
template <class T>
__device__ __forceinline__ bool share_sums(const DecodeBlock<T>& block, const typename T::Sum (&sum)[T::kPairs][2]) {
  using Sum = typename T::Sum;
  Sum* sums = reinterpret_cast<Sum*>(block.shared);
  const int64_t tile = blockIdx.x;
  if constexpr (!T::kCluster)
    sums = static_cast<Sum*>(block.o.partials) + (tile * gridDim.z + blockIdx.z) * T::kTokens * T::kChannels;
#pragma unroll
  for (int i = 0; i < T::kPairs; ++i) {
    int32_t token, column;
    T::pair(i, token, column);
    if (block.beyond(token)) break;
    // In shared memory over the sum of warp 0, which only this thread has read.
    Sum* to = sums + (T::kCluster ? T::place_of_sum(0, token, column) : token * T::kChannels + column);
    *reinterpret_cast<Two<Sum>*>(to) = {sum[i][0], sum[i][1]};
  }
  if constexpr (T::kCluster) {
    cluster_barrier();
    return true;
  } else {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(block.o.arrivals + tile, 1u) == gridDim.z - 1;
    __syncthreads();
    __threadfence();
    return last;
  }
}

}  // namespace pyquant::cuda
