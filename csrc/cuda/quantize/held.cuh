// What a thread holds of a row (or group) between its range and its codes, and how that becomes codes: units at a fixed
// distance, whole ones in a straight line, the ends of rows and odd addresses in a loop that keeps kernels short.
#pragma once
#include "cuda/quantize/codes.cuh"

namespace pyquant::cuda {

constexpr int64_t kMostColumns = 2147000000;  // of a row or group: columns and what a block may add to them are 32-bit

// What a block holds of a row at once, as a thread sees it: its unit i begins at column first + i * step.
struct Chunk {
  int first, step;
  int left, room;      // columns of the matrix and of the output from `first` on; none where negative
  bool whole, padded;  // the matrix ends with a whole unit; the output has columns that it has not
};

// use(i) for each of a thread's units that begins `whole` columns on or before: where all do, which is asked once,
// without a question for each.
template <int Units, class Use>
__device__ __forceinline__ void each_whole(const Chunk& chunk, int whole, Use use) {
  if ((Units - 1) * chunk.step <= whole) {
#pragma unroll
    for (int i = 0; i < Units; ++i) use(i);
    return;
  }
#pragma unroll
  for (int i = 0; i < Units; ++i)
    if (i * chunk.step <= whole) use(i);
}

// Units as they lie in memory.
template <class T, int Units>
struct KeptUnits {
  using Range = RangeOf<T>;
  static constexpr int kWidth = kVector<T>;
  static constexpr int kUnits = Units;
  Unit<T> unit[Units];
  __device__ __forceinline__ void load(const T* row, const Chunk& chunk, bool vector) {
    const T* from = row + chunk.first;
    const int whole = vector ? chunk.left - kWidth : -1;  // where the last whole unit may begin
    if ((Units - 1) * chunk.step <= whole) {
#pragma unroll
      for (int i = 0; i < Units; ++i) unit[i] = load_whole(from + i * chunk.step);
      return;
    }
#pragma unroll
    for (int i = 0; i < Units; ++i) unit[i] = i * chunk.step <= whole ? load_whole(from + i * chunk.step) : Unit<T>{};
    if (vector && chunk.whole) return;
#pragma unroll 1  // the end of a row, or rows off the boundaries: a loop keeps the kernel short
    for (int i = 0; i < Units; ++i) {
      const int column = i * chunk.step;
      if (column < chunk.left && column > whole) put(i, load_part(from + column, chunk.left - column));
    }
  }
  // unit[i] where i is not known to the compiler: an array that is indexed so would leave the registers.
  __device__ __forceinline__ void put(int i, const Unit<T>& from) {
#pragma unroll
    for (int k = 0; k < Units; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j) unit[k].word[j] = k == i ? from.word[j] : unit[k].word[j];
  }
  __device__ __forceinline__ Unit<T> at(int i) const {
    Unit<T> result = unit[0];
#pragma unroll
    for (int k = 1; k < Units; ++k)
#pragma unroll
      for (int j = 0; j < 4; ++j) result.word[j] = k == i ? unit[k].word[j] : result.word[j];
    return result;
  }
  __device__ __forceinline__ void widen(Range& range, bool symmetric) const {
#pragma unroll
    for (int i = 0; i < Units; ++i) range.widen(unit[i], symmetric);
  }
  __device__ __forceinline__ void values(int i, float (&v)[kWidth]) const { widen_unit(unit[i], v); }
  __device__ __forceinline__ void values_at(int i, float (&v)[kWidth]) const { widen_unit(at(i), v); }
};

// Values that memory does not hold: what a norm or a gate made of a unit.
template <class T, int Units, int Width = kVector<T>>
struct KeptFloats {
  using Range = RangeOf<float>;
  static constexpr int kWidth = Width;
  static constexpr int kUnits = Units;
  float value[Units][kWidth];
  __device__ __forceinline__ void put(int i, const float (&v)[kWidth]) {
#pragma unroll
    for (int k = 0; k < Units; ++k)
#pragma unroll
      for (int j = 0; j < kWidth; ++j) value[k][j] = k == i ? v[j] : value[k][j];
  }
  __device__ __forceinline__ void widen(Range& range, bool symmetric) const {
    if (symmetric)  // asked once, not an element
      widen_all<true>(range);
    else
      widen_all<false>(range);
  }
  template <bool kSymmetric>
  __device__ __forceinline__ void widen_all(Range& range) const {
#pragma unroll
    for (int i = 0; i < Units; ++i)
#pragma unroll
      for (int j = 0; j < kWidth; ++j) range.widen(__float_as_uint(value[i][j]), kSymmetric);
  }
  __device__ __forceinline__ void values(int i, float (&v)[kWidth]) const {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) v[j] = value[i][j];
  }
  __device__ __forceinline__ void values_at(int i, float (&v)[kWidth]) const {
    values(0, v);
#pragma unroll
    for (int k = 1; k < Units; ++k)
#pragma unroll
      for (int j = 0; j < kWidth; ++j) v[j] = k == i ? value[k][j] : v[j];
  }
};

