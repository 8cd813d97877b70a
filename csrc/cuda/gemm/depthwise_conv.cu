// Depthwise convolutions out of padded images (ImageRows), codes of all channels of a pixel together. Sums are dp4a of
// four taps that stand one above the other: what a thread turns so in registers serves all outputs whose windows hold
// that column, each with weights of its own.
//   partition: a thread owns eight neighbouring channels of four outputs of a line, whose windows lie whole columns of
//   taps apart: neighbours, but where the taps are further apart than the windows. 256 threads own up to 64 channels,
//   fewer and more outputs where a layer has fewer. Four lines of the window at a time, whose weights are put into
//   shared memory once.
#include <cutlass/fast_math.h>

#include <algorithm>
#include <numeric>

#include "cuda/gemm/byte_weights.cuh"
#include "cuda/gemm/depthwise_conv.h"
#include "cuda/gemm/plain_out.cuh"
#include "cuda/grid.h"
#include "cuda/launch.h"
#include "cuda/turn_bytes.cuh"

namespace pyquant::cuda {

namespace {

constexpr int kThreads = 256, kChannels = 8, kOutputs = 4;
constexpr int kWidest = 60;     // taps of a line of the window
constexpr int kColumnBits = 3;  // 2^3 threads have 64 channels
constexpr uint32_t kTapBytes = 4 * (kChannels << kColumnBits);

struct DepthwiseConv {
  const int8_t* x;
  ByteWeights w;
  int64_t image_step, window_step[2], tap_step[2];
  cutlass::FastDivmod strips, height, spacing;  // strips of a line, lines of an image, outputs from one to the next
  int32_t width, all_strips;
  int32_t lines, taps;  // of the window
  int32_t apart;        // columns of taps from the window of an output to that of the next one
  int32_t column_bits;  // 2^bits threads own neighbouring channels
};

// Which outputs a thread owns.
struct Strip {
  int32_t m, count;  // the first one, and how many there are
  int64_t begin;     // of its window, in codes

  __device__ __forceinline__ Strip(const DepthwiseConv& o, int32_t strip) {
    int row, rest, block, phase, image, i;
    o.strips(row, rest, strip);
    o.spacing(block, phase, rest);
    o.height(image, i, row);
    const int32_t step = o.spacing.divisor, j = block * kOutputs * step + phase;
    m = row * o.width + j;
    count = 0;
#pragma unroll
    for (int p = 0; p < kOutputs; ++p) count += j + p * step < o.width;
    begin = image * o.image_step + i * o.window_step[0] + j * o.window_step[1];
  }
};

// Where a channel's word stands among those of a tap: neighbours in eights of fours, so that the eight threads which
// read them meet every bank once.
__device__ __forceinline__ int place_of(int channel) {
  return (channel & 4) << kColumnBits | channel >> 3 << 2 | (channel & 3);
}
__device__ __forceinline__ void load_weights(uint32_t from, uint32_t (&w)[kChannels]) {
#pragma unroll
  for (int i = 0; i < kChannels; i += 4)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[i]), "=r"(w[i + 1]), "=r"(w[i + 2]), "=r"(w[i + 3])
                 : "r"(from + (i << (kColumnBits + 2)))
                 : "memory");
}

