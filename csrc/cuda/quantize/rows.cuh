// One scale per row, made from the row itself: a block owns a row, a thread some of its units, which stay in the
// thread's registers: their range gives the step, and the same thread turns them into codes (or fake-quantised values).
// A row of more units than a block can hold is walked in chunks, and read again for its codes.
//
//   struct Input {
//     static constexpr int kThreads;  // most threads of a block
//     using Kept = ...;               // what a thread keeps: KeptUnits or KeptFloats
//     struct Row {
//       Row(const Input&, int64_t row, const RowSpan&, RowShared&);  // may read the whole row; every thread calls it
//       void load(const Chunk&, Kept&);
//     };
//   };
//   struct Output {
//     struct Row {
//       void open(const Output&, int64_t row, const Step&, const CodeRange&);
//       void put(const Output&, const Chunk&, const Kept&);
//       void close(const Output&, int64_t row, RowShared&);  // every thread calls it
//     };
//   };
#pragma once
#include "core/norm_math.h"
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/codes.cuh"

namespace pyquant::cuda {

struct RowShared {
  Range ranges[kMostThreads / 32];
  int32_t counts[kMostThreads / 32];
  float sums[2][32];
};

// What a block holds of a row at once, as a thread sees it: its unit i begins at column first + i * step.
struct Chunk {
  int first, step;
  int left, room;      // columns of the matrix and of the output from `first` on; none where negative
  bool whole, padded;  // the matrix ends with a whole unit; the output has columns that it has not
};

struct RowSpan {
  int cols, room;     // columns of the matrix and of the output
  int step, columns;  // between the units of a thread; of a chunk
  int chunks;
  template <int Width>
  __device__ __forceinline__ Chunk chunk(int index) const {
    const int first = index * columns + static_cast<int>(threadIdx.x) * Width;
    return {first, step, cols - first, room - first, cols % Width == 0, room > cols};
  }
};

constexpr int64_t kMostColumns = 2147000000;  // of a row: columns and what a block may add to them are 32-bit

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
template <class T, int Units>
struct KeptFloats {
  using Range = RangeOf<float>;
  static constexpr int kWidth = kVector<T>;
  static constexpr int kUnits = Units;
  float value[Units][kWidth];
  __device__ __forceinline__ void put(int i, const float (&v)[kWidth]) {
#pragma unroll
    for (int k = 0; k < Units; ++k)
#pragma unroll
      for (int j = 0; j < kWidth; ++j) value[k][j] = k == i ? v[j] : value[k][j];
  }
  __device__ __forceinline__ void widen(Range& range, bool symmetric) const {
#pragma unroll
    for (int i = 0; i < Units; ++i)
#pragma unroll
      for (int j = 0; j < kWidth; ++j) range.widen(__float_as_uint(value[i][j]), symmetric);
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

// The matrix itself, without a norm or gate.
template <class T, int Threads = kMostThreads>
struct PlainInput {
  static constexpr int kThreads = Threads;
  using Kept = KeptUnits<T, 8>;
  const T* x;
  int64_t ld;
  bool vector;

  struct Row {
    const T* x;
    bool vector;
    __device__ __forceinline__ Row(const PlainInput& in, int64_t row, const RowSpan&, RowShared&)
        : x(in.x + row * in.ld), vector(in.vector) {}
    __device__ __forceinline__ void load(const Chunk& chunk, Kept& kept) const { kept.load(x, chunk, vector); }
  };
};

struct RowCodes {
  Codes to;
  struct Row {
    Coder coder;
    bool within;
    uint8_t* codes;
    int32_t sum;
    __device__ __forceinline__ void open(const RowCodes& out, int64_t row, const Step& step, const CodeRange& range) {
      coder = Coder::own(step, out.to);
      within = Coder::is_within(step, range.symmetric, out.to);
      codes = out.to.row(row);
      sum = 0;
    }
    // Whole units of one byte a code in a straight line; the rest (packed codes, sums, the end of a row) unit by unit
    // in a loop, which keeps the kernel short.
    template <class Kept>
    __device__ __forceinline__ void put(const RowCodes& out, const Chunk& chunk, const Kept& kept) {
      constexpr int kWidth = Kept::kWidth;
      const bool fast = out.to.vector && !out.to.row_sum;
      const int whole = fast ? chunk.left - kWidth : -1;
      if (within)
        put_whole<Values::within>(out, chunk, whole, kept);
      else
        put_whole<Values::finite>(out, chunk, whole, kept);
      if (fast && chunk.whole && !chunk.padded) return;
#pragma unroll 1
      for (int i = 0; i < Kept::kUnits; ++i) {
        const int column = i * chunk.step;
        if (column >= chunk.room || column <= whole) continue;
        float v[kWidth];
        uint32_t words[kWidth / 4];
        kept.values_at(i, v);
        coder.code<Values::finite>(v, words);
        store_codes(codes, chunk.first + column, chunk.room - column, chunk.left - column, out.to, words);
        if (out.to.row_sum) sum = coder.sum(words, sum);
      }
    }
    template <Values kValues, class Kept>
    __device__ __forceinline__ void put_whole(const RowCodes& out, const Chunk& chunk, int whole,
                                              const Kept& kept) const {
      const int shift = out.to.packed ? 1 : 0;
      uint8_t* to = codes + (chunk.first >> shift);
#pragma unroll
      for (int i = 0; i < Kept::kUnits; ++i) {
        if (i * chunk.step > whole) continue;
        float v[Kept::kWidth];
        uint32_t words[Kept::kWidth / 4];
        kept.values(i, v);
        coder.code<kValues>(v, words);
        store_whole(to + (i * chunk.step >> shift), out.to.packed, words);
      }
    }
    __device__ __forceinline__ void close(const RowCodes& out, int64_t row, RowShared& shared) const {
      write_zeros(out.to.zeros);
      if (!out.to.row_sum) return;
      const int32_t all = sum_block(sum, shared.counts);
      if (threadIdx.x == 0) out.to.row_sum[row] = all;
    }
  };
};

template <class Input, class Output>
__global__ void __launch_bounds__(Input::kThreads, 1)
    quantize_rows_kernel(Input in, Output out, RowSpan span, CodeRange range, QuantizeParams params) {
  using Kept = typename Input::Kept;
  __shared__ RowShared shared;
  wait_for_predecessor();
  release_successor();
  typename Input::Row row(in, blockIdx.x, span, shared);
  Kept kept;
  typename Kept::Range seen;
  typename Output::Row to;
  // Every chunk for the range, then every chunk for the codes, backwards: the last one is still held. One loop, so that
  // the code that loads stands once.
  for (int turn = 0; turn < 2 * span.chunks; ++turn) {
    const Chunk chunk = span.chunk<Kept::kWidth>(turn < span.chunks ? turn : 2 * span.chunks - 1 - turn);
    if (turn != span.chunks) row.load(chunk, kept);
    if (turn < span.chunks) {
      kept.widen(seen, range.symmetric);
      continue;
    }
    if (turn == span.chunks) {
      const Step step = step_of(reduce_block(seen.ends(), shared.ranges), range.symmetric, range.qmin, range.qmax);
      if (threadIdx.x == 0) {
        params.scale[blockIdx.x] = step.scale;
        if (params.zero_point) params.zero_point[blockIdx.x] = step.zero_point;
      }
      to.open(out, blockIdx.x, step, range);
    }
    to.put(out, chunk, kept);
  }
  to.close(out, blockIdx.x, shared);
}

// The block of a row: enough threads to hold it; more where rows are few, so that these few fill the device (1 << 17
// threads are half of what an H200 runs at once), and no more than the row has units.
struct RowBlock {
  int threads;
  RowSpan span;
};

inline RowBlock row_block(int threads, int64_t cols, int64_t room, int width, int units) {
  if (room > kMostColumns)
    throw std::runtime_error("quantize: rows of " + std::to_string(room) +
                             " columns with a scale each; allowed: " + std::to_string(kMostColumns));
  const int columns = threads * units * width, chunks = static_cast<int>((room + columns - 1) / columns);
  return {threads, {static_cast<int>(cols), static_cast<int>(room), threads * width, columns, chunks < 1 ? 1 : chunks}};
}

inline RowBlock row_block(int64_t rows, int64_t cols, int64_t room, int width, int units, int most) {
  const auto warps = [](int64_t threads) { return (threads + 31) / 32 * 32; };
  const int64_t all = (room + width - 1) / width, least = warps((all + units - 1) / units);
  int64_t threads = warps((int64_t{1} << 17) / (rows < 1 ? 1 : rows));
  threads = threads > warps(all) ? warps(all) : threads;
  threads = threads < least ? least : threads;
  threads = threads < 32 ? 32 : threads > most ? most : threads;
  return row_block(static_cast<int>(threads), cols, room, width, units);
}

template <class Input, class Output>
void launch_rows(const char* name, const Input& in, const Output& out, const RowBlock& block, int64_t rows,
                 const CodeRange& range, const QuantizeParams& params, const Context& context) {
  if (rows == 0) return;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows));
  shape.block = dim3(static_cast<unsigned>(block.threads));
  shape.overlaps = true;
  launch<quantize_rows_kernel<Input, Output>>(name, shape, context, in, out, block.span, range, params);
}

// T: the element type of the input.
template <class T, class Input>
void quantize_rows(const char* name, const Input& in, int64_t rows, int64_t cols, const CodeRange& range,
                   const QuantizeParams& params, const QuantizeOut& out, const Context& context) {
  const auto block = row_block(rows, cols, out.ldq, kVector<T>, Input::Kept::kUnits, Input::kThreads);
  launch_rows(name, in, RowCodes{codes_of<T>(out, range, rows, cols)}, block, rows, range, params, context);
}

}  // namespace pyquant::cuda
