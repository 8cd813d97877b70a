// The ordered epilogue on a ready float accumulator.
#include <algorithm>
#include <cstring>

#include "core/epilogue_math.h"
#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kGrain = 1 << 16;  // outputs worth a task

}  // namespace

void float_epilogue(const float* acc, int64_t m, int64_t n, const float* bias, const Epilogue& epilogue,
                    const void* residual, DType residual_type, int64_t ldr, void* out, DType out_type,
                    const float* out_scale, const int32_t* out_zero_point) {
  static constexpr float kOne = 1.f;
  const Kernels& in_use = kernels();
  Shares(m, m * n, kGrain).run([&](Share share) {
    Tile tile;
    tile.ldr = ldr;
    tile.x_scale = &kOne;
    tile.activation = epilogue.activation;
    tile.clamp_min = epilogue.clamp_min;
    tile.clamp_max = epilogue.clamp_max;
    tile.residual_type = residual_type;
    tile.out_type = out_type;
    tile.ldo = n;
    tile.out_recip = scale_recip(out_scale ? *out_scale : 1.f);
    tile.out_zero_point = out_zero_point ? *out_zero_point : 0;
    tile.out_qmin = epilogue.out_qmin;
    tile.out_qmax = epilogue.out_qmax;
    const int64_t first = share.begin;
    for (int64_t c = 0; c < n; c += kBlockN) {
      alignas(64) float bias_block[kBlockN];
      tile.cols = std::min(kBlockN, n - c);
      for (int64_t i = 0; i < kBlockN; ++i) bias_block[i] = bias && i < tile.cols ? bias[c + i] : -0.f;
      tile.bias = bias_block;
      tile.out = static_cast<unsigned char*>(out) + (first * n + c) * bytes_of(out_type);
      if (residual)
        tile.residual = static_cast<const unsigned char*>(residual) + (first * ldr + c) * bytes_of(residual_type);
      tile.rows = share.end - first;
      tile.sum = acc + first * n + c;
      tile.ld_sum = n;
      in_use.epilogue(tile);
    }
  });
}

}  // namespace pyquant::cpu
