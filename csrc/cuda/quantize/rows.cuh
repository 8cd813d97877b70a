// One scale per row, made from the row itself: a block owns a row, a thread some of its units, which stay in the
// thread's registers: their range gives the step, and the same thread turns them into codes (or fake-quantised values).
// A row of more units than a block can hold is walked in chunks, and read again for its codes.
//
//   struct Input {
//     static constexpr int kThreads;  // most threads of a block
//     using Kept = ...;               // what a thread keeps: KeptUnits or KeptFloats
//     static constexpr int kStep;     // between the units of a thread, where all launches have the same; else 0
//     static constexpr bool kOneChunk = true;  // where no row is walked in several; may be left out
//     static constexpr bool kByWarp = true;    // where kStep / kWidth neighbouring threads own kStep columns and those
//                                              // that follow at kStep, so that units meet in powers of two; likewise
//     struct Row {
//       // May read the whole row; every thread calls it. What it leaves in Kept is what `load` finds there.
//       Row(const Input&, int64_t row, const RowSpan&, RowShared&, Kept&);
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
#include "cuda/grid.h"
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/held.cuh"

namespace pyquant::cuda {

struct RowShared {
  Range ranges[kMostThreads / 32];
  int32_t counts[kMostThreads / 32];
  float sums[2][32];
};

template <class Input, class = void>
inline constexpr bool kByWarp = false;
template <class Input>
inline constexpr bool kByWarp<Input, decltype(void(Input::kByWarp))> = Input::kByWarp;

struct RowSpan {
  int cols, room;     // columns of the matrix and of the output
  int step, columns;  // between the units of a thread, or (kByWarp) what its group owns of a chunk; of a chunk
  int chunks;
  template <class Input>
  __device__ __forceinline__ Chunk chunk(int index) const {
    constexpr int kWidth = Input::Kept::kWidth;
    if constexpr (kByWarp<Input>) {
      constexpr int kLanes = Input::kStep / kWidth;
      const int group = static_cast<int>(threadIdx.x / kLanes), lane = static_cast<int>(threadIdx.x % kLanes);
      const int first = index * columns + group * step + lane * kWidth;
      const int most = step - Input::kStep + kWidth;  // threads may own fewer units than they have room for
      return {first, Input::kStep, min(cols - first, most), min(room - first, most), cols % kWidth == 0, room > cols};
    }
    const int first = index * columns + static_cast<int>(threadIdx.x) * kWidth;
    return {first, Input::kStep > 0 ? Input::kStep : step, cols - first, room - first, cols % kWidth == 0, room > cols};
  }
};

// The matrix itself, without a norm or gate.
template <class T, int Threads = kMostThreads>
struct PlainInput {
  static constexpr int kThreads = Threads, kStep = 0;
  using Kept = KeptUnits<T, 8>;
  const T* x;
  int64_t ld;
  bool vector;

