// The Hadamard transform of a row (docs/numerics.md 15) in shared memory: the sums of the base matrix, then butterflies
// from the largest step down, up to four steps while a thread holds their operands; the last four are left to whoever
// reads sixteen neighbours. Every exchange between threads is one store and one load of four floats.
#pragma once
#include <climits>
#include <utility>

#include "core/hadamard.h"
#include "cuda/quantize/signed_pieces.cuh"

namespace pyquant::cuda {

constexpr int kTurned = 16;  // neighbours that `TurnedRow::read` gives
constexpr int kLastSteps = 4;

// Where column j lies in shared memory: the four-float pieces of sixteen neighbours are exchanged so that a warp that
// walks along a row, or across it in steps of 16 or 256, meets every bank once.
__host__ __device__ constexpr int turned_at(int j) { return j ^ (j >> 3 & 0xc) ^ (j >> 4 & 0x10); }
// Column j + more, of which no bit is in both, lies at (bytes from the row's begin) (4 * turned_at(j) ^
// turned_flip(more))
// + turned_offset(more): a second address or none, and an offset that the instruction holds.
constexpr int turned_flip(int more) { return 4 * (turned_at(more) & 31); }
constexpr int turned_offset(int more) { return 4 * (turned_at(more) & ~31); }
inline int turned_floats(int64_t columns) { return static_cast<int>((columns + 31) / 32 * 32); }

// use(0), use(1) ... use(Count - 1), each number a constant.
template <class Use, int... Index>
__device__ __forceinline__ void each_constant(Use use, std::integer_sequence<int, Index...>) {
  (use(std::integral_constant<int, Index>()), ...);
}
template <int Count, class Use>
__device__ __forceinline__ void each_constant(Use use) {
  each_constant(use, std::make_integer_sequence<int, Count>());
}

// Butterflies with distances 2^(Power - 1) ... 2^(Power - Steps) between the entries of v, each of Width floats.
template <int Steps, int Power, int Width>
__device__ __forceinline__ void butterflies(float (&v)[1 << Power][Width]) {
#pragma unroll
  for (int bit = Power - 1; bit >= Power - Steps; --bit)
#pragma unroll
    for (int e = 0; e < 1 << Power; ++e) {
      if (e >> bit & 1) continue;
#pragma unroll
      for (int c = 0; c < Width; ++c) {
        const float a = v[e][c], b = v[e | 1 << bit][c];
        v[e][c] = fadd(a, b);
        v[e | 1 << bit][c] = fsub(a, b);
      }
    }
}

template <class T>
class TurnedRow {
 public:
  // Every thread of the block calls it. row: shared memory of turned_floats(columns), aligned to 128 bytes.
  __device__ __forceinline__ TurnedRow(const T* from, bool vector, int columns, int base, int log2, float* row)
      : row_(row), memory_(static_cast<uint32_t>(__cvta_generic_to_shared(row))), columns_(columns), log2_(log2) {
    const int left = begin(from, vector, base, log2);
    __syncthreads();
    if (left > 2 * kLastSteps) {
      turn<kLastSteps, 2 * kLastSteps>();
      __syncthreads();
    }
    if (left > kLastSteps) {
      turn<kLastSteps, kLastSteps>();
      __syncthreads();
    }
  }

  // use(i, sums of columns [first + i * kStep, first + i * kStep + kTurned)) of those of `Units` pieces that begin
  // before `left` columns; zeros beyond the row. first: a multiple of kTurned. straight: straight_from<Units,
  // kStep>(log2).
  template <int Units, int kStep, class Use>
  __device__ __forceinline__ void read(int first, int left, int straight, Use use) const {
    static_assert(kStep % 512 == 0);
    const uint32_t at = address(first);
    float v[kTurned];
    if (left > straight) {  // asked once, not a piece
      each_constant<Units>([&](auto i) {
        load_turned<4 * i * kStep>(at, v);
#pragma unroll
        for (int bit = kLastSteps - 1; bit >= 0; --bit) step(bit, v);
        use(i, v);
      });
      return;
    }
    each_constant<Units>([&](auto i) {
      if (i * kStep >= left) return;
      load_turned<4 * i * kStep>(at, v);
#pragma unroll
      for (int bit = kLastSteps - 1; bit >= 0; --bit)
        if (bit < log2_) step(bit, v);
      use(i, v);
    });
  }

  // Where `read` found them; the caller waits for all threads before someone reads them back, four at a time.
  __device__ __forceinline__ void put_back(int first, const float (&v)[kTurned]) const {
    const uint32_t at = address(first);
    each_constant<kTurned / 4>([&](auto i) { store_four<0>(at ^ turned_flip(4 * i), v + 4 * i); });
  }
  __device__ __forceinline__ void read_back(int first, float* v) const { load_four<0>(address(first), v); }

