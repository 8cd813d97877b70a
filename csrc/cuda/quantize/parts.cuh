// A matrix as elementwise kernels walk it, and the range of a whole one, which a first kernel leaves in parts.
#pragma once
#include "cuda/elements.cuh"
#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/range.cuh"

namespace pyquant::cuda {

constexpr int kParts = 512;  // ranges of parts of the tensor: a few blocks on every SM
static_assert(kParts * sizeof(Range) == kQuantizeWorkspaceBytes, "");
constexpr int64_t kColumnBlocks = 1024;

template <class T>
struct Matrix {
  const T* x;
  int64_t rows, cols, ld;
  bool vector;
};

// Dense rows of one scale are one long row: one tail, aligned whatever the number of columns.
inline FloatMatrix flattened(const FloatMatrix& x) { return {x.data, x.type, 1, x.rows * x.cols, x.rows * x.cols}; }

inline bool is_dense(const FloatMatrix& x) { return x.ld == x.cols || x.rows <= 1; }

template <class T>
Matrix<T> matrix_of(const FloatMatrix& x) {
  const bool vector = is_aligned(x.data, x.rows > 1 ? x.ld * static_cast<int64_t>(sizeof(T)) : 0, 16);
  return {static_cast<const T*>(x.data), x.rows, x.cols, x.ld, vector};
}

inline int64_t blocks_of(int64_t elements, int width, int64_t most) {
  const int64_t blocks = (elements + width * kBlock - 1) / (width * kBlock);
  return blocks < 1 ? 1 : blocks < most ? blocks : most;
}

// Launches the kernel of parts.cu over x; returns how many parts it writes.
int launch_range_parts(const char* name, const FloatMatrix& x, bool symmetric, Range* parts, const Context& context);
// The same of every row by itself: `count` parts of each, one row's after another's.
void launch_row_range_parts(const char* name, const FloatMatrix& x, bool symmetric, Range* parts, int count,
                            const Context& context);

}  // namespace pyquant::cuda
