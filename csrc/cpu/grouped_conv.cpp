#include "cpu/grouped_conv.h"

#include <algorithm>
#include <cstring>

#include "cpu/transpose.h"
#include "cpu/window_taps.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kGrain = 1 << 19;      // products worth a thread, an output counted as eight more
constexpr int64_t kAccs = 48 * kBlockN;  // sums that are held before they are finished

// One thread's share: lines of results, a block of 64 output channels at a time.
class GroupWorker {
 public:
  GroupWorker(const Layer& layer, const Taps& taps)
      : layer_(layer), windows_(*layer.rows.windows), kernels_(kernels()), taps_(taps), blocks_(block_count(layer.n)) {
    reserve();
  }

  // Unit u is line u % height of block u / height % blocks of an image.
  void run(Share share) {
    const int64_t height = windows_.out_height;
    for (int64_t u = share.begin; u < share.end; ++u) {
      const int64_t line = u % height, block = u / height % blocks_, image = u / height / blocks_;
      if (u == share.begin || line == 0) {
        flush();
        enter(image, block);
      }
      multiply_line(line);
    }
    flush();
  }

 private:
  void reserve() {
    const Extent& e = layer_.extent;
    const auto taps = taps_.taps.size();
    const size_t sets = e.grouped ? static_cast<size_t>(e.groups) : 1;
    const bool own = e.grouped || layer_.first.codes_s4 || !taps_.are_quads(e);
    const size_t weights = own ? sets * taps * kBlockN * 4 : 0;
    const size_t wide = layer_.first.codes_s4 ? static_cast<size_t>(e.padded_k * kBlockN) : 0;
    const auto strip = static_cast<size_t>(taps_.strip_bytes() + 2 * Windows::kSlack);
    const size_t sums = e.grouped ? kAccs : 0, near = layer_.tile.residual ? 2 * kAccs * 4 : kAccs * 4;
    auto& s = Scratch::of_this_thread();
    s.reset(Scratch::rounded(kAccs * 4) + Scratch::rounded(sums * 4) + Scratch::rounded(near) +
            Scratch::rounded(strip) + Scratch::rounded(weights) + Scratch::rounded(wide) +
            4 * Scratch::rounded(kBlockN * 4));
    acc_ = s.take<int32_t>(kAccs);
    sum_ = s.take<float>(sums);
    near_ = s.take<unsigned char>(near);
    strip_ = s.take<uint8_t>(strip);
    own_weights_ = s.take<int8_t>(weights);
    wide_ = s.take<int8_t>(wide);
    dwords_ = s.take<int32_t>(kBlockN);
    folded_sum_ = s.take<int32_t>(kBlockN);
    folded_scale_ = s.take<float>(kBlockN);
    folded_bias_ = s.take<float>(kBlockN);
    if (!own) own_weights_ = nullptr;
  }

  // ---- what stays the same for all lines of a block
  void enter(int64_t image, int64_t block) {
    static constexpr float kOne = 1.f;
    const RowSource& rows = layer_.rows;
    zero_ = rows.zero_point + image * rows.zero_point_step;
    scale_ = rows.scale ? rows.scale + image * rows.scale_step : &kOne;
    image_ = image;
    if (block == block_) return;
    block_ = block;
    first_ = block * kBlockN;
    cols_ = std::min(kBlockN, layer_.n - first_);
    channels_ = round_up(cols_, 16);
    group_ = first_ / taps_.group_results;
    groups_ = (first_ + cols_ - 1) / taps_.group_results - group_ + 1;
    find_dwords();
    find_weights();
    fold();
  }

  // Sums of few channels lie side by side in rows of 64, as if they were of so many, and the vectors of the epilogue
  // repeat: no lane of it is idle.
  void fold() {
    ld_ = !layer_.extent.grouped && channels_ <= 32 ? channels_ : kBlockN;
    for (int64_t n = 0; n < kBlockN && ld_ < kBlockN; ++n) {
      const int64_t from = first_ + n % ld_;
      folded_sum_[n] = layer_.first.w_sum[from];
      folded_scale_[n] = layer_.first.w_scale[from];
      folded_bias_[n] = layer_.first.bias[from];
    }
  }

  void find_dwords() {
    bool in_order = true;
    for (int64_t n = 0; n < kBlockN; ++n) {
      const int64_t channel = std::min(n, cols_ - 1);
      dwords_[n] = static_cast<int32_t>(((first_ + channel) / taps_.group_results - group_) * taps_.dwords);
      in_order = in_order && (n >= cols_ || dwords_[n] == n);
    }
    int64_t widest = 0;
    for (int64_t n = 0; n < channels_; n += kernels_.lanes)
      widest = std::max<int64_t>(widest, dwords_[std::min(n + kernels_.lanes, kBlockN) - 1] - dwords_[n]);
    spread_ = in_order                  ? Spread::side_by_side
              : widest == 0             ? Spread::one
              : widest < kernels_.lanes ? Spread::near
                                        : Spread::far;
    if (in_order)
      for (int64_t n = 0; n < kBlockN; ++n) dwords_[n] = static_cast<int32_t>(n);
  }