// Eight channels of an output as straight-line code, where no more than zero points, scales and a bias come in: the
// operations of finish_row in their order. False, and nothing is stored, where only the general form applies.
__device__ __forceinline__ bool store_plain(const int32_t (&acc)[kOutputs][kChannels], Channel (&channel)[kChannels],
                                            const CodeLimits& limits, const EpilogueParams& p, int32_t m,
                                            int32_t spacing, int32_t count, int32_t n) {
  const bool is_codes = p.plain == PlainOut::codes;
  if (p.plain == PlainOut::none || (is_codes && !PlainCodes::serves(limits))) return false;
  // One scale for all tokens is multiplied with the channels' first.
  const float all = p.scale_product_first ? load_token(p, 0).x_scale : 1.f;
#pragma unroll
  for (int j = 0; j < kChannels; ++j) channel[j].w_scale = fmul(all, channel[j].w_scale);
  const int64_t at = static_cast<int64_t>(m) * p.ldo + n, step = static_cast<int64_t>(spacing) * p.ldo;
  uint8_t* to = static_cast<uint8_t*>(p.out) + (is_codes ? at : 2 * at);
  const auto store = [&](auto halves, auto store_words) {
#pragma unroll
    for (int output = 0; output < kOutputs; ++output) {
      if (output >= count) return;
      const Token token = load_token(p, m + output * spacing);
      const float x_scale = p.scale_product_first ? 1.f : token.x_scale;
      uint32_t word[kChannels / 2];
#pragma unroll
      for (int i = 0; i < kChannels / 2; ++i) {
        float v[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const Channel& of = channel[2 * i + c];
          const int32_t sum = corrected(acc[output][2 * i + c], token.zero_point, of.w_sum);  // 0 where there is none
          v[c] = fadd(fmul(fmul(real_of(sum), of.w_scale), x_scale), of.bias);
        }
        word[i] = halves.pair(v[0], v[1]);
      }
      store_words(word);
      to += step * decltype(halves)::kBytes;
    }
  };
  const auto store_floats = [&](const uint32_t (&word)[kChannels / 2]) {
    *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
  };
  const auto store_codes = [&](const uint32_t (&word)[kChannels / 2]) {
    *reinterpret_cast<uint2*>(to) = make_uint2(bytes_of_pairs(word[0], word[1]), bytes_of_pairs(word[2], word[3]));
  };
  if (is_codes)
    store(PlainCodes(limits), store_codes);
  else if (p.plain == PlainOut::f16)
    store(PlainHalves<true>(limits), store_floats);
  else
    store(PlainHalves<false>(limits), store_floats);
  return true;
}

__global__ void __launch_bounds__(kThreads, 2) grouped_conv_depthwise_kernel(DepthwiseConv o, EpilogueParams p) {
  __shared__ alignas(16) uint32_t weights[kWidest][kChannels << kColumnBits];
  const int thread = static_cast<int>(threadIdx.x), column = thread & ((1 << o.column_bits) - 1);
  const int wide = o.column_bits + 3;  // 2^wide channels of a block
  const int32_t n0 = static_cast<int32_t>(blockIdx.y) << wide, n = n0 + column * kChannels;
  const int32_t index = static_cast<int32_t>(blockIdx.x) * (kThreads >> o.column_bits) + (thread >> o.column_bits);
  const Strip strip(o, min(index, o.all_strips - 1));
  const int32_t count = index < o.all_strips && n < p.n ? strip.count : 0;
  const int32_t columns = count > 0 ? (count - 1) * o.apart + o.taps : 0;  // no code behind the last window is read

  int32_t acc[kOutputs][kChannels] = {};
  const int8_t* line = o.x + strip.begin + n;
  uint32_t own = static_cast<uint32_t>(__cvta_generic_to_shared(&weights[0][place_of(column * kChannels)]));
  asm volatile("" : "+r"(own));  // computed once, not for every product
#pragma unroll 1
  for (int32_t first = 0; first < o.lines; first += 4, line += 4 * o.tap_step[0]) {
    const int here = min(4, o.lines - first);
    __syncthreads();  // the weights before have been read
    for (int i = thread; i < o.taps << wide; i += kThreads) {
      const int tap = i >> wide, channel = i & ((1 << wide) - 1);
      uint32_t word = 0;
      if (n0 + channel < p.n)
        for (int b = 0; b < here; ++b)
          word |= static_cast<uint32_t>(o.w.at(n0 + channel, (first + b) * o.taps + tap)) << (8 * b);
      weights[tap][place_of(channel)] = word;
    }
    __syncthreads();
    const int8_t* at = line;
    int64_t below[4];  // lines that the window has not meet weights of 0: any place that exists will do
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      below[b] = min(b, here - 1) * o.tap_step[0];
      asm volatile("" : "+l"(below[b]));  // likewise
    }
#pragma unroll 1
    for (int32_t c = 0; c < columns; ++c, at += o.tap_step[1]) {
      uint2 code[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) code[b] = __ldg(reinterpret_cast<const uint2*>(at + below[b]));
      uint32_t x[kChannels];
      turn_bytes({code[0].x, code[1].x, code[2].x, code[3].x}, x);
      turn_bytes({code[0].y, code[1].y, code[2].y, code[3].y}, x + 4);
#pragma unroll
      for (int output = 0; output < kOutputs; ++output) {
        const uint32_t tap = static_cast<uint32_t>(c - output * o.apart);
        if (tap >= static_cast<uint32_t>(o.taps)) continue;
        uint32_t w[kChannels];
        load_weights(own + tap * kTapBytes, w);
#pragma unroll
        for (int j = 0; j < kChannels; ++j)
          acc[output][j] = __dp4a(static_cast<int32_t>(x[j]), static_cast<int32_t>(w[j]), acc[output][j]);
      }
    }
  }

  if (count == 0) return;
  const CodeLimits limits = load_code_limits(p);
  Channel channel[kChannels];
  load_channels(p, n, channel);
  if (store_plain(acc, channel, limits, p, strip.m, o.spacing.divisor, count, n)) return;
