// The step of least squared error of every short row, dealt out to threads. No cut shows in a result: rows are alone.
#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace pyquant::cpu {

void least_squares_steps(const float* rows, int64_t count, int64_t n, int32_t qmin, int32_t qmax, const double* ratios,
                         int64_t points, double* steps) {
  constexpr int64_t kGrain = 1 << 11;  // numbers worth a task: each is rounded some seventy times
  const Kernels& in_use = kernels();
  Shares(count, count * n, kGrain).run([&](Share share) {
    in_use.least_squares({rows, n, share.begin, share.end, qmin, qmax, ratios, points, steps});
  });
}

}  // namespace pyquant::cpu
