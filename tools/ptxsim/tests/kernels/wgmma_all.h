// What the kernels of wgmma_all.py share: operands without swizzle, accumulators word after word, thread after thread.
#pragma once
#include "common.h"

// Shared-memory descriptor of core matrices 8 rows x 16 bytes: 128 bytes apart along K, 256 along the rows.
__device__ inline u64 descriptor(const void* p) {
  return (u64)(((u32)__cvta_generic_to_shared(p) & 0x3ffff) >> 4) | (u64)8 << 16 | (u64)16 << 32;
}

// Rows of 32 bytes into that layout.
__device__ inline void stage(u8* s, const u8* g, int rows) {
  for (int i = threadIdx.x; i < rows * 32; i += 128) {
    const int r = i / 32, c = i % 32;
    s[(r / 8) * 256 + (c / 16) * 128 + (r % 8) * 16 + c % 16] = g[i];
  }
}

// Operand A of one thread, as wgmma takes it from registers.
__device__ inline void load_a(u32 (&a)[4], const u8* g) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i)
    a[i] = *(const u32*)(g + (warp * 16 + lane / 4 + 8 * (i & 1)) * 32 + (lane % 4) * 4 + (i >> 1) * 16);
}

template <int W>
__device__ inline void load(u32 (&d)[W], const u32* g) {
#pragma unroll
  for (int i = 0; i < W; ++i) d[i] = g[i * 128 + threadIdx.x];
}

template <int W>
__device__ inline void store(u32* g, const u32 (&d)[W]) {
#pragma unroll
  for (int i = 0; i < W; ++i) g[i * 128 + threadIdx.x] = d[i];
}
