// Images to codes as convolutions read them: channels together, zero points around (cuda/images.h). A block has some
// pixels of one image; channels that lie apart are turned through shared memory, four of them to a word at a time. The
// blocks beyond those write what is around the image.
#include "cuda/images.h"

#include <cutlass/fast_math.h>

#include "cuda/launch.h"
#include "cuda/overlap.cuh"
#include "cuda/quantize/codes.cuh"
#include "cuda/quantize/parts.cuh"
#include "cuda/turn_bytes.cuh"

namespace pyquant::cuda {
namespace {

constexpr int kPiece = 16;  // codes that are stored at once
constexpr int kTurns = 2;   // pieces of a thread where channels lie together
constexpr int64_t kMostBatch = 65535;
constexpr int64_t kMostCodes = int64_t{1} << 31;  // of an image and its padding
// The tile of a block where channels lie apart. A row of it has two words more: lanes that write meet in no
// bank, some that read in pairs.
constexpr int kTilePixels = 128, kTileChannels = 64, kTileWords = kTileChannels / 4 + 2;

struct Steps {
  const float* scale;
  const int32_t* zero_point;
  bool is_shared;
  const Range* parts;  // when not null: of each image so many, which the step comes from
  int part_count;
  bool symmetric;
  int32_t qmin, qmax;
};

// One image and where it goes.
template <class T>
struct Plane {
  const T* x;
  int8_t* q;
  int channels, pixels, width;                    // of the image
  int full_width, top, left, right, full_height;  // with what is around it
  cutlass::FastDivmod by_width, by_pieces, by_tiles;
  bool loads_whole, stores_whole;
  int blocks;  // of an image's pixels; those beyond write what is around it

