// A unit: what one 16-byte load brings, 8 elements of 16 bits or 4 of 32, as it lies in memory.
#pragma once
#include <type_traits>

#include "cuda/elements.cuh"
#include "cuda/pairs.cuh"

namespace pyquant::cuda {

template <class T>
struct Unit {
  uint32_t word[4];
};

// The elements of a word, widened.
template <class T>
__device__ __forceinline__ void widen_word(uint32_t word, float* v) {
  if constexpr (sizeof(T) == 4) {
    v[0] = __uint_as_float(word);
  } else {
    const float2 pair = floats_of_pair<std::is_same_v<T, __half>>(word);
    v[0] = pair.x;
    v[1] = pair.y;
  }
}

template <class T>
__device__ __forceinline__ void widen_unit(const Unit<T>& unit, float (&v)[kVector<T>]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) widen_word<T>(unit.word[i], v + i * (kVector<T> / 4));
}

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32_t bits_of(__half x) { return __half_as_ushort(x); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 x) { return __bfloat16_as_ushort(x); }

// Words put together by hand: where values arrive from two branches, nvcc takes a union of elements and words apart and
// stores element by element (tests/gpu/test_fake_quantize.py counts the sectors).
template <class T>
__device__ __forceinline__ Unit<T> narrow_unit(const float (&v)[kVector<T>]) {
  Unit<T> unit;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4)
      unit.word[i] = bits_of(v[i]);
    else
      unit.word[i] = pair_of_floats<std::is_same_v<T, __half>>(v[2 * i], v[2 * i + 1]);
  }
  return unit;
}

// How much there is from a column on, as far as a unit can tell.
__device__ __forceinline__ int clipped(int64_t columns, int most) {
  return columns < 0 ? 0 : columns < most ? static_cast<int>(columns) : most;
}

template <class T>
__device__ __forceinline__ Unit<T> load_whole(const T* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  return {words.x, words.y, words.z, words.w};
}

// `valid` elements exist, the others read as 0.
template <class T>
__device__ __forceinline__ Unit<T> load_part(const T* from, int valid) {
  Unit<T> unit{};
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j)
    if (j < valid) unit.word[j * static_cast<int>(sizeof(T)) / 4] |= bits_of(from[j]) << (8 * sizeof(T) * j % 32);
  return unit;
}

// vector: `from` is aligned to 16 bytes.
template <class T>
__device__ __forceinline__ Unit<T> load_unit(const T* from, int valid, bool vector) {
  return vector && valid >= kVector<T> ? load_whole(from) : load_part(from, valid);
}

template <class T>
__device__ __forceinline__ void store_whole_unit(T* to, const Unit<T>& unit) {
  __stwb(reinterpret_cast<uint4*>(to), make_uint4(unit.word[0], unit.word[1], unit.word[2], unit.word[3]));
}

template <class T>
__device__ __forceinline__ void store_unit(T* to, int valid, bool vector, Unit<T> unit) {
  if (vector && valid >= kVector<T>) return store_whole_unit(to, unit);
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  constexpr int kBits = 8 * static_cast<int>(sizeof(T)) % 32;
#pragma unroll 1  // rare: kept short
  for (int j = 0; j < kVector<T> && j < valid; ++j) {
    reinterpret_cast<Bits*>(to)[j] = static_cast<Bits>(unit.word[0]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t next = i < 3 ? unit.word[(i + 1) % 4] : 0;
      unit.word[i] = sizeof(T) == 4 ? next : __funnelshift_r(unit.word[i], next, kBits);
    }
  }
}

}  // namespace pyquant::cuda
