// Codes of rows sorted by expert under the static scale of each expert.
//   partition: a block owns a chunk of a row and finds the row's expert in the ends of all, by halves. Of the rows of
//   no expert the first get zeros: products load whole tiles, though they store no such row.
#include "cuda/expert_rows.h"

#include <algorithm>

#include "cuda/gemm/expert_table.h"
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/held.cuh"
#include "cuda/quantize/parts.cuh"

namespace pyquant::cuda {

namespace {

constexpr int kUnits = 8;
constexpr int32_t kTileRows = 256;  // the most that a product loads behind an expert's last row

struct ExpertRows {
  const float* scale;
  const int32_t* zero_point;
  const int64_t* chosen;
  ExpertTable experts;
};

// Which of the table's experts has the row; its count: none of them.
__device__ __forceinline__ int32_t expert_of(const ExpertTable& experts, int64_t row) {
  if (experts.first > 0 && experts.ends[experts.first - 1] > row) return experts.count;
  int32_t low = 0, high = experts.count;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (experts.ends[experts.first + middle] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

__device__ __forceinline__ bool is_behind_all(const ExpertTable& experts, int64_t row) {
  const int64_t behind = row - (experts.count > 0 ? experts.ends[experts.first + experts.count - 1] : 0);
  return experts.rest && behind >= 0 && behind < kTileRows;
}

template <class T>
__global__ void __launch_bounds__(kBlock)
    quantize_expert_rows_kernel(Matrix<T> m, const __grid_constant__ ExpertRows rows, int step, Codes to) {
  using Kept = KeptUnits<T, kUnits>;
  constexpr int kWidth = kVector<T>;
  wait_for_predecessor();
  release_successor();
  const int64_t row = blockIdx.x;
  const int32_t expert = expert_of(rows.experts, row);
  if (expert == rows.experts.count) {
    if (!is_behind_all(rows.experts, row)) return;
    const auto thread = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
#pragma unroll 1
    for (int64_t j = thread; j < to.row_bytes; j += int64_t{gridDim.y} * blockDim.x) to.row(row)[j] = 0;
    return;
  }
  const int64_t shift = rows.experts.shift[expert];
  const Step own = step_at(shifted(rows.scale, shift), shifted(rows.zero_point, shift), 0);
  const T* from = m.x + (rows.chosen ? rows.chosen[row] : row) * m.ld;
  const int first = static_cast<int>(threadIdx.x) * kWidth, columns = step * kUnits;
  CodeWriter<Values::any> writer{Coder(own, to), false, to.row(row)};
  for (int64_t begin = int64_t{blockIdx.y} * columns; begin < to.ldq; begin += int64_t{gridDim.y} * columns) {
    const int cols = clipped(m.cols - begin, columns), room = clipped(to.ldq - begin, columns);
    const Chunk chunk{first, step, cols - first, room - first, cols % kWidth == 0, room > cols};
    Kept kept;
    kept.load(from + begin, chunk, m.vector);
    writer.codes = to.row(row) + begin;
    writer.put(to, chunk, kept);
  }
}

}  // namespace

void quantize_expert_rows(const FloatMatrix& x, const ExpertSteps& steps, int64_t count, const CodeRange& range,
                          const QuantizeOut& out, const Context& context) {
  if (count == 0 || out.ldq == 0) return;
  with_float_type(x.type, "quantize_expert_rows", [&](auto element) {
    using T = decltype(element);
    constexpr int kWidth = kVector<T>;
    const int threads = row_threads(count, out.ldq, kWidth, kUnits, kBlock), step = threads * kWidth;
    const int64_t chunks = (out.ldq + step * kUnits - 1) / (step * kUnits);
    for_expert_tables(steps.ends, steps.shifts, steps.experts, [&](const ExpertTable& experts) {
      LaunchShape shape;
      shape.grid = dim3(static_cast<unsigned>(count), static_cast<unsigned>(std::min<int64_t>(chunks, 1024)));
      shape.block = dim3(static_cast<unsigned>(threads));
      shape.overlaps = true;
      const ExpertRows rows{steps.scale, steps.zero_point, steps.chosen, experts};
      launch<quantize_expert_rows_kernel<T>>("quantize_expert_rows", shape, context, matrix_of<T>(x), rows, step,
                                             codes_of<T>(out, range, count, x.cols));
    });
  });
}

}  // namespace pyquant::cuda
