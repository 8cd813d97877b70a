// The straight-line epilogue (plain90.cuh) of tiles whose rows are tokens: a lane holds pairs of columns of every block
// of eight; packed words of four blocks (codes: of eight) are transposed within the quad.
#pragma once
#include "cuda/gemm/plain90.cuh"

namespace pyquant::cuda {

template <class Acc>
class PlainStraight90 : PlainTile90 {
 public:
  __device__ __forceinline__ PlainStraight90(const EpilogueParams& p, const CodeLimits& limits)
      : PlainTile90(p, limits) {}

  // sums: ((2, 2, 4 groups), repeats, 1) values of a thread; own: their coordinates within the tile at (row0, column0),
  // whose columns are all inside of N unless it reaches over.
  template <class Fragment, class Coordinates>
  __device__ __forceinline__ void store(const Fragment& sums, const Coordinates& own, int32_t row0,
                                        int32_t column0) const {
    auto acc = cute::make_fragment_like(sums);
    cute::copy(sums, acc);
    constexpr int kGroups = cute::size<0, 2>(Fragment{}) / 4, kRows = 2 * cute::size<1>(Fragment{});
    static_assert(32 * kGroups <= Filled::kColumns);
    static_assert(kGroups % 2 == 0, "a lane's 16 codes are those of 64 columns");
    // One scale for all tokens is multiplied with the channel's first. Its address depends on the tile as the others
    // do, and so on the wait for the predecessor (store90.cuh).
    const int32_t start = cute::get<0>(own(cute::make_coord(0, 0, 0), 0, 0)), m0 = row0 + start;
    const auto further = [&](int r) {  // the lane's row r, from its first
      return cute::get<0>(own(cute::make_coord(0, r % 2, 0), r / 2, 0)) - start;
    };
    const size_t scales = global(p_.x_scale) + sizeof(float) * (int64_t{m0} * p_.x_scale_step);
    const int32_t columns_left = kHasRoom<Fragment> ? p_.n - column0 : 32 * kGroups;
    bool inside[kRows];
    float x[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      inside[r] = m0 + further(r) < p_.m;
      x[r] =
          load_written_if(inside[r] && p_.x_scale && (r == 0 || !p_.scale_product_first), scales + 4 * further(r), 1.f);
    }
    const float all = x[0];
    if (p_.scale_product_first) x[0] = 1.f;
    if constexpr (std::is_same_v<Acc, int32_t>) {
      if (p_.x_zero_point) {
        const int32_t step = p_.x_zero_point_step;
        const size_t zeros = global(p_.x_zero_point) + sizeof(int32_t) * (int64_t{m0} * step);
        int32_t zero[kRows];
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r)
          zero[r] = __float_as_int(load_written_if(inside[r], zeros + 4 * further(r) * step, 0.f));
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4 * kGroups; ++j) {
          const float2 w_sum = load_two_if(8 * j < columns_left, global(p_.w_sum + column0 + 2 * quad_) + 32 * j);
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < kRows; ++r) {
            int32_t& first = acc(cute::make_coord(0, r % 2, j), r / 2, 0);
            int32_t& second = acc(cute::make_coord(1, r % 2, j), r / 2, 0);
            first = corrected(first, zero[r], __float_as_int(w_sum.x));
            second = corrected(second, zero[r], __float_as_int(w_sum.y));
          }
        }
      }
    }
    const size_t scale = global((p_.w_scale ? p_.w_scale + column0 : kOnes.value) + 2 * quad_);
    const size_t bias = global((p_.bias ? p_.bias + column0 : kMinusZeros.value) + 2 * quad_);
    Columns next = load_columns(scale, bias, 0, columns_left);
    float t[8 * kGroups * kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      Columns columns = next;
      if (p_.scale_product_first) columns.times(all);
      if (g + 1 < kGroups) next = load_columns(scale, bias, 32 * (g + 1), columns_left);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 8; ++v) {
          const float sum = real_of(acc(cute::make_coord(v % 2, r % 2, 4 * g + v / 2), r / 2, 0));
          t[8 * (g * kRows + r) + v] =
              fadd(fmul(fmul(sum, columns.scale[v / 2][v % 2]), x[r]), columns.bias[v / 2][v % 2]);
        }
      }
    }
    activate_tile(t);
    if (p_.residual) {  // the words of a quad's blocks, exchanged as those of results are
      const int32_t left = kHasRoom<Fragment> ? columns_left - 8 * quad_ : columns_left;
      const size_t from = global(p_.residual) + 2 * (int64_t{m0} * p_.ldr + column0 + 8 * quad_);
      uint4 ahead[kRows];
      const auto fetch = [&](int g) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r)
          ahead[r] = load_written_words_if(inside[r] && 32 * g < left, from + 2 * further(r) * p_.ldr + 64 * g);
      };
      fetch(0);
      CUTLASS_PRAGMA_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        uint32_t pair[4 * kRows];
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const uint4 whole = transpose_words({ahead[r].x, ahead[r].y, ahead[r].z, ahead[r].w});
          pair[4 * r] = whole.x, pair[4 * r + 1] = whole.y, pair[4 * r + 2] = whole.z, pair[4 * r + 3] = whole.w;
        }
        if (g + 1 < kGroups) fetch(g + 1);
        add_pairs(t + 8 * kRows * g, pair);
      }
    }
    const auto write = [&](const auto& out) {
      using Out = std::decay_t<decltype(out)>;
      constexpr bool kCodes = Out::kBytes == 1;
      if constexpr (Out::kBytes == 4 && kHasRoom<Fragment>) {  // store90.cuh sends others another way
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const size_t row = address<Out>(m0, column0 + 2 * quad_) + further(r) * p_.ldo * 4;
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < 4 * kGroups; ++j)
            store_floats_if<2>(inside[r] && 8 * j < columns_left, row + 32 * j,
                               t + 8 * (j / 4 * kRows + r) + 2 * (j % 4));
        }
      } else if constexpr (Out::kBytes != 4) {
        // Of the lane's runs of 16 bytes, from the first.
        const int32_t left = kHasRoom<Fragment> ? columns_left - (kCodes ? 16 : 8) * quad_ : columns_left;
        size_t row[kRows];
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRows; ++r) {
          row[r] = address<Out>(m0, column0) + 16 * quad_ + further(r) * p_.ldo * Out::kBytes;
        }
        uint32_t pair[4 * kGroups * kRows];
        out.pairs(t, pair);
        CUTLASS_PRAGMA_UNROLL
        for (int g = 0; g < kGroups; g += kCodes ? 2 : 1) {
          CUTLASS_PRAGMA_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const uint32_t* of = pair + 4 * (g * kRows + r);
            uint32_t word[4] = {of[0], of[1], of[2], of[3]};
            if constexpr (kCodes) {
              const uint32_t* also = of + 4 * kRows;
              word[0] = bytes_of_pairs(of[0], of[1]), word[1] = bytes_of_pairs(of[2], of[3]);
              word[2] = bytes_of_pairs(also[0], also[1]), word[3] = bytes_of_pairs(also[2], also[3]);
            }
            const uint4 whole = transpose_words(word);
            store_if(inside[r] && 32 * g < left, row[r] + 64 * (kCodes ? g / 2 : g),
                     kCodes ? runs_of_codes(whole) : whole);
          }
        }
      }
    };
    store_as(write);
  }

 private:
  struct Columns {
    float scale[4][2], bias[4][2];
    __device__ __forceinline__ void times(float all) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) scale[i / 2][i % 2] = fmul(all, scale[i / 2][i % 2]);
    }
  };

  // Of this lane's pairs in 32 columns, `left` of which are inside.
  __device__ __forceinline__ static Columns load_columns(size_t scale, size_t bias, int at, int32_t left) {
    Columns c;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      const bool inside = at + 8 * j < left;
      const float2 w = load_two_if(inside, scale + 4 * (at + 8 * j));
      const float2 b = load_two_if(inside, bias + 4 * (at + 8 * j));
      c.scale[j][0] = w.x, c.scale[j][1] = w.y;
      c.bias[j][0] = b.x, c.bias[j][1] = b.y;
    }
    return c;
  }
};

}  // namespace pyquant::cuda
