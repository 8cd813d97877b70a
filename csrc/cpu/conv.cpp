// The fused convolution: images become codes once, and the engine of layer.h reads its rows through windows.
#include <algorithm>
#include <vector>

#include "core/epilogue_math.h"
#include "cpu/grouped_conv.h"
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
    if (is_static_) zero_ = *layer_.rows.zero_point;
    u8_zero_ = zero_ + 128;
    layer_.rows.rows_each = windows_.pixels();
    layer_.tile.residual_type = o.residual_type;
    layer_.tile.ldr = layer_.n;
    layer_.tile.out_type = o.out_type;
    if (!o.channels_last) layer_.plane = windows_.pixels();
  }

  void run() {
    if (o_.batch == 0 || windows_.pixels() == 0 || layer_.n == 0) return;
    if (o_.channels_last && !is_narrow() && o_.window.is_pointwise() &&
        (o_.x_type == DType::s8 || rows_suit_floats())) {
      take_rows();
      multiply(0, o_.batch);
      return;
    }
    const int64_t bytes = std::max<int64_t>(o_.channels * o_.height * o_.width, 1);
    const int64_t most = std::clamp<int64_t>(kRoundBytes / bytes, 1, o_.batch);
    // Rows that are pixels are multiplied where they lie, up to kRowSlack of them beyond the last.
    const auto size = static_cast<size_t>(most * bytes + kRowSlack * o_.channels + 2 * Windows::kSlack);
    round_codes().reset(Scratch::rounded(size));
    codes_ = round_codes().take<uint8_t>(size);
    windows_.codes = codes_;
    layer_.rows.windows = &windows_;
    layer_.rows.type = DType::u8;
    for (int64_t first = 0; first < o_.batch; first += most) {
      Images images{
          o_.x, o_.x_type, std::min(most, o_.batch - first), o_.channels, o_.height * o_.width, o_.channels_last};
      images.x = images.at(first, 0);
      if (o_.x_type == DType::s8)
        take_codes(images, first);
      else
        quantize(images);
      multiply(first, images.count);
    }
  }

 private:
  // Blocks of 64 output channels would be mostly empty. As one group the layer has rows of several pixels instead; long
  // rows of K gain more by tiles of six pixels than they lose by that.
  bool is_narrow() const {
    constexpr int64_t kLongRow = 512;
    const int64_t rest = layer_.n % kBlockN;
    return layer_.n < 2 * kBlockN && rest > 0 && rest <= kBlockN / 2 && layer_.extent.k <= kLongRow;
  }

  // Of few channels they are quicker quantised many pixels at a time.
  bool rows_suit_floats() const { return is_static_ && o_.channels % 64 == 0; }

  // Pixels that are rows already: the engine takes them as it takes those of a Linear.
  void take_rows() {
    RowSource& rows = layer_.rows;
    rows.x = o_.x;
    rows.type = o_.x_type;
    rows.ld = o_.channels;
    if (is_static_) return;
    rows.scale = o_.x_scale;
    rows.zero_point = o_.x_zero_point;
    rows.scale_step = rows.zero_point_step = 1;
  }

  void take_codes(const Images& images, int64_t first) {
    cpu::take_codes(images, codes_);
    layer_.rows.zero_point = &u8_zero_;
    if (is_static_) return;
    layer_.rows.scale = o_.x_scale + first;
    layer_.rows.scale_step = 1;
    layer_.rows.zero_point_step = o_.x_zero_point ? 1 : 0;
    if (!o_.x_zero_point) return;
    zeros_.assign(o_.x_zero_point + first, o_.x_zero_point + first + images.count);
    for (int32_t& zero : zeros_) zero += 128;
    layer_.rows.zero_point = zeros_.data();
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
    if (o_.window.groups > 1 || is_narrow())
      run_groups(layer_, count);
    else
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
