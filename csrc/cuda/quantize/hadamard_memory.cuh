// Where the columns of a row that the Hadamard transform turns lie in shared memory, and the loads and stores of four
// of them. Addresses of shared memory are 32 bits wide here and have their offsets in the instruction: pointers of C++
// would be computed in 64 bits, one by one.
#pragma once
#include <cstdint>

namespace pyquant::cuda {

// Where column j lies in shared memory: pieces of four floats are exchanged so that eight neighbouring lanes meet every
// bank once, whichever three bits of a column tell them apart: 4, 5, 6 (units); 3, 7, 8; 3, 4, 5; 2, 3, 7; 6, 7, 8; or
// 2, 3, 4. (Blocks of 32 and 64 alone have others, and meet some twice.)
__host__ __device__ constexpr int turned_at(int j) { return j ^ (j >> 3 & 0x1c) ^ (j >> 6 & 4); }
// Column j + more, of which no bit is in both, lies at (bytes from the row's begin) (4 * turned_at(j) ^
// turned_flip(more)) + turned_offset(more): a second address or none, and an offset that the instruction holds.
__host__ __device__ constexpr int turned_flip(int more) { return 4 * (turned_at(more) & 31); }
__host__ __device__ constexpr int turned_offset(int more) { return 4 * (turned_at(more) & ~31); }

struct TurnedMemory {
  uint32_t begin;  // of the row

  __device__ __forceinline__ uint32_t address(int column) const {
    return begin + 4 * static_cast<uint32_t>(turned_at(column));
  }
};

template <int kOffset>
__device__ __forceinline__ void load_four(uint32_t from, float* v) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4+%5];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(from), "n"(kOffset)
               : "memory");
}
template <int kOffset>
__device__ __forceinline__ void store_four(uint32_t to, const float* v) {
  asm volatile("st.shared.v4.f32 [%0+%1], {%2, %3, %4, %5};" ::"r"(to), "n"(kOffset), "f"(v[0]), "f"(v[1]), "f"(v[2]),
               "f"(v[3])
               : "memory");
}
__device__ __forceinline__ void store_some(uint32_t to, const float (&v)[4]) { store_four<0>(to, v); }
__device__ __forceinline__ void store_some(uint32_t to, const float (&v)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(v[0]), "f"(v[1]) : "memory");
}
__device__ __forceinline__ void store_some(uint32_t to, const float (&v)[1]) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v[0]) : "memory");
}

}  // namespace pyquant::cuda
