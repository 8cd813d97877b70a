// How the sums of a decode kernel (decode.cuh) come together: groups of a round, parts of K of a block, blocks of a
// tile. Always in one order, so that float results repeat from run to run.
#pragma once
#include "cuda/gemm/decode_block.cuh"

namespace pyquant::cuda {

// Where a block's sums lie: of each part of K over the ring, which is read no more, or (ordered) whole ones behind the
// products of a round, each touched by the thread that finishes it alone.
template <class T>
__device__ __forceinline__ typename T::Sum* sums_of(const DecodeBlock<T>& block) {
  const int32_t before = T::kOrdered ? T::kRingBytes + block.o.unit_groups * T::kSumsBytes : 0;
  return reinterpret_cast<typename T::Sum*>(block.shared + before);
}

// Zeros where the sums of rounds come together.
template <class T>
__device__ __forceinline__ void begin_rounds(const DecodeBlock<T>& block) {
#pragma unroll 1
  for (int i = 0; i < T::kPairs; ++i) {
    int32_t token, column;
    T::pair(i, block.share, token, column);
    if (block.beyond(token)) break;
    *reinterpret_cast<Two<float>*>(sums_of(block) + T::place_of_sum(0, token, column)) = {0.f, 0.f};
  }
}

// A round of units, one for each part of K, is complete: its groups are added in ascending order. In loops that are not
// unrolled: the main loop's registers are full.
template <class T>
__device__ __forceinline__ void add_round(const DecodeBlock<T>& block, int32_t round) {
  const float* products = reinterpret_cast<const float*>(block.shared + T::kRingBytes);
  const int32_t per_round = T::kDepthWarps * block.o.unit_groups;
  const int32_t count = min(per_round, block.o.groups - round * per_round);
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < T::kPairs; ++i) {
    int32_t token, column;
    T::pair(i, block.share, token, column);
    if (block.beyond(token)) break;
    Two<float>& sum = *reinterpret_cast<Two<float>*>(sums_of(block) + T::place_of_sum(0, token, column));
    Two<float> so_far = sum;
#pragma unroll 2
    for (int32_t entry = 0; entry < count; ++entry) {
      const Two<float> v = *reinterpret_cast<const Two<float>*>(products + T::place_of_sum(entry, token, column));
      so_far = {fadd(so_far.a, v.a), fadd(so_far.b, v.b)};
    }
    sum = so_far;
  }
  __syncthreads();
}

// Lays the sums of this thread's fragments down for all.
template <class T>
__device__ __forceinline__ void lay_sums(const DecodeBlock<T>& block) {
  using Sum = typename T::Sum;
  Sum* sums = sums_of(block);
#pragma unroll
  for (int i = 0; i < 4 * T::kRows * T::kColumns; ++i) {
    const int r = i / 4 / T::kColumns, j = i / 4 % T::kColumns, c = i % 2, half = i % 4 / 2;
    Sum value;
    if constexpr (T::kGrouped)
      value = block.total[r][j][i % 4];
    else
      value = block.acc[r][j][i % 4];
    sums[T::place_of_sum(block.depth, 8 * j + 2 * block.t + c, block.side + 16 * r + 8 * half + block.g)] = value;
  }
}

// The sums of a pair over this block's parts of K.
template <class T>
__device__ __forceinline__ Two<typename T::Sum> add_parts(const DecodeBlock<T>& block, int32_t token, int32_t column) {
  using Sum = typename T::Sum;
  Two<Sum> sum{0, 0};
#pragma unroll
  for (int32_t part = 0; part < (T::kOrdered ? 1 : T::kDepthWarps); ++part) {
    const Two<Sum> v = *reinterpret_cast<const Two<Sum>*>(sums_of(block) + T::place_of_sum(part, token, column));
    sum.a += v.a, sum.b += v.b;
  }
  return sum;
}

// Hands this block's sums to the block (or blocks) that finish the tile; false: nothing is left to do here.
template <class T>
__device__ __forceinline__ bool share_sums(const DecodeBlock<T>& block) {
  using Sum = typename T::Sum;
  Sum* sums = sums_of(block);
  const int64_t tile = blockIdx.x;
  if constexpr (!T::kCluster)
    sums = static_cast<Sum*>(block.o.partials) + (tile * gridDim.z + blockIdx.z) * T::kTokens * T::kChannels;
#pragma unroll 1
  for (int i = 0; i < T::kPairs; ++i) {
    int32_t token, column;
    T::pair(i, DecodeShare{}, token, column);
    if (block.beyond(token)) break;
    // In shared memory over the sum of the first part, which only this thread has read.
    Sum* to = sums + (T::kCluster ? T::place_of_sum(0, token, column) : token * T::kChannels + column);
    *reinterpret_cast<Two<Sum>*>(to) = add_parts(block, token, column);
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

// The sums of a pair over the blocks that share a tile, in their order, after share_sums. All are asked for before the
// first is added: each takes as long as a word of another multiprocessor, or of L2, takes to come.
template <class T>
__device__ __forceinline__ Two<typename T::Sum> add_blocks(const DecodeBlock<T>& block, int32_t token, int32_t column) {
  using Sum = typename T::Sum;
  const int32_t split = static_cast<int32_t>(gridDim.z);
  Two<Sum> part[kDecodeSplitMax], sum{0, 0};
#pragma unroll
  for (int32_t rank = 0; rank < kDecodeSplitMax; ++rank) {
    if constexpr (T::kCluster) {
      part[rank] = load_of_block(sums_of(block) + T::place_of_sum(0, token, column), rank, rank < split);
    } else {
      constexpr int32_t kTile = T::kTokens * T::kChannels;
      const Sum* of_tile = static_cast<const Sum*>(block.o.partials) + int64_t{blockIdx.x} * split * kTile;
      part[rank] = Two<Sum>{0, 0};
      if (rank < split) part[rank] = load_uncached(of_tile + rank * kTile + token * T::kChannels + column);
    }
  }
#pragma unroll
  for (int32_t rank = 0; rank < kDecodeSplitMax; ++rank) sum.a += part[rank].a, sum.b += part[rank].b;
  return sum;
}

}  // namespace pyquant::cuda
