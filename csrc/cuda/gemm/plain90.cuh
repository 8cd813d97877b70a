// The epilogue that nearly all layers run, as straight-line code: zero points, scales, a bias, an activation, a
// residual of 16 bits; f16, bf16, f32 or s8 out. The operations of finish_row (epilogue.cuh) in their order, so the
// same bits; what differs is what surrounds them: scales are fetched ahead, values are converted and packed before
// lanes exchange them, and every lane stores 16 bytes of a row at a time (f32: whole sectors, as they lie).
//   Straight (tokens are the rows of the accumulator): a lane holds pairs of columns of every block of eight; packed
//   words of four blocks (codes: of eight) are transposed within the quad.
//   Swapped (channels are the rows): movmatrix turns 8 channels x 8 tokens around, then the same transposition.
//   Zero points come first and on their own, one operation a sum, so that launches without them pay one branch; so do
//   those without an activation and without a residual, which the way of results, gone backwards, brings to the sums.
// EpilogueParams::plain90 says whether a launch may come here.
#pragma once
#include <cute/tensor.hpp>

#include "cuda/gemm/at_step.cuh"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/guarded.cuh"
#include "cuda/gemm/transpose.cuh"

namespace pyquant::cuda {

// Two real values as half words: 16-bit floats, or codes in the low bytes.
template <bool F16>
struct PlainHalves {
  static constexpr int kBytes = 2;
  __device__ __forceinline__ explicit PlainHalves(const CodeLimits&) {}
  __device__ __forceinline__ uint32_t pair(float low, float high) const { return pair_of_floats<F16>(low, high); }
};

struct PlainCodes {
  static constexpr int kBytes = 1;
  float recip, low, high;
  int32_t zero_points;  // for both halves of a word
  __device__ __forceinline__ explicit PlainCodes(const CodeLimits& limits)
      : recip(limits.recip), low(limits.low), high(limits.high), zero_points(limits.zero_point * 0x10001) {}
  // NaN has the code of 0, which a code must be in reach of; differences of codes are those of bytes.
  __device__ __forceinline__ static bool serves(const CodeLimits& limits) {
    return fabsf(limits.recip) < kInfinity && limits.low <= 0 && limits.high >= 0 && abs(limits.zero_point) <= 128;
  }
  // code_from_real without its zero point, and 256, in the low half. The limits are whole numbers, so that clamping may
  // come first; adding 1.5 * 2^23 then rounds to the nearest even integer and leaves it in the low bits.
  __device__ __forceinline__ uint32_t code(float t) const {
    const float v = fmul(t, recip);
    return __float_as_uint(fadd(fminf(fmaxf(v == v ? v : 0.f, low), high), 12582912.f + 256.f));
  }
  // Halves are positive with their zero points too: nothing is carried between them.
  __device__ __forceinline__ uint32_t pair(float a, float b) const {
    return __byte_perm(code(a), code(b), 0x5410) + static_cast<uint32_t>(zero_points);
  }
};

// Two pairs of codes as four bytes.
__device__ __forceinline__ uint32_t bytes_of_pairs(uint32_t low, uint32_t high) {
  return __byte_perm(low, high, 0x6420);
}

// Sixteen codes in order from the words of a quad, of which word s holds codes 2s, 2s + 1 of two runs of eight.
__device__ __forceinline__ uint4 runs_of_codes(const uint4& word) {
  return make_uint4(__byte_perm(word.x, word.y, 0x5410), __byte_perm(word.z, word.w, 0x5410),
                    __byte_perm(word.x, word.y, 0x7632), __byte_perm(word.z, word.w, 0x7632));
}

// What stands in for a tile's absent scales and bias: it changes no bit, and loads of it need no guards.
struct Filled {
  static constexpr int kColumns = 256;
  float value[kColumns];
  constexpr explicit Filled(float all) : value{} {
    for (float& v : value) v = all;
  }
};
static __device__ const Filled kOnes(1.f), kMinusZeros(-0.f);

// The values of a tile in pairs, all at a time, so that one branch chooses between 16-bit types and the rest of the
// code stands once for both.
struct TileHalves {
  static constexpr int kBytes = 2;
  bool is_f16;
  template <int kCount>
  __device__ __forceinline__ void pairs(const float (&t)[2 * kCount], uint32_t (&pair)[kCount]) const {
    if (is_f16) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) pair[i] = pair_of_floats<true>(t[2 * i], t[2 * i + 1]);
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) pair[i] = pair_of_floats<false>(t[2 * i], t[2 * i + 1]);
    }
  }
};

struct TileCodes {
  static constexpr int kBytes = 1;
  PlainCodes codes;
  template <int kCount>
  __device__ __forceinline__ void pairs(const float (&t)[2 * kCount], uint32_t (&pair)[kCount]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) pair[i] = codes.pair(t[2 * i], t[2 * i + 1]);
  }
};

struct TileFloats {
  static constexpr int kBytes = 4;
};