  __device__ __forceinline__ int8_t* at(int pixel, int channel) const {
    int y, x_of;
    by_width(y, x_of, pixel);
    return q + (int64_t{y + top} * full_width + x_of + left) * channels + channel;
  }
  __device__ __forceinline__ void store(int8_t* to, int channel, const uint32_t (&word)[4]) const {
    if (stores_whole) {
      *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
      return;
    }
    uint64_t low = word[0] | uint64_t{word[1]} << 32, high = word[2] | uint64_t{word[3]} << 32;
#pragma unroll 1
    for (int i = 0; i < kPiece && channel + i < channels; ++i) {
      to[i] = static_cast<int8_t>(low);
      low = low >> 8 | high << 56;
      high >>= 8;
    }
  }
};

// Codes of `Width` neighbours in memory, of which `valid` exist.
template <int Width, class T>
__device__ __forceinline__ void load_codes(const T* from, int valid, bool whole, const Coder& coder,
                                           uint32_t (&words)[Width / 4]) {
  if constexpr (sizeof(T) == 1) {
    if (whole && valid >= Width) {
      if constexpr (Width == 16) {
        const uint4 all = *reinterpret_cast<const uint4*>(from);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
      } else {
        const uint2 all = *reinterpret_cast<const uint2*>(from);
        words[0] = all.x, words[1] = all.y;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < Width / 4; ++i) {
      words[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * i + j < valid) words[i] |= static_cast<uint32_t>(static_cast<uint8_t>(from[4 * i + j])) << (8 * j);
    }
  } else {
    constexpr int kUnit = kVector<T>;
#pragma unroll
    for (int u = 0; u < Width / kUnit; ++u) {
      float v[kUnit];
      uint32_t part[kUnit / 4];
      widen_unit(load_unit(from + u * kUnit, valid - u * kUnit, whole), v);
      coder.template code<Values::any>(v, part);
#pragma unroll
      for (int i = 0; i < kUnit / 4; ++i) words[u * (kUnit / 4) + i] = part[i];
    }
  }
}

template <class T>
__device__ __forceinline__ void put_together(const Plane<T>& plane, const Coder& coder) {
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    int pixel, piece;
    plane.by_pieces(pixel, piece, static_cast<int>((blockIdx.x * kTurns + i) * kBlock + threadIdx.x));
    if (pixel >= plane.pixels) return;
    const int channel = piece * kPiece;
    uint32_t words[4];
    load_codes<kPiece>(plane.x + int64_t{pixel} * plane.channels + channel, plane.channels - channel, plane.loads_whole,
                       coder, words);
    plane.store(plane.at(pixel, channel), channel, words);
  }
}

template <class T>
__device__ __forceinline__ void put_apart(const Plane<T>& plane, const Coder& coder, uint32_t* tile) {
  int tile_of_pixels, tile_of_channels;
  plane.by_tiles(tile_of_pixels, tile_of_channels, static_cast<int>(blockIdx.x));
  const int first_pixel = tile_of_pixels * kTilePixels, first_channel = tile_of_channels * kTileChannels;
  const int thread = static_cast<int>(threadIdx.x);
  {
    constexpr int kRun = 8;  // pixels of four channels
    const int quad = thread % (kTileChannels / 4), pixel = thread / (kTileChannels / 4) * kRun;
    uint32_t codes[kRun / 4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int channel = first_channel + 4 * quad + j, valid = plane.pixels - first_pixel - pixel;
      uint32_t words[kRun / 4] = {};
      if (channel < plane.channels && valid > 0)
        load_codes<kRun>(plane.x + int64_t{channel} * plane.pixels + first_pixel + pixel, valid, plane.loads_whole,
                         coder, words);
#pragma unroll
      for (int h = 0; h < kRun / 4; ++h) codes[h][j] = words[h];
    }
#pragma unroll
    for (int h = 0; h < kRun / 4; ++h) {
      uint32_t turned[4];
      turn_bytes(codes[h], turned);
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[(pixel + 4 * h + i) * kTileWords + quad] = turned[i];
    }
  }
  __syncthreads();
  constexpr int kPieces = kTileChannels / kPiece;
#pragma unroll
  for (int i = 0; i < kTilePixels * kPieces / kBlock; ++i) {
    const int piece = thread % kPieces, pixel = thread / kPieces + i * (kBlock / kPieces);
    const int channel = first_channel + piece * kPiece;
    if (first_pixel + pixel >= plane.pixels || channel >= plane.channels) continue;
    const auto* from = reinterpret_cast<const uint2*>(tile + pixel * kTileWords + 4 * piece);
    const uint2 left = from[0], right = from[1];
    plane.store(plane.at(first_pixel + pixel, channel), channel, {left.x, left.y, right.x, right.y});
  }
}

// What is around an image: above, below, then beside each line.
template <class T>
__device__ __forceinline__ void put_around(const Plane<T>& plane, int32_t zero_point) {
  const int height = plane.pixels / (plane.width > 0 ? plane.width : 1), beside = plane.left + plane.right;
  const int below = plane.full_height - plane.top - height;
  const int pixels = (plane.top + below) * plane.full_width + height * beside;
  int index, piece;
  plane.by_pieces(index, piece, static_cast<int>((blockIdx.x - plane.blocks) * kBlock + threadIdx.x));
  if (index >= pixels) return;
  int y, x;
  if (index < (plane.top + below) * plane.full_width) {
    y = index / plane.full_width, x = index % plane.full_width;
    y = y < plane.top ? y : y + height;
  } else {
    index -= (plane.top + below) * plane.full_width;
    y = plane.top + index / beside, x = index % beside;
    x = x < plane.left ? x : x + plane.width;
  }
  const uint32_t word = static_cast<uint32_t>(zero_point & 255) * 0x01010101u;
  const int channel = piece * kPiece;
  plane.store(plane.q + (int64_t{y} * plane.full_width + x) * plane.channels + channel, channel,
              {word, word, word, word});
}

// blockIdx.y walks images.
template <class T, bool kTogether>
__global__ void __launch_bounds__(kBlock)
    images_kernel(Plane<T> plane, int batch, int64_t numbers, int64_t full, Steps steps, ImagesOut out) {
  __shared__ Range ranges[kBlock / 32];
  __shared__ __align__(16) uint32_t tile[kTogether ? 4 : kTilePixels * kTileWords];
  wait_for_predecessor();
  release_successor();
  write_zeros(out.zeros);
  Codes limits{};
  limits.qmin = steps.qmin, limits.qmax = steps.qmax;
#pragma unroll 1
  for (int64_t image = blockIdx.y; image < batch; image += gridDim.y) {
    Step step{1.f, 1.f, 0};
    if (steps.parts) {
      Range range{};
      for (int i = static_cast<int>(threadIdx.x); i < steps.part_count; i += kBlock)
        range = merged(range, steps.parts[image * steps.part_count + i]);
      step = step_of(reduce_block(range, ranges), steps.symmetric, steps.qmin, steps.qmax);
    } else if (steps.scale) {
      step = step_at(steps.scale, steps.zero_point, steps.is_shared ? 0 : image);
    }
    Plane<T> own = plane;
    own.x += image * numbers;
    own.q += image * full;
    if (plane.channels == 0) {
      // only the steps of the rows
    } else if (static_cast<int>(blockIdx.x) >= plane.blocks) {
      put_around(own, step.zero_point);
    } else if constexpr (kTogether) {
      put_together(own, Coder(step, limits));
    } else {
      put_apart(own, Coder(step, limits), tile);
    }
    if (out.row_scale) {
#pragma unroll 1
      for (int64_t row = int64_t{blockIdx.x} * kBlock + threadIdx.x; row < out.rows;
           row += int64_t{gridDim.x} * kBlock) {
        out.row_scale[image * out.rows + row] = step.scale;
        if (out.row_zero_point) out.row_zero_point[image * out.rows + row] = step.zero_point;
      }
    }
    __syncthreads();  // ranges and the tile are free again
  }
}

int64_t parts_of_image(const Images& x) {
  const int64_t most = x.batch < 1 ? 1 : 1024 / x.batch;
  const auto blocks = [&](int width) { return blocks_of(x.numbers(), width, most < 1 ? 1 : most < 256 ? most : 256); };
  return blocks(x.type == DType::f32 ? kVector<float> : kVector<__half>);
}

template <class Body>
void with_element(DType type, Body body) {
  if (type == DType::s8) return body(int8_t{});
  with_float_type(type, "quantize images", body);
}

void launch_images(const Images& x, const Steps& steps, const ImagesOut& out, const Context& context) {
  const int64_t full_height = out.padding[0] + x.height + out.padding[1];
  const int64_t full_width = out.padding[2] + x.width + out.padding[3];
  const int64_t pieces = x.channels < 1 ? 1 : (x.channels + kPiece - 1) / kPiece,
                full = full_height * full_width * x.channels;
  if (full > kMostCodes || full_height * full_width * pieces > kMostCodes / 2)
    throw std::runtime_error("quantize: images of " + std::to_string(full) +
                             " codes with their padding; allowed: " + std::to_string(kMostCodes));
  if (x.batch == 0 || full_height * full_width == 0) return;
  with_element(x.type, [&](auto element) {
    using T = decltype(element);
    const int64_t pixels = x.height * x.width, around = full_height * full_width - pixels;
    const int64_t tiles = x.channels < 1 ? 1 : (x.channels + kTileChannels - 1) / kTileChannels;
    const auto blocks_of_pieces = [&](int64_t count) { return (count * pieces + kBlock - 1) / kBlock; };
    const int64_t blocks = x.channels_last ? (blocks_of_pieces(pixels) + kTurns - 1) / kTurns
                                           : (pixels + kTilePixels - 1) / kTilePixels * tiles;
    // Runs of a load: 16 channels of a pixel, or 8 pixels of a channel.
    const int64_t run = (x.channels_last ? kPiece : 8) * static_cast<int64_t>(sizeof(T));
    const int64_t line = (x.channels_last ? x.channels : pixels) * static_cast<int64_t>(sizeof(T));
    Plane<T> plane{static_cast<const T*>(x.data),
                   out.q,
                   static_cast<int>(x.channels),
                   static_cast<int>(pixels),
                   static_cast<int>(x.width),
                   static_cast<int>(full_width),
                   static_cast<int>(out.padding[0]),
                   static_cast<int>(out.padding[2]),
                   static_cast<int>(out.padding[3]),
                   static_cast<int>(full_height),
                   cutlass::FastDivmod(static_cast<int>(x.width < 1 ? 1 : x.width)),
                   cutlass::FastDivmod(static_cast<int>(pieces)),
                   cutlass::FastDivmod(static_cast<int>(tiles)),
                   is_aligned(x.data, line, run < 16 ? run : 16),
                   is_aligned(out.q, x.channels, kPiece),
                   static_cast<int>(blocks)};
    LaunchShape shape;
    shape.grid = dim3(static_cast<unsigned>(blocks + blocks_of_pieces(around)),
                      static_cast<unsigned>(x.batch < kMostBatch ? x.batch : kMostBatch));
    shape.block = dim3(kBlock);
    shape.overlaps = true;
    const auto batch = static_cast<int>(x.batch);
    if (x.channels_last)
      launch<images_kernel<T, true>>("quantize images", shape, context, plane, batch, x.numbers(), full, steps, out);
    else
      launch<images_kernel<T, false>>("quantize images", shape, context, plane, batch, x.numbers(), full, steps, out);
  });
}

}  // namespace

int64_t images_workspace_bytes(const Images& x) {
  return x.batch * parts_of_image(x) * static_cast<int64_t>(sizeof(Range));
}

void quantize_images(const Images& x, const float* scale, const int32_t* zero_point, bool is_shared,
                     const CodeRange& range, const ImagesOut& out, const Context& context) {
  launch_images(x, {scale, zero_point, is_shared, nullptr, 0, range.symmetric, range.qmin, range.qmax}, out, context);
}

void quantize_images_dynamic(const Images& x, const CodeRange& range, const ImagesOut& out, void* workspace,
                             const Context& context) {
  auto* parts = static_cast<Range*>(workspace);
  const auto count = static_cast<int>(parts_of_image(x));
  launch_row_range_parts("quantize images", {x.data, x.type, x.batch, x.numbers(), x.numbers()}, range.symmetric, parts,
                         count, context);
  launch_images(x, {nullptr, nullptr, false, parts, count, range.symmetric, range.qmin, range.qmax}, out, context);
}

}  // namespace pyquant::cuda
