// Quantise and dequantise whole matrices, at every granularity.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/row_codes.h"
#include "cpu/threads.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kGrain = 1 << 16;  // elements worth a task

const void* at(const void* p, int64_t i, DType t) { return static_cast<const unsigned char*>(p) + i * bytes_of(t); }

// The matrix as runs of elements that share one scale: a row, or a group of a row.
struct Runs {
  int64_t rows, cols, ld, per_row, length;
  bool one_scale;

  Runs(int64_t rows, int64_t cols, int64_t ld, Granularity granularity, int64_t group_size)
      : rows(rows), cols(cols), ld(ld), per_row(1), length(cols), one_scale(granularity == Granularity::tensor) {
    if (granularity == Granularity::groups && group_size > 0) {
      per_row = cols / group_size;
      length = group_size;
    }
  }
  int64_t count() const { return rows * per_row; }
  int64_t scale_of(int64_t run) const { return one_scale ? 0 : run; }
  int64_t source(int64_t run) const { return run / per_row * ld + run % per_row * length; }
  int64_t target(int64_t run) const { return run / per_row * cols + run % per_row * length; }

  template <class Function>
  void each(Function function) const {
    Shares(count(), rows * cols, kGrain).run([&](Share share) {
      for (int64_t r = share.begin; r < share.end; ++r) function(r);
    });
  }
};

void quantize_runs(const Runs& runs, const void* x, DType type, const float* scale, const int32_t* zero_point,
                   int32_t qmin, int32_t qmax, int8_t* q) {
  const Kernels& in_use = kernels();
  runs.each([&](int64_t r) {
    const int64_t s = runs.scale_of(r);
    in_use.quantize({at(x, runs.source(r), type), type, runs.length, scale_recip(scale[s]),
                     zero_point ? zero_point[s] : 0, qmin, qmax, false, 0, q + runs.target(r)});
  });
}

}  // namespace

void quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
              int64_t group_size, const float* scale, const int32_t* zero_point, int32_t qmin, int32_t qmax,
              int8_t* q) {
  quantize_runs({rows, cols, ld, granularity, group_size}, x, x_type, scale, zero_point, qmin, qmax, q);
}

void quantize_dynamic(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                      int64_t group_size, bool symmetric, int32_t qmin, int32_t qmax, int8_t* q, float* scale,
                      int32_t* zero_point) {
  const Runs runs(rows, cols, ld, granularity, group_size);
  const Kernels& in_use = kernels();
  const auto stats_of = [&](int64_t r) {
    return in_use.stats(at(x, runs.source(r), x_type), x_type, runs.length, !symmetric);
  };
  const auto put = [&](int64_t s, const RowParams& p) {
    scale[s] = p.scale;
    if (zero_point) zero_point[s] = p.zero_point;
  };
  if (!runs.one_scale) {
    runs.each([&](int64_t r) {
      put(r, quantize_row(in_use, at(x, runs.source(r), x_type), x_type, runs.length, symmetric, qmin, qmax,
                          q + runs.target(r)));
    });
    return;
  }
  const Shares shares(rows, rows * cols, kGrain);
  std::vector<RowStats> parts(static_cast<size_t>(shares.count()), RowStats{0.f, 0.f, 0.f});
  shares.run([&](Share share) {
    auto& part = parts[static_cast<size_t>(share.index)];
    for (int64_t r = share.begin; r < share.end; ++r) part = merged(part, stats_of(r));
  });
  RowStats all{0.f, 0.f, 0.f};
  for (const RowStats& part : parts) all = merged(all, part);
  const RowParams p = params_of(all, symmetric, qmin, qmax);
  put(0, p);
  if (p.scale == p.scale)
    quantize_runs(runs, x, x_type, &p.scale, &p.zero_point, qmin, qmax, q);
  else
    std::memset(q, p.zero_point, static_cast<size_t>(rows * cols));
}

void dequantize(const void* q, DType q_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                int64_t group_size, const float* scale, const int32_t* zero_point, void* out, DType out_type) {
  const Runs runs(rows, cols, ld, granularity, group_size);
  const Kernels& in_use = kernels();
  runs.each([&](int64_t r) {
    const int64_t s = runs.scale_of(r);
    in_use.dequantize({at(q, runs.source(r), q_type), q_type, runs.length, scale[s], zero_point ? zero_point[s] : 0,
                       static_cast<unsigned char*>(out) + runs.target(r) * bytes_of(out_type), out_type});
  });
}

}  // namespace pyquant::cpu
