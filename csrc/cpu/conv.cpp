// The fused convolution: images become codes once, and the engine of layer.h reads its rows through windows.
#include <algorithm>
#include <vector>

#include "core/epilogue_math.h"
#include "cpu/image_codes.h"
#include "cpu/layer.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kRoundBytes = 4 << 20;  // codes of the images that one round quantises and multiplies

// The codes of a round, which the threads of the pool read. It grows to the largest round and stays.
Scratch& round_codes() {
  thread_local Scratch scratch;
  return scratch;
}

class Convolution {
 public:
  Convolution(const LinearSpec& spec, const void* packed, const ConvOperands& o)
      : o_(o), is_static_(spec.input == InputMode::static_per_tensor), layer_(packed_layer(spec, packed)) {
    const Window& w = o.window;
    windows_.height = o.height;
    windows_.width = o.width;
    windows_.channels = o.channels;
    windows_.out_height = w.out_size(0, o.height);
    windows_.out_width = w.out_size(1, o.width);
    windows_.window = w;
    zero_ = *layer_.rows.zero_point;
    u8_zero_ = zero_ + 128;
    layer_.rows.rows_each = windows_.pixels();
    layer_.tile.residual_type = o.residual_type;
    layer_.tile.ldr = layer_.n;
    layer_.tile.out_type = o.out_type;
    if (!o.channels_last) layer_.plane = windows_.pixels();
  }

  void run() {
    if (o_.batch == 0 || windows_.pixels() == 0 || layer_.n == 0) return;
    // Codes that lie as the windows read them, and pixels that are rows, need no copy.
    const bool codes = o_.x_type == DType::s8, ready = o_.channels_last && codes;
    const bool rows = o_.channels_last && o_.window.is_pointwise() && (codes || is_static_);
    const int64_t bytes = std::max<int64_t>(o_.channels * o_.height * o_.width, 1);
    const int64_t most = ready || rows ? o_.batch : std::clamp<int64_t>(kRoundBytes / bytes, 1, o_.batch);
    if (!ready && !rows) {
      round_codes().reset(Scratch::rounded(static_cast<size_t>(most * bytes)));
      codes_ = round_codes().take<uint8_t>(static_cast<size_t>(most * bytes));
    }
    for (int64_t first = 0; first < o_.batch; first += most) {
      const Images images = images_of(first, std::min(most, o_.batch - first));
      if (codes)
        take_codes(images, first, ready || rows);
      else if (!rows)
        quantize(images);
      if (rows) {
        layer_.rows.x = images.x;
        layer_.rows.type = images.type;
        layer_.rows.ld = o_.channels;
      } else {
        layer_.rows.windows = &windows_;
      }
      multiply(first, images.count);
    }
  }

 private:
  Images images_of(int64_t first, int64_t count) const {
    Images images{o_.x, o_.x_type, count, o_.channels, o_.height * o_.width, o_.channels_last};
    images.x = images.at(first, 0);
    return images;
  }

  void take_codes(const Images& images, int64_t first, bool in_place) {
    if (!in_place) turn_codes(images, codes_);
    windows_.codes = in_place ? static_cast<const uint8_t*>(images.x) : codes_;
    windows_.flip = 0x80;
    layer_.rows.type = DType::s8;
    if (is_static_) return;
    layer_.rows.scale = o_.x_scale + first;
    layer_.rows.zero_point = o_.x_zero_point ? o_.x_zero_point + first : nullptr;
    layer_.rows.scale_step = layer_.rows.zero_point_step = 1;
  }

  void quantize(const Images& images) {
    RowSource& rows = layer_.rows;
    ImageRanges ranges{&rows.recip, &zero_, 0, rows.qmin, rows.qmax, false};
    if (!is_static_) {
      const auto count = static_cast<size_t>(images.count);
      scales_.resize(count);
      recips_.resize(count);
      zeros_.resize(count);
      image_ranges(images, rows.symmetric, rows.qmin, rows.qmax, scales_.data(), zeros_.data());
      for (size_t i = 0; i < count; ++i) recips_[i] = scale_recip(scales_[i]);
      ranges = {recips_.data(), zeros_.data(), 1, rows.qmin, rows.qmax, true};
    }
    quantize_images(images, ranges, codes_);
    windows_.codes = codes_;
    rows.type = DType::u8;
    // The rows are u8 codes, and so is what stands for zero in them.
    if (is_static_) {
      rows.zero_point = &u8_zero_;
    } else {
      for (int32_t& zero : zeros_) zero += 128;
      rows.scale = scales_.data();
      rows.zero_point = zeros_.data();
      rows.scale_step = 1;
      rows.zero_point_step = rows.symmetric ? 0 : 1;
    }
  }

  void multiply(int64_t first, int64_t count) {
    const int64_t row = first * windows_.pixels();
    layer_.m = count * windows_.pixels();
    layer_.tile.out = static_cast<unsigned char*>(o_.out) + row * layer_.n * bytes_of(o_.out_type);
    if (o_.residual)
      layer_.tile.residual =
          static_cast<const unsigned char*>(o_.residual) + row * layer_.n * bytes_of(o_.residual_type);
    cpu::run(layer_);
  }

  const ConvOperands& o_;
  const bool is_static_;
  Layer layer_;
  Windows windows_;
  uint8_t* codes_ = nullptr;
  int32_t zero_ = 0, u8_zero_ = 128;  // of a static input
  std::vector<float> scales_, recips_;
  std::vector<int32_t> zeros_;
};

}  // namespace

void conv(const LinearSpec& spec, const void* packed, const ConvOperands& operands) {
  Convolution(spec, packed, operands).run();
}

}  // namespace pyquant::cpu
