// Loads and stores of the elementwise kernels: any element type widened to fp32, sixteen bytes at a time where the
// addresses allow it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "core/epilogue_math.h"

namespace pyquant::cuda {

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half narrow<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Elements that one 16-byte load brings.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <class T>
__device__ __forceinline__ void load_vector(const T* from, float (&x)[kVector<T>]) {
  union {
    uint4 words;
    T element[kVector<T>];
  } v;
  v.words = *reinterpret_cast<const uint4*>(from);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) x[i] = widen(v.element[i]);
}

// Width neighbouring elements, of which `valid` exist; the others read as 0. vector: `from` is aligned to 16 bytes, or
// to all of the elements where they are fewer.
template <int Width, class T>
__device__ __forceinline__ void load_run(const T* from, int64_t valid, bool vector, float (&x)[Width]) {
  constexpr int kBytes = Width * static_cast<int>(sizeof(T));
  static_assert(kBytes == 8 || kBytes % 16 == 0, "");
  if (vector && valid >= Width) {
    union {
      uint4 words[(kBytes + 15) / 16];
      uint2 half;
      T element[Width];
    } v;
    if constexpr (kBytes == 8) {
      v.half = *reinterpret_cast<const uint2*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 16; ++i) v.words[i] = reinterpret_cast<const uint4*>(from)[i];
    }
#pragma unroll
    for (int i = 0; i < Width; ++i) x[i] = widen(v.element[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < Width; ++i) x[i] = i < valid ? widen(from[i]) : 0.f;
}

inline bool is_aligned(const void* pointer, int64_t row_bytes, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0 && row_bytes % bytes == 0;
}

// Calls body with a value of the C++ type that stands for a floating-point DType.
template <class Body>
void with_float_type(DType type, const char* what, Body body) {
  switch (type) {
    case DType::f32: return body(float{});
    case DType::f16: return body(__half{});
    case DType::bf16: return body(__nv_bfloat16{});
    default: throw std::runtime_error(std::string(what) + ": expected f32, f16 or bf16, got " + name_of(type));
  }
}

}  // namespace pyquant::cuda
