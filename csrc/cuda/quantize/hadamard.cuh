// The Hadamard transform of a row (docs/numerics.md 15) in shared memory: the sums of the base matrix, then
// butterflies, three or four steps while a thread holds their operands; the last ones, of 256, 128 and 8 to 1, are left
// to whoever reads four times sixteen neighbours. Every exchange between threads is one store and one load of four
// floats.
#pragma once
#include "cuda/quantize/hadamard_base.cuh"
#include "cuda/quantize/hadamard_memory.cuh"
#include "cuda/quantize/hadamard_steps.cuh"
#include "cuda/quantize/pieces.cuh"

namespace pyquant::cuda {

constexpr int kTurned = 16;        // neighbours of a unit that `TurnedRow::read` gives
constexpr int kTurnedUnits = 4;    // of a thread
constexpr int kTurnedApart = 128;  // columns from one to the next
constexpr int kLastSteps = 4;      // of distances below kTurned

inline int turned_floats(int64_t columns) { return static_cast<int>((columns + 31) / 32 * 32); }

// kOneChunk: the block has a thread for each 64 columns.
template <class T, bool kOneChunk>
class TurnedRow {
 public:
  // Every thread of the block calls it. row: shared memory of turned_floats(columns), aligned to 128 bytes. whole: the
  // threads that read have all their units.
  __device__ __forceinline__ TurnedRow(const T* from, bool vector, int columns, int base, int log2, bool whole,
                                       float* row)
      : row_(row),
        memory_{static_cast<uint32_t>(__cvta_generic_to_shared(row))},
        columns_(columns),
        log2_(log2),
        apart_(whole ? min(max(log2 - 7, 0), 2) : 0) {
    if (base == 1)
      begin(from, vector);
    else
      begin_base(from, vector, base);
    if (log2 > 7 && !whole) {
      if (log2 == 8)
        turn<Held<16, 7>>();
      else
        turn<Held<16, 8, 7>>();
    }
  }

  // v: the sums of the units of sixteen columns that begin at first + i * kTurnedApart, as many as begin before `left`
  // columns; zeros beyond the row. first: a multiple of kTurned whose bits are not those of i * kTurnedApart.
  __device__ __forceinline__ void read(int first, int left, float (&v)[kTurnedUnits][kTurned]) const {
    const uint32_t at = memory_.address(first);
    if (left > (kTurnedUnits - 1) * kTurnedApart) {  // asked once, not a unit
      each_constant<kTurnedUnits>([&](auto i) { load_unit_of<i>(at, v[i]); });
    } else {
      each_constant<kTurnedUnits>([&](auto i) {
        if (i * kTurnedApart < left) {
          load_unit_of<i>(at, v[i]);
        } else {
#pragma unroll
          for (int c = 0; c < kTurned; ++c) v[i][c] = 0.f;
        }
      });
    }
    if (apart_ == 2) {
#pragma unroll
      for (int c = 0; c < kTurned; ++c) {
        butterfly(v[0][c], v[2][c], false);
        butterfly(v[1][c], v[3][c], true);
      }
    }
    if (apart_ > 0) {
#pragma unroll
      for (int c = 0; c < kTurned; ++c) {
        butterfly(v[0][c], v[1][c], false);
        butterfly(v[2][c], v[3][c], false);
      }
    }
    if (log2_ >= kLastSteps) {
      each_constant<kLastSteps>([&](auto i) { step<kLastSteps - 1 - i>(v); });
    } else {
      each_constant<kLastSteps - 1>([&](auto i) {
        if (kLastSteps - 2 - i < log2_) step<kLastSteps - 2 - i>(v);
      });
    }
  }

  // Where `read` found them; the caller waits for all threads before someone reads them back, four at a time.
  __device__ __forceinline__ void put_back(int first, const float (&v)[kTurned]) const {
    const uint32_t at = memory_.address(first);
    each_constant<kTurned / 4>([&](auto i) { store_four<0>(at ^ turned_flip(4 * i), v + 4 * i); });
  }
  __device__ __forceinline__ void read_back(int first, float* v) const { load_four<0>(memory_.address(first), v); }

 private:
  template <int kUnit>
  static __device__ __forceinline__ void load_unit_of(uint32_t at, float (&v)[kTurned]) {
    each_constant<kTurned / 4>([&](auto i) {
      constexpr int kMore = kUnit * kTurnedApart + 4 * i;
      load_four<turned_offset(kMore)>(at ^ turned_flip(kMore), v + 4 * i);
    });
  }
  // use(where the four floats lie that are number c of piece e, the offset of the instruction)
  template <class H, class Use>
  static __device__ __forceinline__ void each_four(uint32_t at, Use use) {
    each_constant<H::kCount>([&](auto e) {
      each_constant<H::kWidth / 4>([&](auto c) {
        constexpr int kMore = H::column(e) + 4 * c;
        use(e, c, at ^ turned_flip(kMore), std::integral_constant<int, turned_offset(kMore)>());
      });
    });
  }
  template <class H>
  static __device__ __forceinline__ void put(uint32_t at, const float (&v)[H::kCount][H::kWidth]) {
    each_four<H>(at, [&](auto e, auto c, uint32_t to, auto offset) { store_four<offset>(to, v[e] + 4 * c); });
  }

