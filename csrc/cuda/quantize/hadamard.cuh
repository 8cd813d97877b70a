// The Hadamard transform of a row (docs/numerics.md 15) in shared memory: the sums of the base matrix, then butterflies
// from the largest step down, up to four steps while a thread holds their operands; the last four are left to whoever
// reads sixteen neighbours. Every exchange between threads is one store and one load of four floats.
#pragma once
#include <utility>

#include "core/hadamard.h"
#include "cuda/quantize/unit.cuh"

namespace pyquant::cuda {

constexpr int kTurned = 16;  // neighbours that `TurnedRow::read` gives
constexpr int kLastSteps = 4;

// Where column j lies in shared memory: the four-float pieces of sixteen neighbours are exchanged so that a warp that
// walks along a row, or across it in steps of 16 or 256, meets every bank once.
__device__ __forceinline__ constexpr int turned_at(int j) { return j ^ (j >> 3 & 0xc) ^ (j >> 4 & 0x10); }
// Where column j + more lies, of which no bit is in both, with `at` = turned_at(j): what more flips among the low five
// bits, then its rest, which the compiler adds to the address of the load where it knows it.
__device__ __forceinline__ int turned_next(int at, int more) {
  const int turned = turned_at(more);
  return (at ^ (turned & 31)) + (turned & ~31);
}
inline int turned_floats(int64_t columns) { return static_cast<int>((columns + 31) / 32 * 32); }

// Butterflies with distances 2^(Steps - 1) ... 1 between the entries of v, each of Width floats.
template <int Steps, int Width>
__device__ __forceinline__ void butterflies(float (&v)[1 << Steps][Width]) {
#pragma unroll
  for (int bit = Steps - 1; bit >= 0; --bit)
#pragma unroll
    for (int e = 0; e < 1 << Steps; ++e) {
      if (e >> bit & 1) continue;
#pragma unroll
      for (int c = 0; c < Width; ++c) {
        const float a = v[e][c], b = v[e | 1 << bit][c];
        v[e][c] = fadd(a, b);
        v[e | 1 << bit][c] = fsub(a, b);
      }
    }
}

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
  // flips: the sign bits of every word, in which `all` reverses all signs.
  __device__ __forceinline__ void widen(const uint32_t (&flips)[kWords], uint32_t all, float (&v)[Width]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) widen_word<T>(word[i] ^ flips[i] ^ all, v + i * (Width / kWords));
  }
};

template <class T>
constexpr uint32_t kSignsOfWord = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;

template <class T>
class TurnedRow {
 public:
  // Every thread of the block calls it. row: shared memory of turned_floats(columns), aligned to 128 bytes.
  __device__ __forceinline__ TurnedRow(const T* from, bool vector, int columns, int base, int log2, float* row)
      : row_(row),
        memory_(static_cast<uint32_t>(__cvta_generic_to_shared(row))),
        columns_(columns),
        left_(log2 < kLastSteps ? log2 : kLastSteps) {
    for (int j = (columns + 3) / 4 * 4 + static_cast<int>(threadIdx.x); j < (columns + 31) / 32 * 32;
         j += static_cast<int>(blockDim.x))
      row_[turned_at(j)] = 0.f;
    int bits = log2;
    switch (base) {
      case 12: take_base<12>(from, vector, log2); break;
      case 20: take_base<20>(from, vector, log2); break;
      case 28: take_base<28>(from, vector, log2); break;
      default: bits = take(from, vector, log2);
    }
    __syncthreads();
    for (; bits > kLastSteps; bits -= kLastSteps) {
      const int some = (bits - 1) % kLastSteps + 1;  // the steps below come four at a time
      switch (some) {
        case 1: turn_at<1>(bits - 1); break;
        case 2: turn_at<2>(bits - 2); break;
        case 3: turn_at<3>(bits - 3); break;
        default: turn_at<4>(bits - 4);
      }
      __syncthreads();
      bits += kLastSteps - some;
    }
  }

  // The sums of columns [first, first + kTurned), zero beyond the row; first: a multiple of kTurned.
  __device__ __forceinline__ void read(int first, float (&v)[kTurned]) const {
    const uint32_t at = memory_ + 4 * static_cast<uint32_t>(turned_at(first));
#pragma unroll
    for (int i = 0; i < 4; ++i) load_four(at ^ 16 * i, v + 4 * i);
    if (left_ == kLastSteps) {
#pragma unroll
      for (int bit = kLastSteps - 1; bit >= 0; --bit) step(bit, v);
    } else {
#pragma unroll
      for (int bit = kLastSteps - 2; bit >= 0; --bit)
        if (bit < left_) step(bit, v);
    }
  }