  struct Row {
    const T* x;
    bool vector;
    __device__ __forceinline__ Row(const PlainInput& in, int64_t row, const RowSpan&, RowShared&, Kept&)
        : x(in.x + row * in.ld), vector(in.vector) {}
    __device__ __forceinline__ void load(const Chunk& chunk, Kept& kept) const { kept.load(x, chunk, vector); }
  };
};

struct RowCodes {
  Codes to;
  struct Row {
    CodeWriter<Values::finite> writer;
    __device__ __forceinline__ void open(const RowCodes& out, int64_t row, const Step& step, const CodeRange& range) {
      writer = {Coder::own(step, out.to), Coder::is_within(step, range.symmetric, out.to), out.to.row(row)};
    }
    template <class Kept>
    __device__ __forceinline__ void put(const RowCodes& out, const Chunk& chunk, const Kept& kept) {
      writer.put(out.to, chunk, kept);
    }
    __device__ __forceinline__ void close(const RowCodes& out, int64_t row, RowShared& shared) const {
      write_zeros(out.to.zeros);
      if (!out.to.row_sum) return;
      const int32_t all = sum_block(writer.sum, shared.counts);
      if (threadIdx.x == 0) out.to.row_sum[row] = all;
    }
  };
};

// Whether what `load` leaves is not yet what is quantised: then Row has
//   Range range(const Range&);                // of what is quantised, from that of what load leaves
//   Step inner_step(Step, const Range&);      // what Output::Row::open is given
//   void finish(Kept&);                       // before Output::Row::put, for that step
template <class Input, class = void>
inline constexpr bool kFinishes = false;
template <class Input>
inline constexpr bool kFinishes<Input, decltype(void(&Input::Row::finish))> = true;

template <class Input, class = void>
inline constexpr bool kOneChunk = false;
template <class Input>
inline constexpr bool kOneChunk<Input, decltype(void(Input::kOneChunk))> = Input::kOneChunk;

template <class Input, class Output>
__global__ void __launch_bounds__(Input::kThreads, 1)
    quantize_rows_kernel(Input in, Output out, RowSpan span, CodeRange range, QuantizeParams params) {
  using Kept = typename Input::Kept;
  __shared__ RowShared shared;
  wait_for_predecessor();
  release_successor();
  Kept kept;
  typename Input::Row row(in, blockIdx.x, span, shared, kept);
  typename Kept::Range seen;
  typename Output::Row to;
  const auto open = [&] {
    Range ends = reduce_block(seen.ends(), shared.ranges);
    if constexpr (kFinishes<Input>) ends = row.range(ends);
    Step step = step_of(ends, range.symmetric, range.qmin, range.qmax);
    if (threadIdx.x == 0) {
      params.scale[blockIdx.x] = step.scale;
      if (params.zero_point) params.zero_point[blockIdx.x] = step.zero_point;
    }
    if constexpr (kFinishes<Input>) step = row.inner_step(step, ends);
    to.open(out, blockIdx.x, step, range);
  };
  const auto put = [&](const Chunk& chunk) {
    if constexpr (kFinishes<Input>) row.finish(kept);
    to.put(out, chunk, kept);
  };
  if constexpr (kOneChunk<Input>) {
    const Chunk chunk = span.chunk<Input>(0);
    row.load(chunk, kept);
    kept.widen(seen, range.symmetric);
    open();
    put(chunk);
  } else {
    // Every chunk for the range, then every chunk for the codes, backwards: the last one is still held. One loop, so
    // that the code that loads stands once.
    Chunk chunk{};
    for (int turn = 0; turn < 2 * span.chunks; ++turn) {
      if (!kByWarp<Input> || turn != span.chunks)  // the place in a chunk costs enough to be kept
        chunk = span.chunk<Input>(turn < span.chunks ? turn : 2 * span.chunks - 1 - turn);
      if (turn != span.chunks) row.load(chunk, kept);
      if (turn < span.chunks) {
        kept.widen(seen, range.symmetric);
        continue;
      }
      if (turn == span.chunks) open();
      put(chunk);
    }
  }
  to.close(out, blockIdx.x, shared);
}

// The block of a row.
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

inline RowBlock row_block(int64_t rows, int64_t cols, int64_t room, int width, int units, int most,
                          int64_t at_once = 1 << 17) {
  return row_block(row_threads(rows, room, width, units, most, at_once), cols, room, width, units);
}

// Of the rows of an Input.
template <class Input>
RowBlock row_block_of(int64_t rows, int64_t cols, int64_t room) {
  using Kept = typename Input::Kept;
  constexpr int64_t kAtOnce = kByWarp<Input> ? 1 << 16 : 1 << 17;  // of 64 floats each, registers hold half as many
  RowBlock block = row_block(rows, cols, room, Kept::kWidth, Kept::kUnits, Input::kThreads, kAtOnce);
  if constexpr (kByWarp<Input>) {
    const int all = block.threads * Kept::kWidth, units = static_cast<int>((room + all - 1) / all);
    int owned = 1;
    while (owned < Kept::kUnits && owned < units) owned *= 2;
    block.span.step = owned * Input::kStep;
    block.span.columns = owned * all;
  }
  return block;
}

template <class Input, class Output>
void launch_rows(const char* name, const Input& in, const Output& out, const RowBlock& block, int64_t rows,
                 const CodeRange& range, const QuantizeParams& params, const Context& context, int shared_bytes = 0) {
  if (rows == 0) return;
  LaunchShape shape;
  shape.grid = grid_of(name, rows);
  shape.block = dim3(static_cast<unsigned>(block.threads));
  shape.shared_bytes = shared_bytes;
  shape.overlaps = true;
  launch<quantize_rows_kernel<Input, Output>>(name, shape, context, in, out, block.span, range, params);
}

// T: the element type of the input.
template <class T, class Input>
void quantize_rows(const char* name, const Input& in, int64_t rows, int64_t cols, const CodeRange& range,
                   const QuantizeParams& params, const QuantizeOut& out, const Context& context, int shared_bytes = 0) {
  constexpr int kWidth = Input::Kept::kWidth;
  const auto block = row_block_of<Input>(rows, cols, out.ldq);
  launch_rows(name, in, RowCodes{codes_of<T, kWidth>(out, range, rows, cols)}, block, rows, range, params, context,
              shared_bytes);
}

}  // namespace pyquant::cuda