  // All pieces have all their last steps where more columns than these are left; the host computes it.
  template <int Units, int kStep>
  static int straight_from(int log2) {
    return log2 >= kLastSteps ? (Units - 1) * kStep : INT_MAX;
  }

 private:
  // Addresses of shared memory are 32 bits wide here and have their offsets in the instruction: pointers of C++ would
  // be computed in 64 bits, one by one.
  __device__ __forceinline__ uint32_t address(int column) const {
    return memory_ + 4 * static_cast<uint32_t>(turned_at(column));
  }
  template <int kOffset>
  static __device__ __forceinline__ void load_four(uint32_t from, float* v) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4+%5];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(from), "n"(kOffset)
                 : "memory");
  }
  template <int kOffset>
  static __device__ __forceinline__ void store_four(uint32_t to, const float* v) {
    asm volatile("st.shared.v4.f32 [%0+%1], {%2, %3, %4, %5};" ::"r"(to), "n"(kOffset), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                 "f"(v[3])
                 : "memory");
  }
  template <int kOffset>
  static __device__ __forceinline__ void load_turned(uint32_t at, float (&v)[kTurned]) {
    each_constant<kTurned / 4>([&](auto i) { load_four<kOffset>(at ^ turned_flip(4 * i), v + 4 * i); });
  }
  // Piece e of those that lie 2^kLow columns apart.
  template <int kLow, class Index>
  static __device__ __forceinline__ void load_piece(uint32_t at, Index e, float (&v)[4]) {
    load_four<turned_offset(e << kLow)>(at ^ turned_flip(e << kLow), v);
  }
  template <int Power, int kLow>
  static __device__ __forceinline__ void put(uint32_t at, const float (&v)[1 << Power][4]) {
    each_constant<1 << Power>([&](auto e) { store_four<turned_offset(e << kLow)>(at ^ turned_flip(e << kLow), v[e]); });
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

  // What is read behind the row is zero; rows of blocks of 32 and more powers of two end with a whole 32.
  __device__ __forceinline__ void clear_end() {
#pragma unroll 1
    for (int j = (columns_ + 3) / 4 * 4 + static_cast<int>(threadIdx.x); j < (columns_ + 31) / 32 * 32;
         j += static_cast<int>(blockDim.x))
      row_[turned_at(j)] = 0.f;
  }

  // Signs, the sums of the base matrix and the first steps, from memory; returns how many steps are left: a multiple of
  // kLastSteps, or fewer.
  __device__ __forceinline__ int begin(const T* from, bool vector, int base, int log2) {
    if (base != 1) {
      clear_end();
      return take_base(from, vector, base, log2);
    }
    switch (log2) {  // distances are constants in the code, and so is where a thread's operands lie
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
        clear_end();
        take_steps<0, 0, 0>(from, vector, log2);
        return log2;
      case 5: take_steps<1, 1, 4>(from, vector); return 4;
      case 6: take_steps<2, 2, 4>(from, vector); return 4;
      case 7: take_steps<3, 3, 4>(from, vector); return 4;
      case 8: take_steps<4, 4, 4>(from, vector); return 4;
      case 9: take_steps<4, 1, 5>(from, vector); return 8;
      case 10: take_steps<4, 2, 6>(from, vector); return 8;
      case 11: take_steps<4, 3, 7>(from, vector); return 8;
      case 12: take_steps<4, 4, 8>(from, vector); return 8;
      case 13: take_steps<4, 1, 9>(from, vector); return 12;
      case 14: take_steps<4, 2, 10>(from, vector); return 12;
      default: take_steps<4, 3, 11>(from, vector); return 12;  // 2^16 columns are more than shared memory holds
    }
  }
  __device__ __forceinline__ int take_base(const T* from, bool vector, int base, int log2) {
    switch (base) {
      case 12: take_base<12>(from, vector, log2); break;
      case 20: take_base<20>(from, vector, log2); break;
      default: take_base<28>(from, vector, log2);
    }
    const int some = log2 % kLastSteps, low = log2 - some;
    if (some == 0 || low == 0) return log2;
    __syncthreads();
    switch (some) {
      case 1: turn_at<1>(low); break;
      case 2: turn_at<2>(low); break;
      default: turn_at<3>(low);
    }
    return low;
  }
  template <int Steps>
  __device__ __forceinline__ void turn_at(int low) {
    if (low == 4)
      turn<Steps, 4>();
    else  // 12 * 2^13 columns are too many
      turn<Steps, 8>();
  }

  // Where the pieces of an item lie: 2^Power of four neighbours each, 2^low columns apart.
  template <int Power>
  static __device__ __forceinline__ int first_of(int item, int low) {
    const int inner = low < 2 ? 0 : low - 2;
    return (item >> inner << (inner + Power) | (item & ((1 << inner) - 1))) << 2;
  }
  // Whether a thread's next item lies blockDim.x << (Power + 2) columns behind it, at the same place of its block, in
  // memory too: a block of threads is whole warps.
  template <int Power, int kLow>
  static constexpr bool kEven = Power >= 2 && kLow >= 2 && kLow <= 7;

  // The first Steps steps of blocks of 2^log2, whose largest distance is that of a thread's 2^Power pieces; log2 is
  // Power + kLow, but where Power is 0.
  template <int Power, int Steps, int kLow>
  __device__ __forceinline__ void take_steps(const T* from, bool vector, int log2 = Power + kLow) {
    using FourSigns = Signs<T, 4>;
    const int low = Power > 0 ? kLow : log2, pieces = (columns_ + 3) >> (2 + Power);
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    int first = first_of<Power>(thread, low);
    uint32_t to = address(first);
    const T* at = from + first;
#pragma unroll 1
    for (int item = thread; item < pieces; item += threads) {
      if constexpr (!kEven<Power, kLow>) {
        first = first_of<Power>(item, low);
        to = address(first);
        at = from + first;
      }
      // Column j = e * 2^low + 4 l + c of a block: the pairs of ones within e, within l, within c and between them.
      const int inner = low < 2 ? 0 : low - 2, l = (kEven<Power, kLow> ? thread : item) & ((1 << inner) - 1);
      const uint32_t own = hadamard_flips(static_cast<uint32_t>(l)) << 31, odd = static_cast<uint32_t>(l) << 31;
      const FourSigns plain = FourSigns::of([&](int c) {
        const uint32_t sign = c < 2 ? own : c == 2 ? own ^ odd : own ^ odd ^ 0x80000000u;
        return log2 >= 2 ? sign : 0;  // shorter blocks have no sign
      });
      const FourSigns behind = plain.also(inner > 0 && l >> (inner - 1) & 1 ? FourSigns::kAll : 0);
      const FourSigns sign[2][2] = {{plain, plain.negated()}, {behind, behind.negated()}};
      Piece<T, 4> piece[1 << Power];
      float v[1 << Power][4];
      const int count = Power > 0 ? 4 : columns_ - first;  // fewer only at the end of rows of blocks of 1 or 2
      if (vector && count >= 4) {
#pragma unroll
        for (int e = 0; e < 1 << Power; ++e) piece[e].load(at + (e << kLow));
      } else {
#pragma unroll
        for (int e = 0; e < 1 << Power; ++e) piece[e].load_some(at + (e << kLow), count);
      }
#pragma unroll
      for (int e = 0; e < 1 << Power; ++e) piece[e].widen(sign[e & 1][hadamard_flips(static_cast<uint32_t>(e))], v[e]);
      butterflies<Steps, Power>(v);
      put<Power, kLow>(to, v);
      if constexpr (kEven<Power, kLow>) {
        at += threads << (Power + 2);
        to += static_cast<uint32_t>(threads << (Power + 4));
      }
    }
  }

  // Steps that are not the first, the least of distance 2^kLow.
  template <int Steps, int kLow>
  __device__ __forceinline__ void turn() {
    const int pieces = columns_ >> (2 + Steps);
#pragma unroll 1
    for (int item = static_cast<int>(threadIdx.x); item < pieces; item += static_cast<int>(blockDim.x)) {
      const uint32_t at = address(first_of<Steps>(item, kLow));
      float v[1 << Steps][4];
      each_constant<1 << Steps>([&](auto e) { load_piece<kLow>(at, e, v[e]); });
      butterflies<Steps, Steps>(v);
      put<Steps, kLow>(at, v);
    }
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
      float t[Base][Width];
      if constexpr (Width == 1) {  // a block of one in each run: no pairs but those within its number
#pragma unroll
        for (int a = 0; a < Base; ++a) {
          const float v = static_cast<float>(from[first + a]);
          t[a][0] = __uint_as_float(__float_as_uint(v) ^ hadamard_flips(static_cast<uint32_t>(a)) << 31);
        }
      } else {
        // Column a * 2^log2 + i + c of a block: the pairs of ones within a, within i + c and between them.
        using Two = Signs<T, 2>;
        const auto own = [&](int c) { return hadamard_flips(static_cast<uint32_t>(i + c)) << 31; };
        const Two even = Two::of(own),
                  odd = Two::of([&](int c) { return own(c) ^ static_cast<uint32_t>(i + c) >> (log2 - 1) << 31; });
        const Two sign[2][2] = {{even.also(0), even.also(Two::kAll)}, {odd.also(0), odd.also(Two::kAll)}};
#pragma unroll
        for (int a = 0; a < Base; ++a) {
          Piece<T, 2> piece;
          if (vector)
            piece.load(from + first + (a << log2));
          else
            piece.load_some(from + first + (a << log2), 2);
          piece.widen(sign[a & 1][hadamard_flips(static_cast<uint32_t>(a))], t[a]);
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
  int columns_, log2_;
};

}  // namespace pyquant::cuda