  // Quads of weights in the order of the taps; of weights in groups along K a set for each group, the others zero.
  void find_weights() {
    const Extent& e = layer_.extent;
    const int64_t at = block_ * layer_.block_bytes;
    if (layer_.first.codes_s4) kernels_.unpack_s4(layer_.first.codes_s4 + at, e.padded_k / 8, wide_);
    const int8_t* packed = layer_.first.codes_s4 ? wide_ : layer_.first.codes_s8 + at;
    weights_ = packed;
    if (!own_weights_) return;
    weights_ = own_weights_;
    const int64_t sets = e.grouped ? e.groups : 1, length = e.grouped ? e.group : e.k;
    int8_t* to = own_weights_;
    for (int64_t set = 0; set < sets; ++set)
      for (const Tap& tap : taps_.taps) {
        std::memset(to, 0, kBlockN * 4);
        for (int64_t i = 0; i < 4; ++i)
          if (tap.k[i] >= set * length && tap.k[i] < (set + 1) * length)
            take_codes(packed, set * e.padded_group + tap.k[i] - set * length, i, to);
        to += kBlockN * 4;
      }
  }

  // The codes of all channels at a position along K into byte i of their dwords.
  static void take_codes(const int8_t* packed, int64_t at, int64_t i, int8_t* to) {
    uint32_t from[kBlockN], quad[kBlockN];
    std::memcpy(from, packed + at / 4 * kBlockN * 4, sizeof from);
    std::memcpy(quad, to, sizeof quad);
    const int64_t down = at % 4 * 8, up = i * 8;
    for (int64_t n = 0; n < kBlockN; ++n) quad[n] |= (from[n] >> down & 255u) << up;
    std::memcpy(to, quad, sizeof quad);
  }