  // Where `read` found them; the caller waits for all threads before someone reads them back, four at a time.
  __device__ __forceinline__ void put_back(int first, const float (&v)[kTurned]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<float4*>(row_ + turned_next(turned_at(first), 4 * i)) =
          make_float4(v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]);
  }
  __device__ __forceinline__ void read_back(int first, float* v) const {
    load_four(memory_ + 4 * static_cast<uint32_t>(turned_at(first)), v);
  }

 private:
  static __device__ __forceinline__ void load_four(uint32_t from, float* v) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(from)
                 : "memory");
  }
  static __device__ __forceinline__ void step(int bit, float (&v)[kTurned]) {
#pragma unroll
    for (int i = 0; i < kTurned; ++i) {
      if (i >> bit & 1) continue;
      const float a = v[i], b = v[i | 1 << bit];
      v[i] = fadd(a, b);
      v[i | 1 << bit] = fsub(a, b);
    }
  }

  // Signs, and the first steps of a base of 1, from memory; returns how many are left.
  __device__ __forceinline__ int take(const T* from, bool vector, int log2) {
    if (log2 <= kLastSteps) {
      take_steps<0>(from, vector, log2);
      return log2;
    }
    const int some = (log2 - 1) % kLastSteps + 1;
    switch (some) {
      case 1: take_at<1>(from, vector, log2 - 1); break;
      case 2: take_at<2>(from, vector, log2 - 2); break;
      case 3: take_at<3>(from, vector, log2 - 3); break;
      default: take_at<4>(from, vector, log2 - 4);
    }
    return log2 - some;
  }

  // The least step is a constant in the code, and so are the addresses of a thread's operands behind their first.
  template <int Steps>
  __device__ __forceinline__ void take_at(const T* from, bool vector, int low) {
    if (low == 4) {
      take_steps<Steps>(from, vector, std::integral_constant<int, 4>());
    } else if (low == 8) {
      take_steps<Steps>(from, vector, std::integral_constant<int, 8>());
    } else if constexpr (Steps < 4) {  // 2^16 columns are more than shared memory holds
      take_steps<Steps>(from, vector, std::integral_constant<int, 12>());
    }
  }
  template <int Steps>
  __device__ __forceinline__ void turn_at(int low) {
    if (low == 4)
      turn<Steps>(std::integral_constant<int, 4>());
    else  // 12 * 2^13 columns are too many likewise
      turn<Steps>(std::integral_constant<int, 8>());
  }

  // The steps of distance 2^(low + Steps - 1) ... 2^low, where low + Steps are all that a block has; Steps may be 0.
  template <int Steps, class Low>
  __device__ __forceinline__ void take_steps(const T* from, bool vector, Low low) {
    using Four = Piece<T, 4>;
    constexpr uint32_t kAll = kSignsOfWord<T>;
    const bool flips = low + Steps >= 2;  // shorter blocks have no sign
    const int inner = low < 2 ? 0 : low - 2, pieces = (columns_ + 3) / 4 >> Steps;
    for (int item = static_cast<int>(threadIdx.x); item < pieces; item += static_cast<int>(blockDim.x)) {
      const int l = item & ((1 << inner) - 1), first = (item >> inner << (inner + Steps) | l) << 2;
      // Column j = e * 2^low + 4 l + c of a block: the pairs of ones within e, within l, within c and between them.
      const uint32_t own = hadamard_flips(static_cast<uint32_t>(l)) ? kAll : 0, odd = l & 1 ? kAll : 0;
      const uint32_t carried = inner > 0 && l >> (inner - 1) & 1 ? kAll : 0;
      uint32_t sign[Four::kWords];
      if constexpr (sizeof(T) == 4) {
        sign[0] = sign[1] = own;
        sign[2] = own ^ odd;
        sign[3] = own ^ odd ^ kAll;
      } else {
        sign[0] = own;
        sign[1] = own ^ odd ^ 0x80000000u;
      }
#pragma unroll
      for (int i = 0; i < Four::kWords; ++i) sign[i] = flips ? sign[i] : 0;
      Four piece[1 << Steps];
      float v[1 << Steps][4];
      const int count = columns_ - first;  // fewer than four only at the end of rows of blocks of 1 or 2
      const T* at = from + first;
      if (vector && count >= 4) {
#pragma unroll
        for (int e = 0; e < 1 << Steps; ++e) piece[e].load(at + (e << low));
      } else {
#pragma unroll
        for (int e = 0; e < 1 << Steps; ++e) piece[e].load_some(at + (e << low), count);
      }
#pragma unroll
      for (int e = 0; e < 1 << Steps; ++e)
        piece[e].widen(sign, (hadamard_flips(static_cast<uint32_t>(e)) ? kAll : 0) ^ (e & 1 ? carried : 0), v[e]);
      butterflies<Steps>(v);
      put<Steps>(turned_at(first), low, v);
    }
  }

  // The same steps, where they are not the first.
  template <int Steps, class Low>
  __device__ __forceinline__ void turn(Low low) {
    const int inner = low - 2, pieces = columns_ / 4 >> Steps;
    for (int item = static_cast<int>(threadIdx.x); item < pieces; item += static_cast<int>(blockDim.x)) {
      const int first = (item >> inner << (inner + Steps) | (item & ((1 << inner) - 1))) << 2;
      const int at = turned_at(first);
      float v[1 << Steps][4];
#pragma unroll
      for (int e = 0; e < 1 << Steps; ++e) {
        const float4 four = *reinterpret_cast<const float4*>(row_ + turned_next(at, e << low));
        v[e][0] = four.x, v[e][1] = four.y, v[e][2] = four.z, v[e][3] = four.w;
      }
      butterflies<Steps>(v);
      put<Steps>(at, low, v);
    }
  }

  template <int Steps, class Low>
  __device__ __forceinline__ void put(int at, Low low, const float (&v)[1 << Steps][4]) const {
#pragma unroll
    for (int e = 0; e < 1 << Steps; ++e)
      *reinterpret_cast<float4*>(row_ + turned_next(at, e << low)) = make_float4(v[e][0], v[e][1], v[e][2], v[e][3]);
  }

  // Signs and the sums of the base matrix, from memory, of two neighbours in each of the Base runs of a block.
  template <int Base>
  __device__ __forceinline__ void take_base(const T* from, bool vector, int log2) {
    if (log2 == 0)
      take_base_of<Base, 1>(from, vector, log2);
    else
      take_base_of<Base, 2>(from, vector, log2);
  }
  template <int Base, int Width>
  __device__ __forceinline__ void take_base_of(const T* from, bool vector, int log2) {
    const int inner = log2 - (Width - 1), pieces = columns_ / (Base * Width);
    for (int item = static_cast<int>(threadIdx.x); item < pieces; item += static_cast<int>(blockDim.x)) {
      const int i = (item & ((1 << inner) - 1)) * Width, first = (item >> inner) * (Base << log2) + i;
      uint32_t own[Width], carried[Width];  // pairs of ones within the number in the run, and between it and the run's
#pragma unroll
      for (int c = 0; c < Width; ++c) {
        own[c] = hadamard_flips(static_cast<uint32_t>(i + c)) << 31;
        carried[c] = own[c] ^ (log2 > 0 ? static_cast<uint32_t>(i + c) >> (log2 - 1) << 31 : 0);
      }
      float t[Base][Width];
#pragma unroll
      for (int a = 0; a < Base; ++a) {
        const T* at = from + first + (a << log2);
        if constexpr (Width == 2) {
          Piece<T, 2> piece;
          if (vector)
            piece.load(at);
          else
            piece.load_some(at, 2);
          const uint32_t none[Piece<T, 2>::kWords] = {};
          piece.widen(none, 0, t[a]);
        } else {
          t[a][0] = static_cast<float>(*at);
        }
#pragma unroll
        for (int c = 0; c < Width; ++c) {
          const uint32_t all = hadamard_flips(static_cast<uint32_t>(a)) << 31;
          t[a][c] = __uint_as_float(__float_as_uint(t[a][c]) ^ (a & 1 ? carried[c] : own[c]) ^ all);
        }
      }
      sums_of_base<Base>(t, first, log2, std::make_integer_sequence<int, Base>());
    }
  }
  template <int Base, int Width, int... Column>
  __device__ __forceinline__ void sums_of_base(const float (&t)[Base][Width], int first, int log2,
                                               std::integer_sequence<int, Column...>) const {
    (sum_of_base<Base, Column>(t, first + (Column << log2), std::make_integer_sequence<int, Base - 1>()), ...);
  }
  template <int Base, int Column, int Width, int... Row>
  __device__ __forceinline__ void sum_of_base(const float (&t)[Base][Width], int to,
                                              std::integer_sequence<int, Row...>) const {
    constexpr bool kNegative = hadamard_is_negative(Base, 0, Column);
    float total[Width];
#pragma unroll
    for (int c = 0; c < Width; ++c) {
      total[c] = kNegative ? -t[0][c] : t[0][c];
      ((total[c] = term<hadamard_is_negative(Base, Row + 1, Column)>(total[c], t[Row + 1][c])), ...);
    }
    if constexpr (Width == 2)
      *reinterpret_cast<float2*>(row_ + turned_at(to)) = make_float2(total[0], total[1]);
    else
      row_[turned_at(to)] = total[0];
  }
  template <bool kNegative>
  static __device__ __forceinline__ float term(float total, float v) {
    return kNegative ? fsub(total, v) : fadd(total, v);
  }

  float* row_;
  uint32_t memory_;
  int columns_, left_;
};

}  // namespace pyquant::cuda
