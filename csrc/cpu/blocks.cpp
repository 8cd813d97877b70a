#include "cpu/blocks.h"

#include <cstring>

namespace pyquant::cpu {

Extent extent_of(int64_t k, int64_t group_size, DType type) {
  Extent e;
  e.k = k;
  e.grouped = group_size > 0;
  if (e.grouped) {
    e.group = group_size;
    e.groups = k / group_size;
    e.padded_group = round_up(group_size, 4 * per_byte(type));
    e.padded_k = round_up(e.groups * e.padded_group, 64);
  } else {
    e.group = k;
    e.groups = 1;
    e.padded_k = e.padded_group = round_up(k, 64);
  }
  return e;
}

namespace {

// Codes of [0, count) of one row into quads [0, ceil(count / 4)) of one channel, zero beyond count.
void scatter_quads(const int8_t* row, int64_t count, int64_t first_quad, int64_t last_quad, int8_t* channel) {
  for (int64_t q = first_quad; q < last_quad; ++q) {
    int8_t* to = channel + q * kBlockN * 4;
    if ((q + 1) * 4 <= count)
      std::memcpy(to, row + q * 4, 4);
    else
      for (int64_t j = 0; j < 4; ++j) to[j] = q * 4 + j < count ? row[q * 4 + j] : int8_t{0};
  }
}

}  // namespace

void pack_block_s8(const PlainWeights& weights, const Extent& e, int64_t first, int64_t channels, int8_t* row,
                   int8_t* block) {
  if (channels < kBlockN || e.scattered()) std::memset(block, 0, static_cast<size_t>(e.padded_k * kBlockN));
  const auto* source = static_cast<const uint8_t*>(weights.codes) + first * weights.row_bytes;
  const bool whole_rows = is_packed(weights.type) || e.scattered();
  // Sixteen quads of every channel at a time: the 4 KiB they go to stay in L1.
  constexpr int64_t kQuads = 16;
  if (!whole_rows) {
    for (int64_t q = 0; q < e.padded_k / 4; q += kQuads)
      for (int64_t c = 0; c < channels; ++c)
        scatter_quads(reinterpret_cast<const int8_t*>(source + c * weights.row_bytes), e.k, q, q + kQuads,
                      block + c * 4);
    return;
  }
  for (int64_t c = 0; c < channels; ++c) {
    const uint8_t* packed = source + c * weights.row_bytes;
    const auto* codes = reinterpret_cast<const int8_t*>(packed);
    if (is_packed(weights.type)) {
      unpack_int4(packed, 1, e.k, row);
      codes = row;
    }
    if (!e.scattered()) {
      scatter_quads(codes, e.k, 0, e.padded_k / 4, block + c * 4);
      continue;
    }
    for (int64_t g = 0; g < e.groups; ++g)
      scatter_quads(codes + g * e.group, e.group, 0, e.padded_group / 4, block + g * e.padded_group * kBlockN + c * 4);
  }
}

void squeeze_block(const int8_t* block, const Extent& e, uint8_t* nibbles) {
  constexpr int64_t kStep = kBlockN * 4;
  for (int64_t o = 0; o < e.padded_k / 8; ++o)
    for (int64_t i = 0; i < kStep; ++i)
      nibbles[o * kStep + i] =
          static_cast<uint8_t>((block[2 * o * kStep + i] + 8) | (block[(2 * o + 1) * kStep + i] & 15) << 4);
}

void unpack_block_row(const int8_t* block, const Extent& e, int64_t channel, int8_t* row) {
  for (int64_t g = 0; g < e.groups; ++g)
    for (int64_t i = 0; i < e.group; ++i) {
      const int64_t at = g * e.padded_group + i;
      row[g * e.group + i] = block[(at / 4 * kBlockN + channel) * 4 + at % 4];
    }
}

void block_sums(const Kernels& kernels, const int8_t* block, const Extent& e, uint8_t* ones, int32_t* sums) {
  std::memset(ones, 1, static_cast<size_t>(e.padded_k));
  for (int64_t g = 0; g < e.groups; ++g)
    kernels.gemm_s8(ones + g * e.padded_group, e.padded_k, 1, block + g * e.padded_group * kBlockN, e.padded_group / 4,
                    sums + g * kBlockN, false, {});
}

}  // namespace pyquant::cpu