// The distance of a thread's units, where the values that it keeps say it as Kept::kStep; otherwise 0.
template <class Kept, class = void>
inline constexpr int kStepOf = 0;
template <class Kept>
inline constexpr int kStepOf<Kept, decltype(void(Kept::kStep))> = Kept::kStep;

// From held values to the codes of a row. kValues: what is known of all values at least.
template <Values kValues>
struct CodeWriter {
  Coder coder;
  bool within;
  uint8_t* codes;  // of column 0
  int32_t sum = 0;

  // Whole units in a straight line; the rest (sums, the end of a row) unit by unit in a loop.
  template <class Kept>
  __device__ __forceinline__ void put(const Codes& to, const Chunk& chunk, const Kept& kept) {
    constexpr int kWidth = Kept::kWidth;
    const bool fast = to.vector && !to.row_sum;
    const int whole = fast ? chunk.left - kWidth : -1;
    if (kValues == Values::finite && within)
      put_whole<Values::within>(to, chunk, whole, kept);
    else
      put_whole<kValues>(to, chunk, whole, kept);
    if (fast && chunk.whole && !chunk.padded) return;
#pragma unroll 1
    for (int i = 0; i < Kept::kUnits; ++i) {
      const int column = i * chunk.step;
      if (column >= chunk.room || column <= whole) continue;
      float v[kWidth];
      uint32_t words[kWidth / 4];
      kept.values_at(i, v);
      coder.template code<kValues>(v, words);
      store_codes(codes, chunk.first + column, chunk.room - column, chunk.left - column, to, words);
      if (to.row_sum) sum = coder.sum(words, sum);
    }
  }

 private:
  template <Values kKnown, class Kept>
  __device__ __forceinline__ void put_whole(const Codes& to, const Chunk& chunk, int whole, const Kept& kept) const {
    if constexpr (kStepOf<Kept> > 0) {  // an offset that the store holds
      if (to.packed)
        put_apart<kKnown, true>(chunk, whole, kept);
      else
        put_apart<kKnown, false>(chunk, whole, kept);
      return;
    }
    const int shift = to.packed ? 1 : 0, step = chunk.step >> shift;
    uint8_t* at = codes + (chunk.first >> shift);
    each_whole<Kept::kUnits>(chunk, whole, [&](int i) {
      float v[Kept::kWidth];
      uint32_t words[Kept::kWidth / 4];
      kept.values(i, v);
      coder.template code<kKnown>(v, words);
      store_whole(at + i * step, to.packed, words);
    });
  }
  template <Values kKnown, bool kPacked, class Kept>
  __device__ __forceinline__ void put_apart(const Chunk& chunk, int whole, const Kept& kept) const {
    uint8_t* at = codes + (kPacked ? chunk.first / 2 : chunk.first);
    each_whole<Kept::kUnits>(chunk, whole, [&](int i) {
      float v[Kept::kWidth];
      uint32_t words[Kept::kWidth / 4];
      kept.values(i, v);
      coder.template code<kKnown>(v, words);
      store_whole(at + i * (kPacked ? Kept::kStep / 2 : Kept::kStep), kPacked, words);
    });
  }
};

// Threads of a block that owns a row: enough to hold it in `units` units each; more where rows are few, so that these
// few fill the device (1 << 17 threads are half of what an H200 runs at once), and no more than the row has units.
inline int row_threads(int64_t rows, int64_t room, int width, int units, int most, int64_t at_once = 1 << 17) {
  const auto warps = [](int64_t threads) { return (threads + 31) / 32 * 32; };
  const int64_t all = (room + width - 1) / width, least = warps((all + units - 1) / units);
  int64_t threads = warps(at_once / (rows < 1 ? 1 : rows));
  threads = threads > warps(all) ? warps(all) : threads;
  threads = threads < least ? least : threads;
  return static_cast<int>(threads < 32 ? 32 : threads > most ? most : threads);
}

}  // namespace pyquant::cuda
