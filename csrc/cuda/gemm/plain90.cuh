// The epilogue that most layers run, as straight-line code: scales and a bias, no activation, residual or zero point;
// f16, bf16 or s8 out. The operations of finish_row (epilogue.cuh) in their order, so the same bits; what differs is
// what surrounds them: scales are fetched ahead, values are converted and packed before lanes exchange them, and every
// lane stores 16 bytes of a row at a time.
//   Straight (tokens are the rows of the accumulator): a lane holds pairs of columns of every block of eight; packed
//   words of four blocks (codes: of eight) are transposed within the quad.
//   Swapped (channels are the rows): movmatrix turns 8 channels x 8 tokens around, then the same transposition.
// EpilogueParams::plain says whether a launch may come here.
#pragma once
#include <cute/tensor.hpp>

#include "cuda/gemm/epilogue.cuh"
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
  __device__ __forceinline__ explicit PlainCodes(const CodeLimits& limits)
      : recip(limits.recip), low(limits.low), high(limits.high) {}
  // code_from_real for a zero point of 0, in the low byte. The limits are whole numbers, so that clamping may come
  // first; adding 1.5 * 2^23 then rounds to the nearest even integer and leaves it in the low bits.
  __device__ __forceinline__ uint32_t code(float t) const {
    const float v = fmul(t, recip);
    return __float_as_uint(fadd(fminf(fmaxf(v == v ? v : 0.f, low), high), 12582912.f));
  }
  __device__ __forceinline__ uint32_t pair(float a, float b) const { return __byte_perm(code(a), code(b), 0x5410); }
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

template <class Out, class Acc>
class Plain90 {
 public:
  static constexpr bool kCodes = Out::kBytes == 1;

  __device__ __forceinline__ Plain90(const EpilogueParams& p, const CodeLimits& limits)
      : p_(p),
        out_(limits),
        quad_(static_cast<int32_t>(threadIdx.x) & 3),
        row_(static_cast<int32_t>(threadIdx.x) / 4 % 8) {}

