// Weights as in a checkpoint, turned into the left operand of wgmma with 16-bit floats.
//   Of eight neighbouring codes of a row, lane q of a quad multiplies codes 2q and 2q + 1: a byte of each four (int4)
//   or half a word (int8). Loaded as such they would be a quarter of what a lane can load. So a lane loads 16
//   neighbouring bytes, and the quad exchanges them: everything for two of its lanes, then for one, four permutations
//   of bytes and two shuffles each, for 64 bytes.
#pragma once
#include <cstdint>

#include "cuda/gemm/decode_math.cuh"

namespace pyquant::cuda {

// What a lane has of 64 bytes of a row, four words: two codes of each eight.
template <class Math>
class QuadPieces {
  static constexpr bool kNibbles = is_packed(Math::kW);

 public:
  static constexpr int kEights = kNibbles ? 16 : 8;

  // Of the calling lane: how to permute.
  class Exchange {
   public:
    __device__ __forceinline__ explicit Exchange(int32_t thread) : is_odd_(thread % 2 != 0) {
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

    // own: bytes 16q to 16q + 15, in place.
    __device__ __forceinline__ void operator()(uint32_t (&own)[4]) const {
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
      for (int i = 0; i < 4; ++i) own[i] = is_odd_ ? part[i ^ 1] : part[i];
    }

   private:
    bool is_odd_;
    uint32_t keep_half_, send_half_, keep_, send_;
  };

  // The lane's codes of eight `eight`, as 16-bit floats.
  static __device__ __forceinline__ uint32_t pair(const uint32_t (&words)[4], int eight,
                                                  const typename Math::Offset& offset) {
    uint32_t widened[4];
    if constexpr (kNibbles) {
      // Math takes the low nibbles of both halves: of the byte, and of it shifted.
      const uint32_t word = words[eight / 2 % 2 * 2 + eight / 4 % 2];
      const int byte = eight / 8 * 2 + eight % 2;
      const uint32_t halves = __byte_perm(word, word >> 4, 0x0400 + 0x0101 * byte);
      Math::weights(make_uint4(halves, 0, 0, 0), 0, offset, widened);
      return widened[0];
    } else {
      const int word = eight % 2 * 2 + eight / 2 % 2;
      Math::weights(make_uint4(words[0], words[1], words[2], words[3]), word / 2, offset, widened);
      return widened[word % 2 * 2 + eight / 4];
    }
  }
};

}  // namespace pyquant::cuda