  // Of distance 2^Bit, within units.
  template <int Bit>
  static __device__ __forceinline__ void step(float (&v)[kTurnedUnits][kTurned]) {
#pragma unroll
    for (int i = 0; i < kTurnedUnits; ++i)
#pragma unroll
      for (int c = 0; c < kTurned; ++c)
        if (!(c >> Bit & 1)) butterfly(v[i][c], v[i][c | 1 << Bit], Bit > 0 && (c >> (Bit > 0 ? Bit - 1 : 0) & 1));
  }

  // What is read behind the row is zero, up to a whole 32, with which rows of blocks of 32 and more powers of two end.
  __device__ __forceinline__ void clear_end(int from) {
#pragma unroll 1
    for (int j = from + static_cast<int>(threadIdx.x); j < (columns_ + 31) / 32 * 32; j += static_cast<int>(blockDim.x))
      row_[turned_at(j)] = 0.f;
  }

  // Pieces of one load each.
  template <int... Bits>
  using First = Held<kVector<T>, Bits...>;
  // The steps that `read` and those of 256 and 128 leave, of a row in memory.
  __device__ __forceinline__ void begin(const T* from, bool vector) {
    switch (log2_) {  // distances are constants in the code, and so is where a thread's operands lie
      case 0:
      case 1:
      case 2:
      case 3:
      case 4: clear_end((columns_ + kVector<T> - 1) / kVector<T> * kVector<T>); return take<First<>>(from, vector);
      case 5: return take<First<4>>(from, vector);
      case 6: return take<First<5, 4>>(from, vector);
      case 7:
      case 8:
      case 9: return take<First<6, 5, 4>>(from, vector);
      case 10: return take<Held<4, 9, 6, 5, 4>>(from, vector);
      case 11: take<First<10, 9, 6>>(from, vector); return turn<Held<16, 5, 4>>();
      case 12: take<First<11, 10, 9>>(from, vector); return turn<Held<8, 6, 5, 4>>();
      case 13: take<First<12, 11, 10>>(from, vector); return turn<Held<4, 9, 6, 5, 4>>();
      case 14: take<Held<4, 13, 12, 11, 10>>(from, vector); return turn<Held<4, 9, 6, 5, 4>>();
      default:  // 2^16 columns are more than shared memory holds
        take<Held<4, 14, 13, 12, 11>>(from, vector);
        turn<Held<16, 10, 9>>();
        turn<Held<8, 6, 5, 4>>();
    }
  }
  __device__ __forceinline__ void begin_base(const T* from, bool vector, int base) {
    clear_end(columns_);
    take_base(from, vector, columns_, log2_, base, memory_);
    __syncthreads();
    switch (log2_) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4: return;
      case 5: return turn<Held<8, 4>>();
      case 6: return turn<Held<8, 5, 4>>();
      case 7:
      case 8:
      case 9: return turn<Held<8, 6, 5, 4>>();
      case 10: return turn<Held<4, 9, 6, 5, 4>>();
      case 11: turn<Held<16, 10, 9>>(); return turn<Held<8, 6, 5, 4>>();
      default: turn<Held<8, 11, 10, 9>>(); return turn<Held<8, 6, 5, 4>>();  // 12 * 2^13 columns are too many
    }
  }

  // The first steps, from memory.
  template <class H>
  __device__ __forceinline__ void take(const T* from, bool vector) {
    each_item<H>([&](int first) {
      const T* at = from + static_cast<uint32_t>(first);
      const StepSigns<H> signs(first, log2_);
      Piece<T, H::kWidth> piece[H::kCount];
      float v[H::kCount][H::kWidth];
      const int count = H::kSteps > 0 ? H::kWidth : columns_ - first;  // fewer only at the end of rows of short blocks
      if (vector && count >= H::kWidth) {
#pragma unroll
        for (int e = 0; e < H::kCount; ++e) piece[e].load(at + H::column(e));
      } else {
#pragma unroll
        for (int e = 0; e < H::kCount; ++e) piece[e].load_some(at + H::column(e), count);
      }
#pragma unroll
      for (int e = 0; e < H::kCount; ++e) piece[e].widen(v[e]);
      butterflies<H>(v, signs);
      put<H>(memory_.address(first), v);
    });
    __syncthreads();
  }

  // Steps that are not the first.
  template <class H>
  __device__ __forceinline__ void turn() {
    each_item<H>([&](int first) {
      const uint32_t at = memory_.address(first);
      float v[H::kCount][H::kWidth];
      each_four<H>(at, [&](auto e, auto c, uint32_t from, auto offset) { load_four<offset>(from, v[e] + 4 * c); });
      butterflies<H>(v, StepSigns<H>(first, log2_));
      put<H>(at, v);
    });
    __syncthreads();
  }
  // use(its first column) for each item of this thread.
  template <class H, class Use>
  __device__ __forceinline__ void each_item(Use use) {
    Items<H> item;
    if constexpr (kOneChunk && H::kCount * H::kWidth == kTurnedUnits * kTurned) {
      if (item.first < columns_) use(item.first);
    } else {
#pragma unroll 1
      for (; item.first < columns_; item.next()) use(item.first);
    }
  }

  float* row_;
  TurnedMemory memory_;
  int columns_, log2_;
  int apart_;  // steps between the units of a thread
};

}  // namespace pyquant::cuda
