// One scale per row, made from the row itself: a block owns a row. An Input produces the row's values, unit by unit;
// their range gives the step; the same threads then turn the same units into codes. What a thread has produced it keeps
// in shared memory, so that memory is read once; a row that does not fit is produced twice.
//
//   struct Input {
//     using Kept = ...;                       // element type of the kept row: what it costs in shared memory
//     struct Row { produce(unit, v); again(unit, v); };
//     Row open(row, Space, Shared&) const;    // may read the whole row first; every thread calls it
//   };
//
// A thread owns the units threadIdx.x + i * blockDim.x throughout: nothing that it kept is read by another.
#pragma once
#include "core/norm_math.h"
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/codes.cuh"

namespace pyquant::cuda {

constexpr int64_t kKeptBytes = 96 << 10;  // of a row in shared memory; sm_86 has 99 KiB for a block

struct RowShared {
  Range ranges[kBlock / 32];
  int32_t counts[kBlock / 32];
  float sums[2][16];
};

// Where the units of a row are kept. A float row of 16-bit elements has two 16-byte parts a unit, a plane each, so that
// neighbouring threads touch neighbouring words.
template <class Kept, int Width>
struct Space {
  static constexpr int kParts = Width * static_cast<int>(sizeof(Kept)) / 16;
  uint4* kept;  // null: nothing is kept
  int64_t cols, units;
  __device__ __forceinline__ int64_t valid(int64_t unit) const { return cols - unit * Width; }
  __device__ __forceinline__ void put(int64_t unit, const float (&v)[Width]) const {
    union {
      uint4 words[kParts];
      Kept element[Width];
    } u;
#pragma unroll
    for (int j = 0; j < Width; ++j) u.element[j] = narrow<Kept>(v[j]);
#pragma unroll
    for (int i = 0; i < kParts; ++i) kept[i * units + unit] = u.words[i];
  }
  __device__ __forceinline__ void get(int64_t unit, float (&v)[Width]) const {
    union {
      uint4 words[kParts];
      Kept element[Width];
    } u;
#pragma unroll
    for (int i = 0; i < kParts; ++i) u.words[i] = kept[i * units + unit];
#pragma unroll
    for (int j = 0; j < Width; ++j) v[j] = widen(u.element[j]);
  }
};

template <class T, class Input>
__global__ void __launch_bounds__(kBlock)
    quantize_rows_kernel(Input in, int64_t cols, bool keeps, bool symmetric, QuantizeParams params, Codes to) {
  constexpr int kWidth = kVector<T>;
  extern __shared__ uint4 kept[];
  __shared__ RowShared shared;
  wait_for_predecessor();
  release_successor();
  const int64_t units = (cols + kWidth - 1) / kWidth;
  const Space<typename Input::Kept, kWidth> space{keeps ? kept : nullptr, cols, units};
  auto row = in.open(blockIdx.x, space, shared);
  Range range;
  for (int64_t u = threadIdx.x; u < units; u += blockDim.x) {
    float v[kWidth];
    row.produce(u, v);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) widen_range(range, v[j]);
  }
  range = reduce_block(range, shared.ranges);
  const Step step = step_of(range, symmetric, to.qmin, to.qmax);
  if (threadIdx.x == 0) {
    params.scale[blockIdx.x] = step.scale;
    if (params.zero_point) params.zero_point[blockIdx.x] = step.zero_point;
  }
  uint8_t* codes = to.row(blockIdx.x);
  int32_t sum = 0;
  for (int64_t u = threadIdx.x; u * kWidth < to.ldq; u += blockDim.x) {
    float v[kWidth] = {};
    if (u < units) row.again(u, v);
    int32_t code[kWidth];
    code_unit(v, cols - u * kWidth, step, to, code);
    sum += sum_unit(code);
    store_unit(codes, u * kWidth, to.ldq, to.vector, to.packed, code);
  }
  if (to.row_sum) {
    sum = sum_block(sum, shared.counts);
    if (threadIdx.x == 0) to.row_sum[blockIdx.x] = sum;
  }
}

template <class T, class Input>
void quantize_rows(const char* name, const Input& in, int64_t rows, int64_t cols, const CodeRange& range,
                   const QuantizeParams& params, const QuantizeOut& out, const Context& context) {
  if (rows == 0) return;
  constexpr int kWidth = kVector<T>;
  const int64_t bytes = (cols + kWidth - 1) / kWidth * kWidth * static_cast<int64_t>(sizeof(typename Input::Kept));
  const bool keeps = bytes <= kKeptBytes;
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(rows));
  // Eight elements a thread: its own lanes of the sums (norm_math.h), also in a smaller block.
  int block = 32;
  while (block < kBlock && block * (kSumLanes / kBlock) < out.ldq) block *= 2;
  shape.block = dim3(static_cast<unsigned>(block));
  shape.shared_bytes = keeps ? static_cast<int>(bytes) : 0;
  shape.overlaps = true;
  launch<quantize_rows_kernel<T, Input>>(name, shape, context, in, cols, keeps, range.symmetric, params,
                                         codes_of<T>(out, range, rows, cols));
}

}  // namespace pyquant::cuda
