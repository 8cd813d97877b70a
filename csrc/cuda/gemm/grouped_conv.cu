// Convolutions in groups: too few channels multiply the same codes for tensor cores. Sums are dp4a of four codes of K,
// read out of padded images (ImageRows) for each output; nearly all that are depthwise have a kernel of their own
// (depthwise_conv.cu).
//   partition: 256 threads own 64 pixels x 64 output channels, a thread eight neighbouring channels of two pixels; K
//   moves 64 codes at a time: weights and the places of the codes are put into shared memory once for all pixels.
//   Two ways to the four codes: of channels that share a group, one word; else byte by byte.
//   Group scales along K in ascending order, as in simt.cu.
#include "cuda/gemm/byte_weights.cuh"
#include "cuda/gemm/depthwise_conv.h"
#include "cuda/gemm/epilogue.cuh"
#include "cuda/grid.h"
#include "cuda/image_walk.cuh"
#include "cuda/images.h"
#include "cuda/launch.h"

namespace pyquant::cuda {

namespace {

constexpr int kChannels = 8, kPixels = 2;  // of a thread
constexpr int kColumns = 8, kLines = 32;   // threads of a block
constexpr int kDepth = 64, kQuads = kDepth / 4;

enum class Reads { words, bytes };

struct GroupedConv {
  const int8_t* x;
  ByteWeights w;
  ImageWalk<int64_t, 1> walk;
  cutlass::FastDivmod each;  // output channels of a group
  int32_t k, group_size, groups_of_k;

  // The first channel that an output channel reads.
  __device__ __forceinline__ int32_t first_channel(int n) const {
    int group, rest;
    each(group, rest, n);
    return group * walk.channels.divisor;
  }
};

struct GroupedTile {
  alignas(16) uint32_t w[kQuads][kColumns * kChannels];
  int32_t place[kDepth];
};

__device__ __forceinline__ uint32_t word_of(const int8_t* a, const int8_t* b, const int8_t* c, const int8_t* d) {
  const auto byte = [](const int8_t* at) { return static_cast<uint32_t>(static_cast<uint8_t>(__ldg(at))); };
  return byte(a) | byte(b) << 8 | byte(c) << 16 | byte(d) << 24;
}

// x[i]: four codes of K, from the quad's first on, for a thread's channel i.
template <Reads kReads>
__device__ __forceinline__ void load_quad(const int32_t* place, const int8_t* row, const int32_t (&first)[kChannels],
                                          uint32_t (&x)[kChannels]) {
  if constexpr (kReads == Reads::words) {
    const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(row + first[0] + place[0]));
#pragma unroll
    for (int i = 0; i < kChannels; ++i) x[i] = word;
  } else {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int8_t* at = row + first[i];
      x[i] = i > 0 && first[i] == first[i - 1] ? x[i - 1]
                                               : word_of(at + place[0], at + place[1], at + place[2], at + place[3]);
    }
  }
}