  // acc: ((2, 2, 4 groups), repeats, 1) values of a thread; own: their coordinates within the tile at (row0, column0),
  // whose columns are all inside of N.
  template <class Fragment, class Coordinates>
  __device__ __forceinline__ void straight(const Fragment& acc, const Coordinates& own, int32_t row0,
                                           int32_t column0) const {
    constexpr int kGroups = cute::size<0, 2>(Fragment{}) / 4, kRows = 2 * cute::size<1>(Fragment{});
    static_assert(32 * kGroups <= Filled::kColumns);
    static_assert(!kCodes || kGroups % 2 == 0, "a lane's 16 codes are those of 64 columns");
    float x[kRows];
    uint8_t* row[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const int32_t m = row0 + cute::get<0>(own(cute::make_coord(0, r % 2, 0), r / 2, 0));
      x[r] = load_token(p_, m).x_scale;
      row[r] = m < p_.m ? address(m, column0) + 16 * quad_ : nullptr;
    }
    // One scale for all tokens is multiplied with the channel's first. Its address depends on the tile as the others
    // do, and so on the wait for the predecessor (store90.cuh); tiles beyond M store nothing.
    const float all = p_.scale_product_first ? load_token(p_, row0).x_scale : 1.f;
    if (p_.scale_product_first) {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) x[r] = 1.f;
    }
    const float* scale = (p_.w_scale ? p_.w_scale + column0 : kOnes.value) + 2 * quad_;
    const float* bias = (p_.bias ? p_.bias + column0 : kMinusZeros.value) + 2 * quad_;
    Columns next = load_columns(scale, bias, 0);
    uint32_t word[kRows][4];
    CUTLASS_PRAGMA_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      Columns columns = next;
      if (p_.scale_product_first) columns.times(all);
      if (g + 1 < kGroups) next = load_columns(scale, bias, 32 * (g + 1));
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRows; ++r) {
        uint32_t pair[4];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) {
          float v[2];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < 2; ++i) {
            const float t = real_of(acc(cute::make_coord(i, r % 2, 4 * g + j), r / 2, 0));
            v[i] = fadd(fmul(fmul(t, columns.scale[j][i]), x[r]), columns.bias[j][i]);
          }
          pair[j] = out_.pair(v[0], v[1]);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) {
          if constexpr (!kCodes)
            word[r][j] = pair[j];
          else if (j % 2 == 0)
            word[r][2 * (g % 2) + j / 2] = bytes_of_pairs(pair[j], pair[j + 1]);
        }
        if (kCodes && g % 2 == 0) continue;
        const uint4 whole = transpose_words(word[r]);
        if (row[r])
          *reinterpret_cast<uint4*>(row[r] + 64 * (kCodes ? g / 2 : g)) = kCodes ? runs_of_codes(whole) : whole;
      }
    }
  }

  // acc: ((2, 2, blocks of eight tokens), repeats, instructions), the sums times 2^shift. False, and nothing is stored:
  // a channel's scale is so small that it cannot take the factor.
  template <int kShift, class Fragment, class Coordinates>
  __device__ __forceinline__ bool swapped(const Fragment& acc, const Coordinates& own, int32_t row0,
                                          int32_t column0) const {
    constexpr int kBlocks = cute::size<0, 2>(Fragment{}), kRepeats = cute::size<1>(Fragment{}),
                  kColumns = cute::size<2>(Fragment{}) * kBlocks, kChunk = kCodes ? 4 : 2,
                  kMost = 4 * kRepeats * kColumns > 64 ? kChunk : 16,  // registers
        kAhead = kColumns < kMost ? kColumns : kMost;
    const float all = p_.scale_product_first ? load_token(p_, column0).x_scale : 1.f;
    float scale[kRepeats][2], bias[kRepeats][2];
    int32_t n[kRepeats];
    bool fits = true;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRepeats; ++i) {
      n[i] = row0 + cute::get<0>(own(cute::make_coord(0, 0, 0), i, 0)) - row_;
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        const Channel channel = load_channel(p_, n[i] + 8 * h + row_);
        scale[i][h] = fmul(fmul(all, channel.w_scale), 1.f / (1 << kShift));
        bias[i][h] = channel.bias;
        fits = fits && (kShift == 0 || fabsf(scale[i][h]) >= 0x1p-120f);
      }
    }
    if (kShift != 0 && !__all_sync(0xffffffffu, fits)) return false;
    // Scales of the lane's tokens, a pair of each block; 0 beyond M, where nobody stores.
    const bool is_one = !p_.x_scale || p_.scale_product_first;
    const int32_t tokens = is_one ? Filled::kColumns : p_.m - column0 - 2 * quad_;  // whose scales the lane may read
    const size_t scales = __cvta_generic_to_global((is_one ? kOnes.value : p_.x_scale + column0) + 2 * quad_);
    static_assert(8 * kColumns <= Filled::kColumns);
    const auto load_tokens = [&](int c) {
      if constexpr (kColumns < 32) {
        return load_pair(scales, tokens, 8 * c);
      } else {  // the sums leave no registers for an address: it is made anew, with branches
        const int32_t m = column0 + 8 * c + 2 * quad_;
        if (!p_.x_scale || p_.scale_product_first) return make_float2(1.f, 1.f);
        if (m + 1 < p_.m) return __ldg(reinterpret_cast<const float2*>(p_.x_scale + m));
        return make_float2(m < p_.m ? __ldg(p_.x_scale + m) : 1.f, 1.f);
      }
    };
    float2 x[kAhead];
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kAhead; ++c) x[c] = load_tokens(c);
    const int32_t column = kCodes ? quad_ : quad_ / 2;  // of a chunk, whose channels the lane stores
    const int32_t m0 = column0 + 8 * column + row_;
    uint8_t* token = address(m0, kCodes ? 0 : 8 * (quad_ % 2));
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kColumns; c += kChunk) {
      const bool stores = m0 + 8 * c < p_.m && c + column < kColumns;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRepeats; ++i) {
        uint32_t word[4];
        CUTLASS_PRAGMA_UNROLL
        for (int q = 0; q < kChunk; ++q) {
          uint32_t pair[2] = {0, 0};
          if (c + q < kColumns) {
            const int j = (c + q) % kBlocks, part = (c + q) / kBlocks;
            CUTLASS_PRAGMA_UNROLL
            for (int h = 0; h < 2; ++h) {
              const float2& at = x[(c + q) % kAhead];
              const float a = fmul(real_of(acc(cute::make_coord(0, h, j), i, part)), scale[i][h]);
              const float b = fmul(real_of(acc(cute::make_coord(1, h, j), i, part)), scale[i][h]);
              pair[h] = turned(out_.pair(fadd(fmul(a, at.x), bias[i][h]), fadd(fmul(b, at.y), bias[i][h])));
            }
          }
          if constexpr (kCodes) {
            word[q] = bytes_of_pairs(pair[0], pair[1]);
          } else {
            word[2 * q] = pair[0];
            word[2 * q + 1] = pair[1];
          }
        }
        const uint4 whole = transpose_words(word);
        if (stores && n[i] < p_.n)
          *reinterpret_cast<uint4*>(token + n[i] * Out::kBytes) = kCodes ? runs_of_codes(whole) : whole;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int q = 0; q < kChunk; ++q) {
        if (c + q + kAhead < kColumns) x[(c + q) % kAhead] = load_tokens(c + q + kAhead);
      }
      token += 8 * kChunk * p_.ldo * Out::kBytes;
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

  // Of this lane's pairs in 32 columns.
  __device__ __forceinline__ static Columns load_columns(const float* scale, const float* bias, int at) {
    Columns c;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < 4; ++j) {
      const float2 w = __ldg(reinterpret_cast<const float2*>(scale + at + 8 * j));
      const float2 b = __ldg(reinterpret_cast<const float2*>(bias + at + 8 * j));
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
        "@both ld.global.nc.v2.f32 {%0, %1}, [%2];\n"
        "@last ld.global.nc.f32 %0, [%2];\n"
        "}"
        : "=&f"(v.x), "=&f"(v.y)
        : "l"(from + 4 * at), "r"(count), "r"(at + 1));
    return v;
  }

  __device__ __forceinline__ uint8_t* address(int32_t m, int32_t n) const {
    return static_cast<uint8_t*>(p_.out) + (static_cast<int64_t>(m) * p_.ldo + n) * Out::kBytes;
  }

  const EpilogueParams& p_;
  Out out_;
  int32_t quad_, row_;  // lane = 4 * row + quad
};

}  // namespace pyquant::cuda
