#include "cpu/image_codes.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/epilogue_math.h"
#include "cpu/row_codes.h"
#include "cpu/threads.h"
#include "cpu/transpose.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kGrain = 1 << 16;  // elements worth a task
constexpr int64_t kPiece = 1 << 14;  // neighbours that are read at a time
constexpr int64_t kPixels = 256;     // of a piece of a plane, and
constexpr int64_t kChannels = 64;    // planes side by side: 16 KiB of codes that are turned in the first-level cache

// body(image, begin, end) over pieces of `total` units of every image.
template <class Body>
void each_piece(const Images& images, int64_t total, int64_t piece, Body body) {
  const int64_t pieces = (total + piece - 1) / piece;
  Shares(images.count * pieces, images.count * images.numbers(), kGrain).run([&](Share share) {
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t begin = i % pieces * piece;
      body(i / pieces, begin, std::min(begin + piece, total));
    }
  });
}

// s8 codes to u8 = code + 128.
void flip(const uint8_t* from, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] ^ 0x80;
}

}  // namespace

void image_ranges(const Images& images, bool symmetric, int32_t qmin, int32_t qmax, float* scale, int32_t* zero_point) {
  const Kernels& in_use = kernels();
  const int64_t numbers = images.numbers(), pieces = (numbers + kPiece - 1) / kPiece;
  std::vector<RowStats> stats(static_cast<size_t>(images.count * pieces));
  each_piece(images, numbers, kPiece, [&](int64_t image, int64_t begin, int64_t end) {
    stats[static_cast<size_t>(image * pieces + begin / kPiece)] =
        in_use.stats(images.at(image, begin), images.type, end - begin, !symmetric);
  });
  for (int64_t image = 0; image < images.count; ++image) {
    RowStats all{0.f, 0.f, 0.f};
    for (int64_t i = 0; i < pieces; ++i) all = merged(all, stats[static_cast<size_t>(image * pieces + i)]);
    const RowParams p = params_of(all, symmetric, qmin, qmax);
    scale[image] = p.scale;
    zero_point[image] = p.zero_point;
  }
}

void quantize_images(const Images& images, const ImageRanges& ranges, uint8_t* to) {
  const Kernels& in_use = kernels();
  const auto quantize = [&](int64_t image, int64_t offset, int64_t count, uint8_t* codes) {
    const float recip = ranges.recip[image * ranges.step];
    const int32_t zero_point = ranges.zero_point[image * ranges.step];
    if (recip == recip)
      in_use.quantize({images.at(image, offset), images.type, count, recip, zero_point, ranges.qmin, ranges.qmax,
                       ranges.finite, 0x80, codes});
    else
      std::memset(codes, zero_point + 128, static_cast<size_t>(count));
  };
  const int64_t pixels = images.pixels, channels = images.channels, numbers = images.numbers();
  if (images.channels_last || channels == 1) {
    each_piece(images, numbers, kPiece, [&](int64_t image, int64_t begin, int64_t end) {
      quantize(image, begin, end - begin, to + image * numbers + begin);
    });
    return;
  }
  each_piece(images, pixels, kPixels, [&](int64_t image, int64_t begin, int64_t end) {
    alignas(64) uint8_t planes[kChannels * kPixels];
    for (int64_t first = 0; first < channels; first += kChannels) {
      const int64_t count = std::min(kChannels, channels - first);
      for (int64_t c = 0; c < count; ++c)
        quantize(image, (first + c) * pixels + begin, end - begin, planes + c * kPixels);
      transpose(planes, kPixels, count, end - begin, to + (image * pixels + begin) * channels + first, channels);
    }
  });
}

void take_codes(const Images& images, uint8_t* to) {
  const int64_t pixels = images.pixels, channels = images.channels, numbers = images.numbers();
  if (images.channels_last || channels == 1) {
    each_piece(images, numbers, kPiece, [&](int64_t image, int64_t begin, int64_t end) {
      const auto* from = static_cast<const uint8_t*>(images.at(image, begin));
      flip(from, end - begin, to + image * numbers + begin);
    });
    return;
  }
  each_piece(images, pixels, kPixels, [&](int64_t image, int64_t begin, int64_t end) {
    const auto* from = static_cast<const uint8_t*>(images.at(image, begin));
    uint8_t* piece = to + (image * pixels + begin) * channels;
    transpose(from, pixels, channels, end - begin, piece, channels);
    flip(piece, (end - begin) * channels, piece);
  });
}

}  // namespace pyquant::cpu
