// The epilogue that most layers run, for the mma.sync kernels, as straight-line code: zero points, scales and a bias,
// no activation or residual; f16, bf16 or s8 out. The operations of finish_row (epilogue.cuh) in their order, so the
// same bits, from the registers in which the tensor cores leave them: no shared memory and no barrier. Scales and
// biases are fetched before the first is used, values are converted and packed before lanes exchange them, and every
// lane stores 16 bytes of a row, a quad whole sectors.
//   A lane holds two columns of every block of eight in every eighth row. Of 16-bit results the packed words of four
//   blocks are transposed within the quad; of codes those of two rows, so that a lane has 16 columns of one of them.
// EpilogueParams::plain says whether a launch may come here.
#pragma once
#include "cuda/gemm/plain_out.cuh"
#include "cuda/gemm/transpose.cuh"

namespace pyquant::cuda {

// Sums of a warp: kTall rows of eight tokens from m0 on x kWide times 32 channels from n0 on, all inside of N.
// sum_of(r, j, i): column 2 * (lane % 4) + i of block j of eight columns, of row r, as 2^kShift times the sum, which
// may be written. False, and nothing is stored or written, where only the general form applies.
template <int kTall, int kWide, int kShift = 0, class SumOf>
__device__ __forceinline__ bool store_plain80(const EpilogueParams& p, int32_t m0, int32_t n0, const SumOf& sum_of) {
  static_assert(kTall % 2 == 0, "codes are stored by two rows");
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, quad = lane % 4, row = lane / 4;
  const bool is_codes = p.plain == PlainOut::codes;
  CodeLimits limits;
  if (is_codes) limits = load_code_limits(p);
  if (is_codes && !PlainCodes::serves(limits)) return false;

  lanes_are_together();
  constexpr int kBlocks = 4 * kWide;
  static_assert(8 * kBlocks <= Filled::kColumns);
  const int32_t m = m0 + row, rows = p.m - m0;
  using Sum = std::decay_t<decltype(sum_of(0, 0, 0))>;
  if constexpr (kShift != 0) {  // whose kernels have no registers left for it
    if (p.x_zero_point) return false;
  } else if constexpr (std::is_same_v<Sum, int32_t>) {
    if (p.x_zero_point) {
      int32_t zero[kTall];
#pragma unroll
      for (int r = 0; r < kTall; ++r) zero[r] = load_token(p, m + 8 * r).zero_point;
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        const int2 w_sum = __ldg(reinterpret_cast<const int2*>(p.w_sum + n0 + 8 * j) + quad);
#pragma unroll
        for (int r = 0; r < kTall; ++r) {
          sum_of(r, j, 0) = corrected(sum_of(r, j, 0), zero[r], w_sum.x);
          sum_of(r, j, 1) = corrected(sum_of(r, j, 1), zero[r], w_sum.y);
        }
      }
    }
  }
  const float* w_scale = (p.w_scale ? p.w_scale + n0 : kOnes.value) + 2 * quad;
  const float* biases = (p.bias ? p.bias + n0 : kMinusZeros.value) + 2 * quad;
  float x_scale[kTall];
#pragma unroll
  for (int r = 0; r < kTall; ++r) x_scale[r] = p.scale_product_first ? 1.f : load_token(p, m + 8 * r).x_scale;
  const float all = p.scale_product_first ? load_token(p, 0).x_scale : 1.f;

  // Where the lane's first 16 bytes go.
  const int32_t first_row = is_codes ? m + 8 * (quad / 2) : m, first = n0 + (is_codes ? 16 * (quad % 2) : 8 * quad);
  const int64_t at = static_cast<int64_t>(first_row) * p.ldo + first;
  uint8_t* to = static_cast<uint8_t*>(p.out) + (is_codes ? at : 2 * at);

  float scale[kBlocks][2], bias[kBlocks][2];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const float2 w = __ldg(reinterpret_cast<const float2*>(w_scale + 8 * j));
    const float2 b = __ldg(reinterpret_cast<const float2*>(biases + 8 * j));
    scale[j][0] = w.x, scale[j][1] = w.y;
    bias[j][0] = b.x, bias[j][1] = b.y;
  }
  // One scale for all tokens is multiplied with the channels' first.
  if (p.scale_product_first) {
#pragma unroll
    for (int j = 0; j < 2 * kBlocks; ++j) scale[j / 2][j % 2] = fmul(all, scale[j / 2][j % 2]);
  }
  if constexpr (kShift != 0) {  // the channels' scales take the factor, unless one is too small for it
    float least = kInfinity;
#pragma unroll
    for (int j = 0; j < 2 * kBlocks; ++j) {
      least = fminf(least, fabsf(scale[j / 2][j % 2]));
      scale[j / 2][j % 2] = fmul(scale[j / 2][j % 2], 1.f / (1 << kShift));
    }
    if (!__all_sync(0xffffffffu, least >= 0x1p-116f)) return false;
  }
  const auto value = [&](int r, int j, int i) {
    return fadd(fmul(fmul(real_of(sum_of(r, j, i)), scale[j][i]), x_scale[r]), bias[j][i]);
  };
  const auto store_halves = [&](auto halves) {
#pragma unroll
    for (int r = 0; r < kTall; ++r) {
      if (r % 2 == 0 && 8 * r >= rows) break;
#pragma unroll
      for (int g = 0; g < kWide; ++g) {
        uint32_t word[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = halves.pair(value(r, 4 * g + j, 0), value(r, 4 * g + j, 1));
        const uint4 whole = transpose_words(word);
        if (8 * r + row < rows) *reinterpret_cast<uint4*>(to + 64 * g) = whole;
      }
      to += 16 * p.ldo;
    }
  };
  if (p.plain == PlainOut::f16) {
    store_halves(PlainHalves<true>(limits));
  } else if (p.plain == PlainOut::bf16) {
    store_halves(PlainHalves<false>(limits));
  } else {
    const PlainCodes codes(limits);
#pragma unroll
    for (int r = 0; r < kTall; r += 2) {
      if (8 * r >= rows) break;
#pragma unroll
      for (int g = 0; g < kWide; ++g) {
        uint32_t word[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          const int y = r + w / 2, j = 4 * g + 2 * (w % 2);
          word[w] = bytes_of_pairs(codes.pair(value(y, j, 0), value(y, j, 1)),
                                   codes.pair(value(y, j + 1, 0), value(y, j + 1, 1)));
        }
        const uint4 whole = runs_of_codes(transpose_words(word));
        if (8 * (r + quad / 2) + row < rows) *reinterpret_cast<uint4*>(to + 32 * g) = whole;
      }
      to += 16 * p.ldo;
    }
  }
  return true;
}

}  // namespace pyquant::cuda
