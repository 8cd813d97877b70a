// Counts of magnitudes in floating bins. Every task counts into a table of its own, straight into int64: a table is
// 320 KiB, of which data touch a few octaves, and integer sums do not depend on who adds first.
#include <algorithm>
#include <vector>

#include "core/histogram_math.h"
#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kGrain = 1 << 19;  // elements worth a task: a task costs the clearing and adding of a table
constexpr int64_t kPiece = 2048;     // 16-bit elements widened at once

void count(const float* x, int64_t n, int32_t first_key, int64_t* counts) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t pattern = bits_from_float(x[i]);
    ++counts[(pattern >> 31 ? 0 : kHistogramBins) + histogram_bin(pattern, first_key)];
  }
}

void count_row(const Kernels& in_use, const unsigned char* x, DType type, int64_t n, int32_t first_key,
               int64_t* counts) {
  if (type == DType::f32) return count(reinterpret_cast<const float*>(x), n, first_key, counts);
  float wide[kPiece];
  const int64_t bytes = bytes_of(type);
  for (int64_t i = 0; i < n; i += kPiece) {
    const int64_t piece = std::min(kPiece, n - i);
    in_use.widen(x + i * bytes, type, piece, wide);
    count(wide, piece, first_key, counts);
  }
}

}  // namespace

void magnitude_histogram(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, int32_t exponent,
                         int64_t* counts) {
  constexpr int64_t kTable = 2 * kHistogramBins;
  std::fill(counts, counts + kTable, 0);
  if (rows == 0 || cols == 0) return;
  const auto* data = static_cast<const unsigned char*>(x);
  const int64_t bytes = bytes_of(x_type), total = rows * cols;
  const int32_t first_key = histogram_first_key(exponent);
  const Kernels& in_use = kernels();
  const Shares shares(total, total, kGrain);
  std::vector<int64_t> others(static_cast<size_t>((shares.count() - 1) * kTable));
  shares.run([&](Share share) {
    int64_t* own = share.index == 0 ? counts : others.data() + (share.index - 1) * kTable;
    for (int64_t i = share.begin; i < share.end;) {
      const int64_t row = i / cols, col = i % cols, run = std::min(cols - col, share.end - i);
      count_row(in_use, data + (row * ld + col) * bytes, x_type, run, first_key, own);
      i += run;
    }
  });
  for (int64_t t = 1; t < shares.count(); ++t)
    for (int64_t i = 0; i < kTable; ++i) counts[i] += others[static_cast<size_t>((t - 1) * kTable + i)];
}

}  // namespace pyquant::cpu
