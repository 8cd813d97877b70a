#include "cpu/float_epilogue.h"

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kGrain = 1 << 16;  // outputs worth a task

}  // namespace

void float_tile(const FloatEpilogue& epilogue, const float* acc, int64_t ld, int64_t row, int64_t rows, int64_t channel,
                int64_t columns) {
  static constexpr float kOne = 1.f;
  alignas(64) float bias[kBlockN];
  for (int64_t i = 0; i < kBlockN; ++i) bias[i] = epilogue.bias && i < columns ? epilogue.bias[channel + i] : -0.f;
  Tile tile;
  tile.sum = acc;
  tile.ld_sum = ld;
  tile.rows = rows;
  tile.cols = columns;
  tile.bias = bias;
  tile.x_scale = &kOne;
  tile.activation = epilogue.activation;
  tile.clamp_min = epilogue.clamp_min;
  tile.clamp_max = epilogue.clamp_max;
  if (epilogue.residual)
    tile.residual = static_cast<const unsigned char*>(epilogue.residual) +
                    (row * epilogue.ldr + channel) * bytes_of(epilogue.residual_type);
  tile.residual_type = epilogue.residual_type;
  tile.ldr = epilogue.ldr;
  tile.out = static_cast<unsigned char*>(epilogue.out) + (row * epilogue.n + channel) * bytes_of(epilogue.out_type);
  tile.out_type = epilogue.out_type;
  tile.ldo = epilogue.n;
  kernels().epilogue(tile);
}

void float_epilogue(const FloatEpilogue& epilogue, const float* acc, int64_t m) {
  const int64_t n = epilogue.n;
  Shares(m, m * n, kGrain).run([&](Share share) {
    for (int64_t c = 0; c < n; c += kBlockN)
      float_tile(epilogue, acc + share.begin * n + c, n, share.begin, share.end - share.begin, c,
                 std::min(kBlockN, n - c));
  });
}

}  // namespace pyquant::cpu
