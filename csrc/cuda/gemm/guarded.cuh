// Loads and stores under a predicate instead of a branch, which would end a straight line of code. Addresses are those
// of global memory. What belongs to weights is read through the cache for constants. What belongs to activations may
// have been written while this kernel was there already (overlap.cuh): scales are read by ordinary loads, which the
// wait for the predecessor makes right and which find in L1 what another warp has read; what is read once comes from
// L2.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace pyquant::cuda {

__device__ __forceinline__ float load_if(bool inside, size_t from, float otherwise) {
  asm("{\n"
      ".reg .pred inside;\n"
      "setp.ne.u32 inside, %1, 0;\n"
      "@inside ld.global.nc.f32 %0, [%2];\n"
      "}"
      : "+f"(otherwise)
      : "r"(static_cast<uint32_t>(inside)), "l"(from));
  return otherwise;
}
__device__ __forceinline__ float load_written_if(bool inside, size_t from, float otherwise) {
  asm("{\n"
      ".reg .pred inside;\n"
      "setp.ne.u32 inside, %1, 0;\n"
      "@inside ld.global.ca.f32 %0, [%2];\n"
      "}"
      : "+f"(otherwise)
      : "r"(static_cast<uint32_t>(inside)), "l"(from));
  return otherwise;
}
__device__ __forceinline__ float2 load_written_two(size_t from) {
  float2 v;
  asm("ld.global.ca.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
  return v;
}
__device__ __forceinline__ float2 load_two_if(bool inside, size_t from) {
  float2 v;
  asm("{\n"
      ".reg .pred inside;\n"
      "setp.ne.u32 inside, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "@inside ld.global.nc.v2.f32 {%0, %1}, [%3];\n"
      "}"
      : "=&f"(v.x), "=&f"(v.y)
      : "r"(static_cast<uint32_t>(inside)), "l"(from));
  return v;
}
__device__ __forceinline__ uint4 load_written_words_if(bool inside, size_t from) {
  uint4 v;
  asm("{\n"
      ".reg .pred inside;\n"
      "setp.ne.u32 inside, %4, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@inside ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%5];\n"
      "}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "r"(static_cast<uint32_t>(inside)), "l"(from));
  return v;
}
template <int kWords>
__device__ __forceinline__ void store_floats_if(bool inside, size_t to, const float* v) {
  static_assert(kWords == 1 || kWords == 2);
  if constexpr (kWords == 2)
    asm volatile(
        "{\n"
        ".reg .pred inside;\n"
        "setp.ne.u32 inside, %0, 0;\n"
        "@inside st.global.v2.f32 [%1], {%2, %3};\n"
        "}" ::"r"(static_cast<uint32_t>(inside)),
        "l"(to), "f"(v[0]), "f"(v[1]));
  else
    asm volatile(
        "{\n"
        ".reg .pred inside;\n"
        "setp.ne.u32 inside, %0, 0;\n"
        "@inside st.global.f32 [%1], %2;\n"
        "}" ::"r"(static_cast<uint32_t>(inside)),
        "l"(to), "f"(v[0]));
}
__device__ __forceinline__ void store_if(bool inside, size_t to, const uint4& v) {
  asm volatile(
      "{\n"
      ".reg .pred inside;\n"
      "setp.ne.u32 inside, %0, 0;\n"
      "@inside st.global.v4.b32 [%1], {%2, %3, %4, %5};\n"
      "}" ::"r"(static_cast<uint32_t>(inside)),
      "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

}  // namespace pyquant::cuda
