// Fake quantisation of whole tensors: which elements share a scale, and how the work is cut for threads. No cut shows
// in a result: elements are independent, and sums have fixed blocks.
#include <algorithm>
#include <vector>

#include "core/epilogue_math.h"
#include "cpu/row_codes.h"
#include "cpu/threads.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kGrain = 1 << 16;  // elements worth a task
constexpr int64_t kAlign = 512;      // elements of a cache line of the mask: no two threads write one
constexpr int64_t kLanes = 64;

int64_t length_of(int64_t rows, int64_t cols, Granularity granularity, int64_t group_size) {
  return granularity == Granularity::tensor ? rows * cols : granularity == Granularity::groups ? group_size : cols;
}

// A result that no cache will hold until it is read goes past them: that saves reading its lines before they are
// written, a third of the traffic. In runs of whole steps, from a line's begin.
bool streams(DType type, int64_t count, int64_t length, const void* y) {
  constexpr int64_t kStreamBytes = 32 << 20;
  return type == DType::f32 && count * bytes_of(type) >= kStreamBytes && length % 64 == 0 &&
         reinterpret_cast<uintptr_t>(y) % 64 == 0;
}

// part(begin, end) over [0, count) in shares whose limits are multiples of align.
template <class Part>
void in_parts(int64_t count, int64_t elements, int64_t align, Part part) {
  Shares((count + align - 1) / align, elements, kGrain).run([&](Share share) {
    part(share.begin * align, std::min(share.end * align, count));
  });
}

// docs/numerics.md 10.4: lanes of a block, then the sums of the blocks by the same rule. Overwrites v.
float sum_in_blocks(float* v, int64_t n) {
  while (true) {
    const int64_t blocks = std::max<int64_t>((n + kFakeBlock - 1) / kFakeBlock, 1);
    for (int64_t b = 0; b < blocks; ++b) {
      float s[kLanes] = {};
      const int64_t end = std::min((b + 1) * kFakeBlock, n);
      for (int64_t i = b * kFakeBlock; i < end; ++i) s[i % kLanes] = fadd(s[i % kLanes], v[i]);
      for (int64_t count = kLanes; count > 1; count /= 2)
        for (int64_t j = 0; j < count / 2; ++j) s[j] = fadd(s[2 * j], s[2 * j + 1]);
      v[b] = s[0];
    }
    if (blocks == 1) return v[0];
    n = blocks;
  }
}

// The range of a whole matrix, then its elements under that one scale.
void dynamic_tensor(const void* x, DType type, int64_t rows, int64_t cols, int64_t ld, bool symmetric, int32_t qmin,
                    int32_t qmax, void* y, float* scale, int32_t* zero_point) {
  const Kernels& in_use = kernels();
  constexpr int64_t kPiece = 1 << 14;  // of a row, so that a single long row has work for everyone
  const int64_t per_row = std::max<int64_t>((cols + kPiece - 1) / kPiece, 1), pieces = rows * per_row;
  const Shares shares(pieces, rows * cols, kGrain);
  std::vector<RowStats> parts(static_cast<size_t>(shares.count()), RowStats{0.f, 0.f, 0.f});
  shares.run([&](Share share) {
    auto& part = parts[static_cast<size_t>(share.index)];
    for (int64_t p = share.begin; p < share.end; ++p) {
      const int64_t from = p % per_row * kPiece;
      const auto* at = static_cast<const unsigned char*>(x) + (p / per_row * ld + from) * bytes_of(type);
      part = merged(part, in_use.stats(at, type, std::min(kPiece, cols - from), !symmetric));
    }
  });
  RowStats all{0.f, 0.f, 0.f};
  for (const RowStats& part : parts) all = merged(all, part);
  const RowParams p = params_of(all, symmetric, qmin, qmax);
  *scale = p.scale;
  *zero_point = p.zero_point;
  // A poisoned tensor has scale NaN, and what is multiplied by it is NaN.
  fake_quantize(x, type, rows, cols, ld, Granularity::tensor, 0, scale, zero_point, qmin, qmax, y, nullptr);
}

}  // namespace

void fake_quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                   int64_t group_size, const float* scale, const int32_t* zero_point, int32_t qmin, int32_t qmax,
                   void* y, uint8_t* mask) {
  const int64_t count = rows * cols;
  const Kernels& in_use = kernels();
  FakeRun run{x,     x_type,     cols, ld,   0, count, length_of(rows, cols, granularity, group_size),
              scale, zero_point, qmin, qmax, y, mask};
  if (ld == cols) run.cols = run.ld = std::max<int64_t>(count, 1);  // one piece of memory: no rows to step over
  run.stream = streams(x_type, count, ld == cols ? run.length : 1, y);
  in_parts(count, count, kAlign, [&](int64_t begin, int64_t end) {
    FakeRun part = run;
    part.begin = begin;
    part.end = end;
    in_use.fake_quantize(part);
  });
}

void fake_quantize_dynamic(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                           int64_t group_size, bool symmetric, int32_t qmin, int32_t qmax, void* y, float* scale,
                           int32_t* zero_point) {
  if (granularity == Granularity::tensor)
    return dynamic_tensor(x, x_type, rows, cols, ld, symmetric, qmin, qmax, y, scale, zero_point);
  const int64_t length = length_of(rows, cols, granularity, group_size);
  const int64_t per_row = granularity == Granularity::groups ? cols / group_size : 1;
  const Kernels& in_use = kernels();
  in_parts(rows * per_row, rows * cols, 1, [&](int64_t begin, int64_t end) {
    in_use.fake_quantize_dynamic({x, x_type, ld, begin, end, length, per_row, symmetric, qmin, qmax, y, scale,
                                  zero_point, streams(x_type, rows * cols, length, y)});
  });
}

void fake_quantize_backward(const void* grad, DType type, int64_t count, const uint8_t* mask, void* out) {
  const Kernels& in_use = kernels();
  in_parts(count, count, kAlign,
           [&](int64_t begin, int64_t end) { in_use.fake_quantize_keep(grad, mask, bytes_of(type), begin, end, out); });
}

void fake_quantize_lsq_backward(const void* grad, const void* x, DType type, int64_t rows, int64_t cols,
                                Granularity granularity, int64_t group_size, const float* scale,
                                const int32_t* zero_point, int32_t qmin, int32_t qmax, void* grad_x,
                                float* grad_scale) {
  const int64_t length = length_of(rows, cols, granularity, group_size);
  const int64_t runs = granularity == Granularity::tensor   ? 1
                       : granularity == Granularity::groups ? rows * (cols / group_size)
                                                            : rows;
  const int64_t per_run = (length + kFakeBlock - 1) / kFakeBlock;
  if (per_run == 0) {
    std::fill_n(grad_scale, runs, 0.f);
    return;
  }
  std::vector<float> partial(static_cast<size_t>(per_run > 1 ? runs * per_run : 0));
  const Kernels& in_use = kernels();
  in_parts(runs * per_run, rows * cols, 1, [&](int64_t begin, int64_t end) {
    in_use.fake_quantize_learned({x, grad, type, begin, end, length, scale, zero_point, qmin, qmax, grad_x,
                                  per_run > 1 ? partial.data() : grad_scale});
  });
  if (per_run == 1) return;
  in_parts(runs, runs * per_run * kLanes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) grad_scale[s] = sum_in_blocks(partial.data() + s * per_run, per_run);
  });
}

}  // namespace pyquant::cpu