template <Reads kReads>
__global__ void __launch_bounds__(kColumns* kLines) grouped_conv_kernel(GroupedConv o, EpilogueParams p) {
  __shared__ GroupedTile tile;
  const int thread = static_cast<int>(threadIdx.x), column = thread % kColumns;
  const int32_t n0 = static_cast<int32_t>(blockIdx.y) * kColumns * kChannels, n = n0 + column * kChannels;
  const int32_t m = static_cast<int32_t>(blockIdx.x) * kLines * kPixels + thread / kColumns;
  const int8_t* row[kPixels];
#pragma unroll
  for (int i = 0; i < kPixels; ++i) row[i] = o.x + o.walk.begin_of_row(min(m + i * kLines, p.m - 1));
  int32_t first[kChannels];
#pragma unroll
  for (int i = 0; i < kChannels; ++i) first[i] = o.first_channel(min(n + i, p.n - 1));

  int32_t acc[kPixels][kChannels] = {};
  float t[kPixels][kChannels] = {};
  const int32_t depth = o.group_size ? o.group_size : o.k;
#pragma unroll 1
  for (int32_t group = 0; group < o.groups_of_k; ++group) {
    const int32_t end = (group + 1) * depth;
#pragma unroll 1
    for (int32_t k0 = group * depth; k0 < end; k0 += kDepth) {
      const int quads = (min(end - k0, kDepth) + 3) / 4;
      __syncthreads();  // the tile is free again
      for (int i = thread; i < quads * kColumns * kChannels; i += kColumns * kLines) {
        const int quad = i / (kColumns * kChannels), channel = i % (kColumns * kChannels);
        uint32_t word = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const int32_t k = k0 + 4 * quad + b;
          if (k < end && n0 + channel < p.n) word |= static_cast<uint32_t>(o.w.at(n0 + channel, k)) << (8 * b);
        }
        tile.w[quad][channel] = word;
      }
      // Codes beyond the end meet weights of 0: any place that exists will do.
      if (thread < kDepth) tile.place[thread] = static_cast<int32_t>(o.walk.place_in_row(min(k0 + thread, end - 1)));
      __syncthreads();
      if (n >= p.n) continue;
#pragma unroll 1
      for (int quad = 0; quad < quads; ++quad) {
        const uint4* from = reinterpret_cast<const uint4*>(&tile.w[quad][column * kChannels]);
        const uint4 low = from[0], high = from[1];
        const uint32_t w[kChannels] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
          uint32_t x[kChannels];
          load_quad<kReads>(tile.place + 4 * quad, row[i], first, x);
#pragma unroll
          for (int j = 0; j < kChannels; ++j)
            acc[i][j] = __dp4a(static_cast<int32_t>(x[j]), static_cast<int32_t>(w[j]), acc[i][j]);
        }
      }
    }
    if (o.group_size == 0) break;
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      if (n + j >= p.n) break;
      const int64_t at = static_cast<int64_t>(n + j) * o.groups_of_k + group;
      const float w_scale = __ldg(p.w_scale + at);
      const int32_t w_sum = p.x_zero_point ? __ldg(p.w_sum + at) : 0;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const int32_t sum = corrected(acc[i][j], load_token(p, m + i * kLines).zero_point, w_sum);
        t[i][j] = fadd(t[i][j], fmul(__int2float_rn(sum), w_scale));
        acc[i][j] = 0;
      }
    }
  }

  if (n >= p.n) return;
  const CodeLimits limits = load_code_limits(p);
  if (o.group_size == 0) {
    Channel channel[kChannels];
    load_channels(p, n, channel);
#pragma unroll 1
    for (int i = 0; i < kPixels; ++i) {
      int32_t sum[kChannels];
#pragma unroll
      for (int j = 0; j < kChannels; ++j) sum[j] = i == 0 ? acc[0][j] : acc[1][j];
      finish_row(sum, channel, load_token(p, m + i * kLines), limits, p, m + i * kLines, n);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kPixels; ++i) {
    if (m + i * kLines >= p.m) return;
    const float x_scale = load_token(p, m + i * kLines).x_scale;
    float v[kChannels];
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      const float bias = p.bias && n + j < p.n ? __ldg(p.bias + n + j) : -0.f;
      v[j] = fadd(fmul(i == 0 ? t[0][j] : t[1][j], x_scale), bias);
    }
    activate_all(v, p);
    add_residual(v, p, m + i * kLines, n);
    store_real(v, p, limits, m + i * kLines, n);
  }
}

}  // namespace

void grouped_conv(const GemmProblem& p, int64_t groups, const GemmOperands& operands, const Epilogue& epilogue,
                  const Context& context) {
  if (p.m == 0 || p.n == 0) return;
  const DeviceInfo none{};
  const GemmCall call{"grouped_conv", p, operands, epilogue, context, none};
  if (is_depthwise(call, groups)) return depthwise_conv(call);
  const int64_t channels = p.image.channels, each = p.n / groups;
  const GroupedConv o{static_cast<const int8_t*>(operands.x),
                      ByteWeights(call),
                      ImageWalk<int64_t, 1>(p.image),
                      cutlass::FastDivmod(static_cast<int>(each)),
                      static_cast<int32_t>(p.k),
                      static_cast<int32_t>(p.group_size),
                      p.group_size ? static_cast<int32_t>(p.k / p.group_size) : 1};
  const auto steps_by = [&](int64_t codes) {
    int64_t all = reinterpret_cast<intptr_t>(operands.x) | p.image.image_step;
    for (int axis = 0; axis < 2; ++axis) all |= p.image.window_step[axis] | p.image.tap_step[axis];
    return all % codes == 0;
  };
  LaunchShape shape;
  shape.grid = grid_of(call.name, (p.m + kLines * kPixels - 1) / (kLines * kPixels),
                       (p.n + kColumns * kChannels - 1) / (kColumns * kChannels));
  shape.block = dim3(kColumns * kLines);
  const EpilogueParams params = epilogue_params(call);
  if (channels % 4 == 0 && each % kChannels == 0 && p.group_size % 4 == 0 && steps_by(4))
    launch<grouped_conv_kernel<Reads::words>>(call.name, shape, context, o, params);
  else
    launch<grouped_conv_kernel<Reads::bytes>>(call.name, shape, context, o, params);
}

}  // namespace pyquant::cuda