#pragma unroll 1
  for (int32_t output = 0, m = strip.m; output < count; ++output, m += o.spacing.divisor) {
    finish_row(acc[0], channel, load_token(p, m), limits, p, m, n);
#pragma unroll
    for (int next = 1; next < kOutputs; ++next)  // one after another through the same code: the epilogue is long
#pragma unroll
      for (int j = 0; j < kChannels; ++j) acc[next - 1][j] = acc[next][j];
  }
}

}  // namespace

bool is_depthwise(const GemmCall& call, int64_t groups) {
  const GemmProblem& p = call.problem;
  if (p.image.channels != 1 || p.n != groups || p.n % kChannels != 0 || p.group_size != 0) return false;
  int64_t all = reinterpret_cast<intptr_t>(call.operands.x) | p.image.image_step;
  for (int axis = 0; axis < 2; ++axis) all |= p.image.window_step[axis] | p.image.tap_step[axis];
  return all % kChannels == 0 && p.image.taps <= kWidest && p.image.tap_step[1] > 0;
}

void depthwise_conv(const GemmCall& call) {
  const GemmProblem& p = call.problem;
  const ImageRows& image = p.image;
  // Taps d apart under windows s apart: every (d / gcd)th output reads the same columns of codes. One tap is apart from
  // none, however far the next one would be.
  const int64_t tap_step = image.taps == 1 ? image.window_step[1] : image.tap_step[1];
  const int64_t spacing = tap_step / std::gcd(tap_step, image.window_step[1]);
  const int64_t whole = (image.out_width - 1) / (kOutputs * spacing);  // before the last ones of a line
  const int64_t strips = whole * spacing + std::min(spacing, image.out_width - whole * kOutputs * spacing);
  const int64_t all_strips = p.m / image.out_width * strips;
  int bits = 0;
  while (bits < kColumnBits && p.n > kChannels << bits) ++bits;
  const auto divisor = [](int64_t by) { return cutlass::FastDivmod(static_cast<int>(by)); };
  const DepthwiseConv o{static_cast<const int8_t*>(call.operands.x),
                        ByteWeights(call),
                        image.image_step,
                        {image.window_step[0], image.window_step[1]},
                        {image.tap_step[0], tap_step},
                        divisor(strips),
                        divisor(image.out_height),
                        divisor(spacing),
                        static_cast<int32_t>(image.out_width),
                        static_cast<int32_t>(all_strips),
                        static_cast<int32_t>(p.k / image.taps),
                        static_cast<int32_t>(image.taps),
                        static_cast<int32_t>(spacing * image.window_step[1] / tap_step),
                        bits};
  LaunchShape shape;
  const auto blocks = [](int64_t all, int64_t each) { return (all + each - 1) / each; };
  shape.grid = grid_of(call.name, blocks(all_strips, kThreads >> bits), blocks(p.n, kChannels << bits));
  shape.block = dim3(kThreads);
  launch<grouped_conv_depthwise_kernel>(call.name, shape, call.context, o, epilogue_params(call));
}

}  // namespace pyquant::cuda
