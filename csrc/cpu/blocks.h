// Weights in blocks of 64 output channels, the order that the kernels read: where each code goes, and back.
#pragma once
#include <cstdint>

#include "cpu/kernels.h"

namespace pyquant::cpu {

constexpr int64_t round_up(int64_t v, int64_t to) { return (v + to - 1) / to * to; }
constexpr int64_t block_count(int64_t n) { return (n + kBlockN - 1) / kBlockN; }

// K as the blocks hold it: each group padded with zero codes to whole quads of bytes (octs for int4), the whole to 64.
struct Extent {
  int64_t k = 0, group = 0, groups = 0;
  int64_t padded_group = 0, padded_k = 0;
  bool grouped = false;
  bool scattered() const { return grouped && padded_group != group; }
};
Extent extent_of(int64_t k, int64_t group_size, DType type);

// Row-major source of weights: s8, or s4 with two codes a byte; row_bytes between rows.
struct PlainWeights {
  const void* codes = nullptr;
  DType type = DType::s8;
  int64_t row_bytes = 0;
};

// Channels [first, first + channels) into [padded_k / 4][64][4]; absent channels and padding become zero codes.
// row is scratch of k bytes, used for int4.
void pack_block_s8(const PlainWeights& weights, const Extent& extent, int64_t first, int64_t channels, int8_t* row,
                   int8_t* block);
// The same squeezed to nibbles, [padded_k / 8][64][4], from a block of pack_block_s8.
void squeeze_block(const int8_t* block, const Extent& extent, uint8_t* nibbles);
// One row of codes back, [k], from a block of pack_block_s8.
void unpack_block_row(const int8_t* block, const Extent& extent, int64_t channel, int8_t* row);
// sums[group][64] of a block. ones is scratch of padded_k bytes, acc of 64 entries.
void block_sums(const Kernels& kernels, const int8_t* block, const Extent& extent, uint8_t* ones, int32_t* sums);

}  // namespace pyquant::cpu
