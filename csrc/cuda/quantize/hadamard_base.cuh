// The sums of the base matrix of a Hadamard transform, of 12, 20 or 28 runs: the first steps of rows whose length is
// not a power of two (docs/numerics.md 15).
#pragma once
#include "core/hadamard.h"
#include "cuda/quantize/hadamard_memory.cuh"
#include "cuda/quantize/hadamard_steps.cuh"
#include "cuda/quantize/pieces.cuh"

namespace pyquant::cuda {

// Signs and the sums of the base matrix, from memory, of Width neighbours in each of the Base runs of a block.
template <int Base, int Width, class T>
__device__ __forceinline__ void take_base_of(const T* from, int columns, int log2, TurnedMemory memory) {
  constexpr int kLog = Width == 4 ? 2 : Width - 1;
  const int inner = log2 - kLog, items = columns / (Base * Width);
  const uint32_t second = 4 * (turned_at(1 << log2) & 31), third = 4 * (turned_at(2 << log2) & 31);
  for (int item = static_cast<int>(threadIdx.x); item < items; item += static_cast<int>(blockDim.x)) {
    const int i = (item & ((1 << inner) - 1)) * Width, first = (item >> inner) * (Base << log2) + i;
    // Column a * 2^log2 + i + c of a block: the pairs of ones within a are constants, those within i + c belong to
    // later steps, and the one between them says this of odd a.
    float odd[Width];
#pragma unroll
    for (int c = 0; c < Width; ++c)
      odd[c] = __uint_as_float(0x3f800000u | (log2 > 0 ? static_cast<uint32_t>(i + c) >> (log2 - 1) << 31 : 0));
    float total[Base][Width];
    const T* at = from + first;
    each_constant<Base / 4>([&](auto group) {
      float t[4][Width], sums[8][Width];
#pragma unroll
      for (int a = 0; a < 4; ++a, at += 1 << log2) {
        if constexpr (Width == 1) {
          t[a][0] = static_cast<float>(*at);
        } else {
          Piece<T, Width> piece;
          piece.load(at);
          piece.widen(t[a]);
        }
      }
#pragma unroll
      for (int c = 0; c < Width; ++c) {
        const float left[2] = {ffma(t[1][c], odd[c], t[0][c]), ffma(t[1][c], -odd[c], t[0][c])},
                    right[2] = {ffma(t[3][c], odd[c], t[2][c]), ffma(t[3][c], -odd[c], t[2][c])};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          sums[2 * pair][c] = fadd(left[pair / 2], right[pair % 2]);
          sums[2 * pair + 1][c] = fsub(left[pair / 2], right[pair % 2]);
        }
      }
      constexpr HadamardFours<Base> kFours = hadamard_fours<Base>(4 * group);
#pragma unroll
      for (int column = 0; column < Base; ++column) {
        const HadamardFour four = kFours[column];
#pragma unroll
        for (int c = 0; c < Width; ++c) {
          const float term = sums[four.sum][c];
          float& to = total[column][c];
          if (group == 0)
            to = four.negative ? -term : term;
          else
            to = four.negative ? fsub(to, term) : fadd(to, term);
        }
      }
    });
    if (Width > 1 && log2 >= 7) {  // what lies four runs further has the same place among the banks
      const uint32_t begin = memory.address(first);
      each_constant<Base>([&](auto column) {
        const uint32_t to = begin ^ (column & 1 ? second : 0) ^ (column & 2 ? third : 0);
        store_some(to + (static_cast<uint32_t>(column) << (log2 + 2)), total[column]);
      });
    } else {
      each_constant<Base>([&](auto column) { store_some(memory.address(first + (column << log2)), total[column]); });
    }
  }
}
template <int Base, int Width, class T>
__device__ __forceinline__ void take_base(const T* from, bool vector, int columns, int log2, TurnedMemory memory) {
  if (vector && 1 << log2 >= Width)
    take_base_of<Base, Width>(from, columns, log2, memory);
  else
    take_base_of<Base, 1>(from, columns, log2, memory);
}

// A function that is called, once a row: within each kernel its thousands of straight lines are most of what is
// compiled.
template <class T>
__device__ __noinline__ void take_base(const T* from, bool vector, int columns, int log2, int base,
                                       TurnedMemory memory) {
  switch (base) {
    case 12: return take_base<12, 4>(from, vector, columns, log2, memory);
    case 20: return take_base<20, 2>(from, vector, columns, log2, memory);
    default: take_base<28, 2>(from, vector, columns, log2, memory);
  }
}

}  // namespace pyquant::cuda