template <class Acc>
class Plain90 {
 public:
  __device__ __forceinline__ Plain90(const EpilogueParams& p, const CodeLimits& limits)
      : p_(p),
        limits_(limits),
        quad_(static_cast<int32_t>(threadIdx.x) & 3),
        row_(static_cast<int32_t>(threadIdx.x) / 4 % 8) {}

  // Whether straight tiles have registers for float32 results, and for what it takes to reach over an N that is a
  // multiple of 16: a predicate for every load and store of columns.
  template <class Fragment>
  static constexpr bool kHasRoom = cute::size(Fragment{}) <= 64;

  // Whether the code of activations stands once: swapped tiles with more sums are converted by parts.
  template <class Fragment>
  static constexpr bool kHasCurves = cute::size(Fragment{}) <= 96;

  // Whether there are registers for activations and residuals: beside widened weights and 80 sums ptxas spills.
  template <class Fragment, int kShift>
  static constexpr bool kTakesMore = kShift == 0 || cute::size(Fragment{}) < 80 || cute::size(Fragment{}) > 96;

  // sums: ((2, 2, 4 groups), repeats, 1) values of a thread; own: their coordinates within the tile at (row0, column0),
  // whose columns are all inside of N unless it reaches over.
  template <class Fragment, class Coordinates>
  __device__ __forceinline__ void straight(const Fragment& sums, const Coordinates& own, int32_t row0,
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
    const auto store = [&](const auto& out) {
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
    store_as(store);
  }

  // sums: ((2, 2, blocks of eight tokens), repeats, instructions), the sums times 2^shift; of zero points one for all
  // tokens, whose terms fit (epilogue_params). False, and nothing is stored: a channel's scale is so small that it
  // cannot take the factor.
  template <int kShift, class Fragment, class Coordinates>
  __device__ __forceinline__ bool swapped(const Fragment& sums, const Coordinates& own, int32_t row0,
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

  // Numbers `at` and at + 1 of `count` at an address, or 0. As C++ it becomes branches.
  __device__ __forceinline__ static float2 load_pair(size_t from, int32_t count, int at) {
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
    if (tokens < 8 * (c + kCount)) {
      CUTLASS_PRAGMA_UNROLL
      for (int q = 0; q < kCount; ++q) x[q] = load_pair(scales + 32 * (c + q), tokens - 2 * quad_, 8 * (c + q));
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int q = 0; q < kCount; ++q) x[q] = load_written_two(scales + 32 * (c + q));
    }
  }

  // In place. The shortest one as straight-line code, as everything here; of the others, whose code would be most of a
  // kernel, one copy, to which a loop brings a few values at a time.
  template <bool kWithCurves = true, int kCount>
  __device__ __forceinline__ void activate_tile(float (&t)[kCount]) const {
    constexpr int kOfStep = 4 << (kCount % 8 == 0), kSteps = kCount / kOfStep;
    static_assert(kCount % kOfStep == 0 && kSteps <= kMostSteps);
    switch (p_.activation) {
      case Activation::none: return;
      case Activation::relu: return activate_as<activations::relu>(t, p_);
      default: break;
    }
    if constexpr (kWithCurves) {  // store90.cuh sends others another way
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = 0; step < kSteps; ++step) {
        float v[kOfStep];
        at_step(step, [&](auto s) {
          if constexpr (s() < kSteps) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kOfStep; ++i) v[i] = t[kOfStep * s() + i];
          }
        });
        activate_all(v, p_);
        at_step(step, [&](auto s) {
          if constexpr (s() < kSteps) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kOfStep; ++i) t[kOfStep * s() + i] = v[i];
          }
        });
      }
    }
  }

  // t[2 i], t[2 i + 1] += the two half words of pair[i].
  template <int kCount>
  __device__ __forceinline__ void add_pairs(float* t, const uint32_t (&pair)[kCount]) const {
    const auto add = [&](auto is_f16) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        const float2 v = floats_of_pair<decltype(is_f16)::value>(pair[i]);
        t[2 * i] = fadd(t[2 * i], v.x);
        t[2 * i + 1] = fadd(t[2 * i + 1], v.y);
      }
    };
    if (p_.residual_type == DType::f16)
      add(std::true_type{});
    else
      add(std::false_type{});
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

  // The arithmetic of both kinds of results stands once, in front of this.
  template <class Store>
  __device__ __forceinline__ void store_as(const Store& store) const {
    if (p_.plain90 == PlainOut::codes)
      store(TileCodes{PlainCodes(limits_)});
    else if (p_.plain90 == PlainOut::f32)
      store(TileFloats{});
    else
      store(TileHalves{p_.plain90 == PlainOut::f16});
  }

  __device__ __forceinline__ static size_t global(const void* at) { return __cvta_generic_to_global(at); }
  template <class Out>
  __device__ __forceinline__ size_t address(int32_t m, int32_t n) const {
    return global(p_.out) + (static_cast<int64_t>(m) * p_.ldo + n) * Out::kBytes;
  }

  const EpilogueParams& p_;
  const CodeLimits& limits_;
  int32_t quad_, row_;  // lane = 4 * row + quad
};

}  // namespace pyquant::cuda
