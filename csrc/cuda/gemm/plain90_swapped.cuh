// The straight-line epilogue (plain90.cuh) of tiles whose rows are channels: movmatrix turns 8 channels x 8 tokens
// around, then words are transposed within the quad as in plain90_straight.cuh.
#pragma once
#include "cuda/gemm/plain90.cuh"

namespace pyquant::cuda {

// FromAnyRow: tiles may begin at odd tokens, whose scales then lie in no pairs.
template <class Acc, bool FromAnyRow = false>
class PlainSwapped90 : PlainTile90 {
 public:
  __device__ __forceinline__ PlainSwapped90(const EpilogueParams& p, const CodeLimits& limits)
      : PlainTile90(p, limits) {}

  // sums: ((2, 2, blocks of eight tokens), repeats, instructions), the sums times 2^shift; of zero points one for all
  // tokens, whose terms fit (epilogue_params). False, and nothing is stored: a channel's scale is so small that it
  // cannot take the factor.
  template <int kShift, class Fragment, class Coordinates>
  __device__ __forceinline__ bool store(const Fragment& sums, const Coordinates& own, int32_t row0,
                                        int32_t column0) const {
    using cute::make_coord;
    auto acc = cute::make_fragment_like(sums);
    cute::copy(sums, acc);
    constexpr int kBlocks = cute::size<0, 2>(Fragment{}), kRepeats = cute::size<1>(Fragment{}),
                  kColumns = cute::size<2>(Fragment{}) * kBlocks;
    // What registers are left for: blocks whose tokens' scales are fetched together, and that are converted together.
    constexpr int kOutputs = 4 * kRepeats * kColumns;
    constexpr int kAhead = kOutputs <= 64 ? kColumns : (kOutputs <= 96 ? 4 : 1);
    constexpr int kAtOnce = kHasCurves<Fragment> ? kColumns : kColumns / 4;
    const size_t scalar = global(p_.x_scale) + sizeof(float) * (int64_t{column0} * p_.x_scale_step);
    const float all = load_written_if(p_.scale_product_first, scalar, 1.f);
    float scale[kRepeats][2], bias[kRepeats][2];
    int32_t n[kRepeats];
    bool fits = true;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRepeats; ++i) {
      n[i] = row0 + cute::get<0>(own(cute::make_coord(0, 0, 0), i, 0)) - row_;
      const bool inside = n[i] < p_.n;  // N is a multiple of 16
      const int64_t at = sizeof(float) * (int64_t{n[i]} + row_);
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        const float w_scale = load_if(inside && p_.w_scale, global(p_.w_scale) + at + 32 * h, 1.f);
        bias[i][h] = load_if(inside && p_.bias, global(p_.bias) + at + 32 * h, -0.f);
        scale[i][h] = fmul(fmul(all, w_scale), 1.f / (1 << kShift));
        fits = fits && (kShift == 0 || fabsf(scale[i][h]) >= 0x1p-120f);
      }
    }
    if (kShift != 0 && !__all_sync(0xffffffffu, fits)) return false;
    // The zero point's terms: one zero point for all tokens, by a step of 0, which makes the address depend on the
    // tile. Few sums are changed ahead, under one branch; of many, with every register in use, each as it is taken.
    constexpr bool kInteger = std::is_same_v<Acc, int32_t>, kTermsAhead = kInteger && kOutputs <= 64;
    int32_t term[kRepeats][2] = {};
    if (kInteger && p_.x_zero_point) {
      const size_t one = global(p_.x_zero_point) + sizeof(int32_t) * (int64_t{column0} * p_.x_zero_point_step);
      const int32_t zero = __float_as_int(load_written_if(true, one, 0.f)) * (1 << kShift);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 2 * kRepeats; ++r) {
        const size_t at = global(p_.w_sum) + sizeof(int32_t) * (int64_t{n[r / 2]} + row_ + 8 * (r % 2));
        term[r / 2][r % 2] = corrected(0, zero, __float_as_int(load_if(n[r / 2] < p_.n, at, 0.f)));
      }
      if constexpr (kTermsAhead) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kOutputs; ++v) {
          const int i = v / (4 * kColumns), c = v / 4 % kColumns, h = v / 2 % 2;
          acc(make_coord(v % 2, h, c % kBlocks), i, c / kBlocks) += term[i][h];
        }
      }
    }
    // Scales of the lane's tokens, a pair of each block; 0 beyond M, where nobody stores. Only a tile that reaches over
    // M asks for every block whether it is inside.
    static_assert(8 * kColumns <= Filled::kColumns);
    const bool is_one = !p_.x_scale || p_.scale_product_first;
    const int32_t tokens = is_one ? Filled::kColumns : p_.m - column0;  // whose scales may be read
    const size_t scales = global((is_one ? kOnes.value : p_.x_scale + column0) + 2 * quad_);
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kColumns; part += kAtOnce) {
      float2 x[kAhead];
      float t[4 * kRepeats * kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kAtOnce; ++c) {
        if constexpr (kAhead == 1)
          x[0] = load_pair(scales + 32 * (part + c), tokens - 2 * quad_, 8 * (part + c));
        else if (c % kAhead == 0)
          load_tokens(x, scales, tokens, part + c);
        const float2& at = x[c % kAhead];
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 4 * kRepeats; ++v) {
          const int i = v / 4, h = v / 2 % 2, of = part + c;
          const Acc whole = acc(make_coord(v % 2, h, of % kBlocks), i, of / kBlocks);
          const float sum = real_of(kInteger && !kTermsAhead ? whole + term[i][h] : whole);
          t[4 * kRepeats * c + v] = fadd(fmul(fmul(sum, scale[i][h]), v % 2 ? at.y : at.x), bias[i][h]);
        }
      }
      if constexpr (kTakesMore<Fragment, kShift>) {  // store90.cuh sends others another way
        activate_tile<kHasCurves<Fragment>>(t);
        if (p_.residual) add_residual_swapped<kRepeats, kAtOnce>(t, n, column0 + 8 * part);
      }
      store_as([&](const auto& out) { store_swapped<kRepeats, kAtOnce>(out, t, n, column0 + 8 * part); });
    }
    return true;
  }

 private:
  // Numbers `at` and at + 1 of `count` at an address, or 0. As C++ it becomes branches.
  __device__ __forceinline__ static float2 load_pair(size_t from, int32_t count, int at) {
    if constexpr (FromAnyRow)
      return {load_written_if(count > at, from, 0.f), load_written_if(count > at + 1, from + sizeof(float), 0.f)};
    float2 v;
    asm("{\n"
        ".reg .pred both, last;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "setp.gt.s32 both, %3, %4;\n"
        "setp.eq.s32 last, %3, %4;\n"
        "@both ld.global.ca.v2.f32 {%0, %1}, [%2];\n"
        "@last ld.global.ca.f32 %0, [%2];\n"
        "}"
        : "=&f"(v.x), "=&f"(v.y)
        : "l"(from), "r"(count), "r"(at + 1));
    return v;
  }

  // The lane's tokens in blocks c and on; `tokens` from the first of the tile may be read.
  template <int kCount>
  __device__ __forceinline__ void load_tokens(float2 (&x)[kCount], size_t scales, int32_t tokens, int c) const {
    if (FromAnyRow || tokens < 8 * (c + kCount)) {
      CUTLASS_PRAGMA_UNROLL
      for (int q = 0; q < kCount; ++q) x[q] = load_pair(scales + 32 * (c + q), tokens - 2 * quad_, 8 * (c + q));
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int q = 0; q < kCount; ++q) x[q] = load_written_two(scales + 32 * (c + q));
    }
  }

  // The way of store_swapped's 16-bit results, backwards: lanes exchange what they load, a movmatrix turns it.
  template <int kRepeats, int kColumns>
  __device__ __forceinline__ void add_residual_swapped(float (&t)[4 * kRepeats * kColumns],
                                                       const int32_t (&n)[kRepeats], int32_t column0) const {
    const int32_t column = quad_ / 2, m0 = column0 + 8 * column + row_;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRepeats; ++i) {
      const int32_t left = n[i] < p_.n ? min(p_.m - m0, 8 * (kColumns - column)) : 0;
      size_t token = global(p_.residual) + 2 * (int64_t{m0} * p_.ldr + n[i] + 8 * (quad_ % 2));
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kColumns; c += 2) {
        const uint4 got = load_written_words_if(8 * c < left, token);
        const uint4 whole = transpose_words({got.x, got.y, got.z, got.w});
        const uint32_t word[4] = {whole.x, whole.y, whole.z, whole.w};
        CUTLASS_PRAGMA_UNROLL
        for (int q = 0; q < 2 && c + q < kColumns; ++q) {
          const uint32_t pair[2] = {turned(word[2 * q]), turned(word[2 * q + 1])};
          add_pairs(t + 4 * (kRepeats * (c + q) + i), pair);
        }
        token += 32 * p_.ldr;
      }
    }
  }

  // The lane's values of kColumns blocks of eight tokens from column0 on, of channels n[i] to n[i] + 16.
  template <int kRepeats, int kColumns, class Out>
  __device__ __forceinline__ void store_swapped(const Out& out, const float (&t)[4 * kRepeats * kColumns],
                                                const int32_t (&n)[kRepeats], int32_t column0) const {
    constexpr bool kCodes = Out::kBytes == 1;
    if constexpr (Out::kBytes == 4) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRepeats; ++i) {
        // Of the tokens from the lane's first pair on; eight lanes store eight channels of a token, a sector.
        const int32_t left = n[i] < p_.n ? p_.m - column0 - 2 * quad_ : 0;
        size_t token = address<Out>(column0 + 2 * quad_, n[i] + row_);
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kColumns; ++c) {
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 4; ++v)  // channel row_ or row_ + 8, token of the pair
            store_floats_if<1>(8 * c + v % 2 < left, token + (v % 2 ? 4 * p_.ldo : 0) + 32 * (v / 2),
                               t + 4 * (kRepeats * c + i) + v);
          token += 32 * p_.ldo;
        }
      }
    } else {
      constexpr int kChunk = kCodes ? 4 : 2;              // blocks that a quad exchanges at a time
      const int32_t column = kCodes ? quad_ : quad_ / 2;  // of a chunk, whose channels the lane stores
      const int32_t m0 = column0 + 8 * column + row_;
      uint32_t pair[2 * kRepeats * kColumns];
      out.pairs(t, pair);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRepeats; ++i) {
        // Of the tokens from m0 on the lane stores every eighth.
        const int32_t left = n[i] < p_.n ? min(p_.m - m0, 8 * (kColumns - column)) : 0;
        size_t token = address<Out>(m0, n[i] + (kCodes ? 0 : 8 * (quad_ % 2)));
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kColumns; c += kChunk) {
          uint32_t word[4];
          CUTLASS_PRAGMA_UNROLL
          for (int q = 0; q < kChunk; ++q) {
            uint32_t couple[2] = {0, 0};
            CUTLASS_PRAGMA_UNROLL
            for (int h = 0; h < 2; ++h) {
              if (c + q < kColumns) couple[h] = turned(pair[2 * (kRepeats * (c + q) + i) + h]);
            }
            if constexpr (kCodes) {
              word[q] = bytes_of_pairs(couple[0], couple[1]);
            } else {
              word[2 * q] = couple[0];
              word[2 * q + 1] = couple[1];
            }
          }
          const uint4 whole = transpose_words(word);
          store_if(8 * c < left, token, kCodes ? runs_of_codes(whole) : whole);
          token += 8 * kChunk * p_.ldo * Out::kBytes;
        }
      }
    }
  }
};

}  // namespace pyquant::cuda
