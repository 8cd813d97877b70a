// Neighbours of a row as they come from memory, widened to floats with signs of their own in the same instructions.
#pragma once
#include "cuda/quantize/unit.cuh"

namespace pyquant::cuda {

// Which of Width neighbours change their signs, as `Piece::widen` takes it: of pairs of halves the sign bits of a word,
// otherwise an element's sign bit.
template <class T, int Width>
struct Signs {
  static constexpr bool kPairs = std::is_same_v<T, __half>;
  static constexpr int kBits = kPairs ? Width / 2 : Width;
  static constexpr uint32_t kAll = kPairs ? 0x80008000u : 0x80000000u;
  uint32_t bits[kBits];
  // flips(c): the sign bit of neighbour c.
  template <class Flips>
  static __device__ __forceinline__ Signs of(Flips flips) {
    Signs signs;
#pragma unroll
    for (int c = 0; c < kBits; ++c) signs.bits[c] = kPairs ? flips(2 * c) >> 16 | flips(2 * c + 1) : flips(c);
    return signs;
  }
  // The signs of four neighbours of a block, reversed. The last two differ.
  __device__ __forceinline__ Signs negated() const {
    Signs signs = also(kAll);
    if constexpr (Width == 4 && !kPairs) signs.bits[2] = bits[3], signs.bits[3] = bits[2];
    return signs;
  }
  // All of them as well, where `all` says so. What comes out is what a thread keeps: the compiler is not to combine it
  // with the words that it will be applied to.
  __device__ __forceinline__ Signs also(uint32_t all) const {
    Signs signs;
#pragma unroll
    for (int c = 0; c < kBits; ++c) {
      signs.bits[c] = bits[c] ^ all;
      asm("" : "+r"(signs.bits[c]));
    }
    return signs;
  }
};

// Width neighbours of a row of T as it lies in memory: words of a pair of 16-bit elements or of one float.
template <class T, int Width>
struct Piece {
  static constexpr int kWords = Width * static_cast<int>(sizeof(T)) / 4;
  uint32_t word[kWords];
  __device__ __forceinline__ void load(const T* from) {
    if constexpr (kWords == 4) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
    } else if constexpr (kWords == 2) {
      const uint2 all = *reinterpret_cast<const uint2*>(from);
      word[0] = all.x, word[1] = all.y;
    } else {
      word[0] = *reinterpret_cast<const uint32_t*>(from);
    }
  }
  // The same element by element: `count` of them exist, the others read as 0.
  __device__ __forceinline__ void load_some(const T* from, int count) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
#pragma unroll
    for (int j = 0; j < Width; ++j)
      if (j < count) word[j * kWords / Width] |= bits_of(from[j]) << (8 * sizeof(T) * j % 32);
  }
  __device__ __forceinline__ void widen(const Signs<T, Width>& signs, float (&v)[Width]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (!std::is_same_v<T, __nv_bfloat16>) {
        widen_word<T>(word[i] ^ signs.bits[i], v + i * (Width / kWords));
      } else {  // the sign comes with the move to the upper half: a sum without a carry
        uint32_t low, high;
        asm("mad.lo.u32 %0, %1, 65536, %2;" : "=r"(low) : "r"(word[i]), "r"(signs.bits[2 * i]));
        asm("lop3.b32 %0, %1, 0xffff0000, %2, 0x6a;" : "=r"(high) : "r"(word[i]), "r"(signs.bits[2 * i + 1]));
        v[2 * i] = __uint_as_float(low);
        v[2 * i + 1] = __uint_as_float(high);
      }
    }
  }
};

}  // namespace pyquant::cuda
