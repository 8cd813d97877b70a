// Weights as in a checkpoint, turned into the left operand of wgmma with 16-bit floats: of eight neighbouring codes of a
// row, lane q of a quad multiplies codes 2q and 2q + 1, a byte of each four (int4) or half a word (int8).
#pragma once
#include <cute/tensor.hpp>

#include <cstdint>

#include "cuda/gemm/decode_math.cuh"

namespace pyquant::cuda {

// A lane loads 16 neighbouring bytes of 64, and the quad exchanges them: everything for two of its lanes, then for one,
// four permutations of bytes and two shuffles each.
template <class Math>
class QuadPieces {
  static constexpr bool kNibbles = is_packed(Math::kW);

 public:
  using Layout = cute::Layout<cute::Shape<cute::_8, cute::_64>, cute::Stride<cute::_64, cute::_1>>;  // of rows
  static constexpr int kEights = kNibbles ? 16 : 8;  // of codes in 64 bytes
  struct Words {
    uint32_t word[4];  // two codes of each eight
  };

  __device__ __forceinline__ explicit QuadPieces(int32_t thread)
      : at_(16 * (thread % 4)), is_odd_(thread % 2 != 0) {
    const bool is_high = thread / 2 % 2 != 0;
    const uint32_t low = kNibbles ? 0x5410 : 0x3210, high = kNibbles ? 0x7632 : 0x7654;
    keep_half_ = is_high ? high : low;
    send_half_ = is_high ? low : high;
    // Of words that were kept and received: in the order of the lanes that loaded them.
    const uint32_t even = kNibbles ? 0x6420 : 0x5410, odd = kNibbles ? 0x7531 : 0x7632;
    const auto ordered = [&](uint32_t s) { return is_high ? (s << 8 | s >> 8) & 0xffff : s; };
    keep_ = ordered(is_odd_ ? odd : even);
    send_ = ordered(is_odd_ ? even : odd);
  }

  // row: of the calling lane, 64 bytes.
  __device__ __forceinline__ void read(const uint8_t* row, Words& words) const {
    const uint4 v = *reinterpret_cast<const uint4*>(row + at_);
    const uint32_t own[4] = {v.x, v.y, v.z, v.w};
    uint32_t part[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t a = own[2 * i], b = own[2 * i + 1];
      const uint32_t kept = __byte_perm(a, b, keep_half_);
      const uint32_t received = __shfl_xor_sync(0xffffffffu, __byte_perm(a, b, send_half_), 2);
      part[2 * i] = __byte_perm(kept, received, keep_);
      part[2 * i + 1] = __shfl_xor_sync(0xffffffffu, __byte_perm(kept, received, send_), 1);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) words.word[i] = is_odd_ ? part[i ^ 1] : part[i];
  }

  // The lane's codes of eight `eight`, as 16-bit floats.
  static __device__ __forceinline__ uint32_t pair(const Words& words, int eight, const typename Math::Offset& offset) {
    uint32_t widened[4];
    if constexpr (kNibbles) {
      // Math takes the low nibbles of both halves: of the byte, and of it shifted.
      const uint32_t word = words.word[eight / 2 % 2 * 2 + eight / 4 % 2];
      const int byte = eight / 8 * 2 + eight % 2;
      const uint32_t halves = __byte_perm(word, word >> 4, 0x0400 + 0x0101 * byte);
      Math::weights(make_uint4(halves, 0, 0, 0), 0, offset, widened);
      return widened[0];
    } else {
      const int word = eight % 2 * 2 + eight / 2 % 2;
      Math::weights(make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]), word / 2, offset, widened);
      return widened[word % 2 * 2 + eight / 4];
    }
  }

 private:
  int32_t at_;
  bool is_odd_;
  uint32_t keep_half_, send_half_, keep_, send_;
};

// A lane loads what it needs of each eight codes.
template <class Math>
class LanePieces {
  static constexpr bool kNibbles = is_packed(Math::kW);

 public:
  using Layout = cute::GMMA::Layout_K_SW64_Atom<uint8_t>;  // a quarter of a row of every lane lies in another bank
  static constexpr int kEights = kNibbles ? 16 : 8;        // of codes in 64 bytes
  struct Words {
    uint32_t word[kEights];
  };

  __device__ __forceinline__ explicit LanePieces(int32_t thread)
      : at_(thread % 4 * (kNibbles ? 1 : 2)), swizzle_(thread / 8 % 4 * 16) {
    asm volatile("mov.b32 %0, 0x1001;" : "=r"(spread_));
  }

  // row: of the calling lane, 64 bytes.
  __device__ __forceinline__ void read(const uint8_t* row, Words& words) const {
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
      const uint8_t* at = row + ((16 * piece) ^ swizzle_) + at_;
#pragma unroll
      for (int i = 0; i < kEights / 4; ++i) {
        if constexpr (kNibbles)
          words.word[kEights / 4 * piece + i] = at[4 * i] * spread_;
        else
          words.word[kEights / 4 * piece + i] = *reinterpret_cast<const uint16_t*>(at + 8 * i);
      }
    }
  }

  // The lane's codes of eight `eight`, as 16-bit floats.
  static __device__ __forceinline__ uint32_t pair(const Words& words, int eight, const typename Math::Offset& offset) {
    uint32_t widened[4];
    Math::weights(make_uint4(words.word[eight], 0, 0, 0), 0, offset, widened);
    return widened[0];
  }

 private:
  int32_t at_, swizzle_;
  uint32_t spread_;  // a multiplication that the compiler takes for one: other pipes than that of bits have time for it
};

}  // namespace pyquant::cuda