  // ---- a line of results
  void multiply_line(int64_t line) {
    const int64_t width = windows_.out_width, most = std::min(taps_.results, kAccs / ld_);
    const int64_t strips = (width + most - 1) / most;
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t begin = width * s / strips, count = width * (s + 1) / strips - begin;
      if ((held_ + count) * ld_ > kAccs) flush();
      if (held_ == 0) pixel_ = line * width + begin;
      fill_strip(line, begin, count);
      multiply(count);
    }
  }

  void multiply(int64_t count) {
    const Extent& e = layer_.extent;
    TapRun run;
    run.codes = strip_;
    run.step = windows_.window.stride[1] * (taps_.depthwise ? taps_.planes : 1) * taps_.pixel * 4;
    run.pixels = count;
    run.offsets = taps_.offsets.data();
    run.taps = static_cast<int64_t>(taps_.taps.size());
    run.spread = spread_;
    run.dwords = dwords_;
    run.weights = weights_;
    run.channels = channels_;
    run.acc = acc_ + held_ * ld_;
    run.ld = ld_;
    held_ += count;
    if (!e.grouped && !kernels_.linear_taps) return kernels_.taps(run);
    Tile tile = tile_of(count);
    if (!e.grouped) {
      kernels_.linear_taps(run, tile);
      if (ld_ < kBlockN) finish_from(tile, count / 4 * 4 * ld_ / kBlockN);
      return put();
    }
    // Sums of one group along K after another.
    if (e.groups == 0) std::fill(sum_, sum_ + count * kBlockN, 0.f);
    for (int64_t g = 0; g < e.groups; ++g, run.weights += run.taps * kBlockN * 4) {
      run.acc = acc_;
      kernels_.taps(run);
      tile.w_sum += g ? kBlockN : 0;
      tile.w_scale += g ? kBlockN : 0;
      kernels_.accumulate(tile, sum_, g == 0);
    }
    tile.acc = nullptr;
    tile.sum = sum_;
    kernels_.epilogue(tile);
    put();
  }

  // The pixels under the windows of results [begin, begin + count) of a line.
  void fill_strip(int64_t line, int64_t begin, int64_t count) {
    const Window& w = windows_.window;
    const int64_t top = w.first(0, line), left = w.first(1, begin);
    const int64_t columns = (count - 1) * w.stride[1] + w.span(1);
    const int64_t first = std::clamp<int64_t>(-left, 0, columns);
    const int64_t last = std::clamp<int64_t>(windows_.width - left, first, columns);
    for (int64_t plane = 0; plane < taps_.planes; ++plane)
      if (taps_.depthwise)
        fill_plane(plane, top, left, first, last, columns);
      else
        fill_line(plane, top + plane * w.dilation[0], left, first, last, columns);
  }

  // The codes of the block's groups in a pixel of the image.
  const uint8_t* source(int64_t y, int64_t x) const {
    const int64_t pixel = (image_ * windows_.height + y) * windows_.width + x;
    return windows_.codes + pixel * windows_.channels + group_ * taps_.group_channels;
  }

  void fill_plane(int64_t plane, int64_t top, int64_t left, int64_t first, int64_t last, int64_t columns) {
    const Window& w = windows_.window;
    const auto outside = static_cast<uint8_t>(*zero_);
    const int64_t bytes = taps_.pixel * 4, step = taps_.planes * bytes;
    uint8_t* to = strip_ + plane * bytes;
    for (int64_t x = 0; x < first; ++x) std::memset(to + x * step, outside, static_cast<size_t>(bytes));
    for (int64_t x = last; x < columns; ++x) std::memset(to + x * step, outside, static_cast<size_t>(bytes));
    alignas(64) uint8_t nothing[kBlockN];
    std::memset(nothing, outside, sizeof nothing);
    Interleave run;
    run.count = std::min<int64_t>(w.kernel[0] - plane * 4, 4);
    for (int64_t i = 0; i < run.count; ++i) {
      const int64_t y = top + (plane * 4 + i) * w.dilation[0];
      const bool is_inside = y >= 0 && y < windows_.height;
      run.lines[i] = is_inside ? source(y, left + first) : nothing;
      run.strides[i] = is_inside ? windows_.channels : 0;
    }
    run.pixels = last - first;
    run.channels = round_up(groups_, 16);
    run.to = to + first * step;
    run.step = step;
    kernels_.interleave(run);
  }

  void fill_line(int64_t line, int64_t y, int64_t left, int64_t first, int64_t last, int64_t columns) {
    const auto outside = static_cast<uint8_t>(*zero_);
    const int64_t bytes = taps_.pixel * 4, used = groups_ * taps_.dwords * 4;
    uint8_t* to = strip_ + line * taps_.columns * bytes;
    if (y < 0 || y >= windows_.height) {
      std::memset(to, outside, static_cast<size_t>(columns * bytes));
      return;
    }
    std::memset(to, outside, static_cast<size_t>(first * bytes));
    for (int64_t x = first; x < last; ++x) copy_pixel(source(y, left + x), used, to + x * bytes);
    std::memset(to + last * bytes, outside, static_cast<size_t>((columns - last) * bytes));
  }

  // Groups of whole dwords lie as they shall; of others every dword is copied, up to three bytes too many with it. What
  // is written beyond a pixel is written again by the next.
  void copy_pixel(const uint8_t* from, int64_t bytes, uint8_t* to) const {
    const int64_t c = taps_.group_channels;
    if (c % 4 == 0) {
      for (int64_t i = 0; i < bytes; i += Windows::kBlock) std::memcpy(to + i, from + i, Windows::kBlock);
      return;
    }
    for (int64_t g = 0; g < groups_; ++g, from += c)
      for (int64_t d = 0; d < taps_.dwords; ++d, to += 4) std::memcpy(to, from + d * 4, 4);
  }

  // ---- results
  void flush() {
    if (held_ == 0) return;
    finish_from(tile_of(held_), 0);
    put();
  }

  // Of `count` held pixels of the block, where its results are made: in their place, or near_.
  Tile tile_of(int64_t count) {
    Tile t = layer_.tile;
    const int64_t vectors = block_ * layer_.extent.groups * kBlockN;
    t.acc = acc_;
    t.rows = count * ld_ / kBlockN;
    t.w_sum = layer_.first.w_sum + vectors;
    t.w_scale = layer_.first.w_scale + vectors;
    t.bias = layer_.first.bias + first_;
    t.x_zero = zero_;
    t.x_scale = scale_;
    t.cols = cols_;
    t.residual = residual();
    t.out = is_near() ? near_ : place();
    if (layer_.plane) {
      t.ldo = kBlockN;
      if (!t.residual) t.cols = kBlockN;  // there is room for all, and no row is copied
    }
    if (ld_ == kBlockN) return t;
    t.w_sum = folded_sum_;
    t.w_scale = folded_scale_;
    t.bias = folded_bias_;
    if (t.residual && is_near()) {
      const int64_t size = bytes_of(t.residual_type);
      auto* rows = near_ + kAccs * 4;
      copy_rows(static_cast<const unsigned char*>(t.residual), t.ldr * size, count, rows, ld_ * size, cols_ * size);
      t.residual = rows;
    }
    t.ldo = t.ldr = t.cols = kBlockN;
    return t;
  }

  // Folded results are made in their place where a pixel has just their channels.
  bool is_near() const { return layer_.plane || (ld_ < kBlockN && ld_ != layer_.n); }

  int64_t row() const { return image_ * windows_.pixels() + pixel_; }
  // Where the results of the held pixels begin (without planes), and what is added to them.
  unsigned char* place() const {
    const Tile& t = layer_.tile;
    return static_cast<unsigned char*>(t.out) + (row() * t.ldo + first_) * bytes_of(t.out_type);
  }
  const unsigned char* residual() const {
    const Tile& t = layer_.tile;
    if (!t.residual) return nullptr;
    return static_cast<const unsigned char*>(t.residual) + (row() * t.ldr + first_) * bytes_of(t.residual_type);
  }

  // Rows of 64 sums, from one on, and what is left of folded ones.
  void finish_from(const Tile& tile, int64_t first) const {
    if (first < tile.rows) kernels_.epilogue(part_of(tile, first, tile.rows - first, tile.cols));
    const int64_t rest = held_ * ld_ % kBlockN;
    if (rest) kernels_.epilogue(part_of(tile, tile.rows, 1, rest));
  }

  static Tile part_of(Tile t, int64_t first, int64_t rows, int64_t cols) {
    t.acc += first * kBlockN;
    t.out = static_cast<unsigned char*>(t.out) + first * t.ldo * bytes_of(t.out_type);
    if (t.residual)
      t.residual = static_cast<const unsigned char*>(t.residual) + first * t.ldr * bytes_of(t.residual_type);
    t.rows = rows;
    t.cols = cols;
    return t;
  }

  // What was made near, to its place.
  void put() {
    if (layer_.plane) {
      store_planes();
    } else if (is_near()) {
      const int64_t size = bytes_of(layer_.tile.out_type);
      copy_rows(near_, ld_ * size, held_, place(), layer_.tile.ldo * size, cols_ * size);
    }
    held_ = 0;
  }

  static void copy_rows(const unsigned char* from, int64_t from_step, int64_t count, unsigned char* to, int64_t to_step,
                        int64_t bytes) {
    for (int64_t r = 0; r < count; ++r) std::memcpy(to + r * to_step, from + r * from_step, static_cast<size_t>(bytes));
  }

  void store_planes() {
    switch (bytes_of(layer_.tile.out_type)) {
      case 1: return store_planes_of<uint8_t>();
      case 2: return store_planes_of<uint16_t>();
      default: store_planes_of<uint32_t>();
    }
  }

  template <class T>
  void store_planes_of() {
    T* out = static_cast<T*>(layer_.tile.out) + (image_ * layer_.n + first_) * layer_.plane + pixel_;
    transpose(reinterpret_cast<const T*>(near_), ld_, held_, cols_, out, layer_.plane);
  }

  const Layer& layer_;
  const Windows& windows_;
  const Kernels& kernels_;
  const Taps& taps_;
  const int64_t blocks_;
  int64_t ld_ = 0;  // from pixel to pixel in acc_
  int64_t image_ = 0, block_ = -1, first_ = 0, cols_ = 0, channels_ = 0, group_ = 0, groups_ = 0;
  const int32_t* zero_ = nullptr;
  const float* scale_ = nullptr;
  Spread spread_ = Spread::far;
  const int8_t* weights_ = nullptr;
  int64_t pixel_ = 0, held_ = 0;  // sums in acc_: of which pixels of the image
  int32_t* acc_ = nullptr;
  float* sum_ = nullptr;
  unsigned char* near_ = nullptr;  // results, and behind them residuals, that lie otherwise in memory
  uint8_t* strip_ = nullptr;
  int8_t* own_weights_ = nullptr;  // null: the packed ones serve
  int8_t* wide_ = nullptr;
  int32_t* dwords_ = nullptr;
  int32_t* folded_sum_ = nullptr;
  float* folded_scale_ = nullptr;
  float* folded_bias_ = nullptr;
};

}  // namespace

void run_groups(const Layer& layer, int64_t images) {
  const Windows& windows = *layer.rows.windows;
  const Taps taps(windows, layer.n, kAccs / 16);
  const int64_t units = images * block_count(layer.n) * windows.out_height;
  const int64_t outputs = images * windows.pixels() * layer.n;
  Shares(units, outputs * (layer.extent.k + 8), kGrain).run([&](Share share) { GroupWorker(layer, taps).run(share); });
}

}  // namespace pyquant::cpu
