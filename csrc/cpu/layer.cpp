#include "cpu/layer.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/epilogue_math.h"
#include "cpu/cut.h"
#include "cpu/transpose.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kRowBytes = 1 << 20;  // codes of one pass over the weights: half of a common L2
// Rows from which a block of int4 in groups is unpacked once for all of them: taking nibbles apart is an eighth of a
// tile's work where vectors have four ports, a quarter where they have two.
constexpr int64_t kUnpackRows = 18;
constexpr int64_t kUnpackedK = 1024;       // int4 codes along K unpacked at a time for few rows: 64 KiB
constexpr int64_t kSerialFew = 2'000'000;  // multiplications that are not worth a second thread: 20 to 60 us
constexpr int64_t kSerialMany = 4'000'000;

// One thread's share of a layer, with all memory it needs.
class Worker {
 public:
  Worker(const Layer& layer, const Kernels& kernels, Range rows, Range blocks)
      : layer_(layer), kernels_(kernels), extent_(layer.extent), rows_(rows), blocks_(blocks) {
    // 64 bytes more than a row: rows a multiple of 4 KiB apart would share the sets of the first-level cache.
    stride_ = extent_.padded_k + 64;
    quads_ = extent_.grouped ? extent_.padded_group / 4 : round_up((extent_.k + 3) / 4, kernels.quad_step);
    pass_ = std::clamp<int64_t>(kRowBytes / stride_ / kMaxRowBlock * kMaxRowBlock, kMaxRowBlock,
                                round_up(rows.end - rows.begin, kRowSlack));
    reserve();
  }

  void run() {
    if (rows_.begin == rows_.end || blocks_.begin == blocks_.end) return;
    for (int64_t m = rows_.begin; m < rows_.end; m += pass_) {
      const int64_t rows = std::min(pass_, rows_.end - m);
      kernels_.begin(rows);
      load_rows(m, rows);
      multiply_all(m, rows);
      kernels_.end(rows);
    }
  }

 private:
  void reserve() {
    const auto padded_rows = static_cast<size_t>(round_up(pass_, kRowSlack));
    const auto k = static_cast<size_t>(extent_.padded_k);
    const auto vectors = static_cast<size_t>(extent_.groups * kBlockN);
    const bool unpacks = layer_.first.codes_s4 && !layer_.plain;
    const size_t unpacked = layer_.plain || unpacks ? k * kBlockN : 0;
    const size_t plain = layer_.plain ? vectors : 0;
    const bool int4 = layer_.first.codes_s4 || (layer_.plain && is_packed(layer_.plain_weights.type));
    products_ = int4 && kernels_.gemm_unpacked_s4 ? kernels_.gemm_unpacked_s4 : kernels_.gemm_s8;
    summed_ = unpacks && extent_.grouped && kernels_.groups_s4;
    const size_t planar = layer_.plane ? kMaxRowBlock * kBlockN * 4 : 0;
    const size_t sums = summed_ ? padded_rows * static_cast<size_t>(extent_.groups) : 0;
    auto& s = Scratch::of_this_thread();
    s.reset(Scratch::rounded(padded_rows * static_cast<size_t>(stride_)) + 2 * Scratch::rounded(padded_rows * 4) +
            2 * Scratch::rounded(kMaxRowBlock * kBlockN * 4) + Scratch::rounded(unpacked) +
            Scratch::rounded(k + Windows::kSlack) + Scratch::rounded(k) + 2 * Scratch::rounded(plain * 4) +
            Scratch::rounded(kBlockN * 4) + Scratch::rounded(sums * 4) + Scratch::rounded(planar));
    codes_ = s.take<uint8_t>(padded_rows * static_cast<size_t>(stride_));
    scales_ = s.take<float>(padded_rows);
    zeros_ = s.take<int32_t>(padded_rows);
    acc_ = s.take<int32_t>(kMaxRowBlock * kBlockN);
    sum_ = s.take<float>(kMaxRowBlock * kBlockN);
    unpacked_ = s.take<int8_t>(unpacked);
    row_ = s.take<int8_t>(k + Windows::kSlack);
    ones_ = s.take<uint8_t>(k);
    plain_sum_ = s.take<int32_t>(plain);
    plain_scale_ = s.take<float>(plain);
    plain_bias_ = s.take<float>(kBlockN);
    code_sums_ = s.take<int32_t>(sums);
    planar_ = s.take<unsigned char>(planar);
  }

  // ---- rows
  void load_rows(int64_t m, int64_t rows) {
    const RowSource& from = layer_.rows;
    const bool floats = is_float(from.type);
    own_scales_ = floats && from.dynamic;
    own_zeros_ = own_scales_ && !from.symmetric;
    // u8 codes are the kernels' own form; s8 codes lie 128 below it.
    const int32_t shift = from.type == DType::u8 ? 0 : 128;
    if (from.zero_point && from.zero_point_step) {
      for (int64_t r = 0; r < rows; ++r) zeros_[r] = from.zero_point[(m + r) / from.rows_each] + shift;
      own_zeros_ = true;
    } else if (!own_zeros_) {
      zeros_[0] = (from.zero_point && !own_scales_ ? from.zero_point[0] : 0) + shift;
    }
    if (from.scale && from.scale_step && from.rows_each > 1) {
      for (int64_t r = 0; r < rows; ++r) scales_[r] = from.scale[(m + r) / from.rows_each];
      own_scales_ = true;
    }
    a_ = codes_;
    lda_ = stride_;
    if (from.windows) return load_windows(*from.windows, m, rows);
    for (int64_t r = 0; r < rows; ++r) {
      uint8_t* to = codes_ + r * stride_;
      auto* x = static_cast<const unsigned char*>(from.x) + (m + r) * from.ld * bytes_of(from.type);
      uint8_t* flat = extent_.scattered() ? reinterpret_cast<uint8_t*>(row_) : to;
      if (floats)
        quantize_row(x, r, flat);
      else
        copy_codes(x, flat);
      finish_row(flat, r, rows);
    }
  }

  void load_windows(const Windows& windows, int64_t m, int64_t rows) {
    if (in_place(windows)) {
      a_ = windows.codes + m * extent_.k;
      lda_ = extent_.k;
      return;
    }
    Windows::Cursor window(windows, m);
    for (int64_t r = 0; r < rows; ++r, window.next()) {
      uint8_t* flat = extent_.scattered() ? reinterpret_cast<uint8_t*>(row_) : codes_ + r * stride_;
      window.copy(static_cast<uint8_t>(zeros_[own_zeros_ ? r : 0]), flat);
      finish_row(flat, r, rows);
    }
  }

  // Pixels that are rows: whole quads of u8 codes, in memory that may be read beyond the last. (What follows a row
  // meets weights of zero.) Not a multiple of 1 KiB apart, see stride_.
  bool in_place(const Windows& windows) const {
    return windows.window.is_pointwise() && layer_.first.codes_s8 && !extent_.grouped && extent_.k % 4 == 0 &&
           extent_.k % 1024 != 0 && quads_ * 4 - extent_.k <= Windows::kSlack;
  }

  void finish_row(const uint8_t* flat, int64_t r, int64_t rows) {
    uint8_t* to = codes_ + r * stride_;
    if (extent_.scattered()) scatter(flat, to);
    // The weights there are zero; the codes only have to be something.
    const int64_t used = extent_.scattered() ? extent_.groups * extent_.padded_group : extent_.k;
    const int64_t read = extent_.grouped || !layer_.first.codes_s8 ? extent_.padded_k : quads_ * 4;
    if (used < read) std::memset(to + used, 0, static_cast<size_t>(read - used));
    if (summed_ && rows > 1 && !unpacks_groups(rows))
      kernels_.code_sums(to, extent_.padded_group, extent_.groups, code_sums_ + r * extent_.groups);
  }

  void quantize_row(const void* x, int64_t r, uint8_t* to) {
    const RowSource& from = layer_.rows;
    QuantizeRun run{x, from.type, extent_.k, from.recip, 0, from.qmin, from.qmax, false, 0x80, to};
    if (!from.dynamic) {
      run.zero_point = zeros_[0] - 128;
      kernels_.quantize(run);
      return;
    }
    const RowStats stats = kernels_.stats(x, from.type, extent_.k, !from.symmetric);
    const float scale = from.symmetric ? scale_from_amax(stats.amax, from.qmax)
                                       : scale_from_range(stats.low, stats.high, from.qmin, from.qmax);
    scales_[r] = scale;
    run.finite = scale == scale;
    run.recip = scale_recip(scale);
    if (!from.symmetric) {
      run.zero_point = zero_point_from_range(stats.low, run.recip, from.qmin, from.qmax);
      zeros_[r] = run.zero_point + 128;
    }
    // A poisoned row has the scale NaN, which makes every output NaN whatever the codes are.
    if (run.finite)
      kernels_.quantize(run);
    else
      std::memset(to, 0x80, static_cast<size_t>(extent_.k));
  }

  void copy_codes(const void* x, uint8_t* to) {
    const auto* from = static_cast<const uint8_t*>(x);
    const uint8_t flip = layer_.rows.type == DType::u8 ? 0 : 0x80;
    const int64_t k = extent_.k;  // a copy, because `to` points to bytes and may alias extent_
    for (int64_t i = 0; i < k; ++i) to[i] = from[i] ^ flip;
  }

  void scatter(const uint8_t* from, uint8_t* to) {
    for (int64_t g = 0; g < extent_.groups; ++g) {
      std::memcpy(to + g * extent_.padded_group, from + g * extent_.group, static_cast<size_t>(extent_.group));
      std::memset(to + g * extent_.padded_group + extent_.group, 0,
                  static_cast<size_t>(extent_.padded_group - extent_.group));
    }
  }

  // ---- blocks
  BlockView view(int64_t b) {
    if (layer_.plain) return pack_plain(b);
    BlockView v = layer_.first;
    if (v.codes_s8) v.codes_s8 += b * layer_.block_bytes;
    if (v.codes_s4) v.codes_s4 += b * layer_.block_bytes;
    v.w_sum += b * extent_.groups * kBlockN;
    v.w_scale += b * extent_.groups * kBlockN;
    v.bias += b * kBlockN;
    return v;
  }

  BlockView pack_plain(int64_t b) {
    const int64_t first = b * kBlockN, channels = std::min(kBlockN, layer_.n - first);
    pack_block_s8(layer_.plain_weights, extent_, first, channels, row_, unpacked_);
    block_sums(kernels_, unpacked_, extent_, ones_, plain_sum_);
    for (int64_t c = 0; c < kBlockN; ++c) {
      const bool there = c < channels;
      plain_bias_[c] = there && layer_.plain_bias ? layer_.plain_bias[first + c] : -0.f;
      for (int64_t g = 0; g < extent_.groups; ++g) {
        const float w = there && layer_.plain_scale ? layer_.plain_scale[(first + c) * extent_.groups + g] : 1.f;
        plain_scale_[g * kBlockN + c] = extent_.grouped ? w : fmul(layer_.plain_scale_factor, w);
      }
    }
    return {unpacked_, nullptr, plain_sum_, plain_scale_, plain_bias_};
  }

  // Every second pass runs backwards: it begins with the blocks that are still in the cache.
  void multiply_all(int64_t m, int64_t rows) {
    static thread_local bool backwards = false;
    backwards = !backwards;
    const int64_t step = backwards ? -1 : 1, first = backwards ? blocks_.end - 1 : blocks_.begin;
    for (int64_t left = blocks_.end - blocks_.begin, b = first; left > 0; --left, b += step) {
      if (left > 1) call_vectors(b + step);
      multiply(m, rows, b, left > 1 ? step * layer_.block_bytes : 0);
    }
  }

  // The first row of a block would wait three times in turn: for the sums, the scales and the bias of its channels,
  // each of them in pages of their own. (Of grouped weights the first group's; the others follow it in order.)
  void call_vectors(int64_t b) const {
    if (layer_.plain) return;
    const int64_t at = b * extent_.groups * kBlockN;
    for (int64_t line = 0; line < kBlockN; line += 16) {
      __builtin_prefetch(layer_.first.w_sum + at + line);
      __builtin_prefetch(layer_.first.w_scale + at + line);
      __builtin_prefetch(layer_.first.bias + b * kBlockN + line);
    }
  }

  // to_next: from the codes of this block to those of the block that comes after it; 0 for none.
  void multiply(int64_t m, int64_t rows, int64_t b, int64_t to_next) {
    const BlockView block = view(b);
    if (summed_ && rows > 1) return multiply_groups(m, rows, b, block, to_next);
    // int4: few rows read the nibbles as they are; one tile of rows unpacks piece by piece; more unpack the block once.
    const bool direct = block.codes_s4 && rows <= kDirectRows;
    const bool piecewise = block.codes_s4 && !direct && rows <= kernels_.row_block;
    const int8_t* codes = block.codes_s8;
    if (block.codes_s4 && !direct) {
      codes = unpacked_;
      if (!piecewise) kernels_.unpack_s4(block.codes_s4, extent_.padded_k / 8, unpacked_);
    }
    for (int64_t r = 0; r < rows; r += kernels_.row_block) {
      Tile tile = tile_of(m, r, std::min(kernels_.row_block, rows - r), b, block);
      const int64_t octs = extent_.padded_group / 8;
      if (direct && rows == 1 && extent_.grouped && kernels_.gemv_s4 && octs <= kGroupOcts) {
        kernels_.gemv_s4(a_, block.codes_s4, octs, extent_.groups, tile, sum_);
        finish_groups(tile);
        store(tile, m + r, b);
        continue;
      }
      if (block.codes_s8 && !extent_.grouped && kernels_.linear_s8) {
        kernels_.linear_s8(a_ + r * lda_, lda_, codes, quads_, tile, acc_,
                           ahead(block.codes_s8, r, rows, 0, to_next, tile));
        to_planes(tile, m + r, b);
        continue;
      }
      for (int64_t g = 0; g < extent_.groups; ++g) {
        const int64_t k0 = g * extent_.padded_group;
        const uint8_t* a = a_ + r * lda_ + k0;
        if (direct)
          kernels_.gemm_s4(a, lda_, tile.rows, block.codes_s4 + k0 / 2 * kBlockN, extent_.padded_group / 8, acc_);
        else if (piecewise)
          unpack_and_multiply(a, tile.rows, block.codes_s4 + k0 / 2 * kBlockN, extent_.padded_group);
        else
          products_(a, lda_, tile.rows, codes + k0 * kBlockN, codes == unpacked_ ? extent_.padded_group / 4 : quads_,
                    acc_, false, ahead(block.codes_s8, r, rows, g, to_next, tile));
        if (!extent_.grouped) break;
        tile.w_sum = block.w_sum + g * kBlockN;
        tile.w_scale = block.w_scale + g * kBlockN;
        kernels_.accumulate(tile, sum_, g == 0);
      }
      if (extent_.grouped) finish_groups(tile);
      store(tile, m + r, b);
    }
  }

  // While gemm_s8 multiplies group g of a block of int8 codes; the block stays in the cache for all its rows.
  Ahead ahead(const int8_t* codes, int64_t r, int64_t rows, int64_t g, int64_t to_next, const Tile& tile) const {
    const bool last = g + 1 == extent_.groups;
    Ahead a = last ? ahead_of(tile) : Ahead{};
    a.first_use = r == 0;
    if (!codes || layer_.plain || r + tile.rows < rows) return a;
    if (!last)
      a.weights = codes + (g + 1) * extent_.padded_group * kBlockN;
    else if (to_next)
      a.weights = codes + to_next;
    return a;
  }

  static Ahead ahead_of(const Tile& tile) {
    const int64_t size = bytes_of(tile.out_type);
    return {nullptr, static_cast<const unsigned char*>(tile.out), tile.ldo * size, tile.cols * size};
  }

  bool unpacks_groups(int64_t rows) const { return kernels_.linear_s4 && extent_.groups > 0 && rows >= kUnpackRows; }

  void multiply_groups(int64_t m, int64_t rows, int64_t b, const BlockView& block, int64_t to_next) {
    for (int64_t r = 0; r < rows; r += kernels_.row_block) {
      Tile tile = tile_of(m, r, std::min(kernels_.row_block, rows - r), b, block);
      Ahead calls = ahead_of(tile);
      calls.first_use = r == 0;
      if (to_next && r + tile.rows == rows) calls.weights = block.codes_s4 + to_next;
      if (unpacks_groups(rows)) {
        kernels_.linear_s4(a_ + r * lda_, lda_, block.codes_s4, unpacked_, r == 0, extent_.padded_group / 8,
                           extent_.groups, tile, sum_, calls);
        to_planes(tile, m + r, b);
        continue;
      }
      kernels_.groups_s4(a_ + r * lda_, lda_, code_sums_ + r * extent_.groups, block.codes_s4, extent_.padded_group / 8,
                         extent_.groups, tile, sum_, calls);
      finish_groups(tile);
      store(tile, m + r, b);
    }
  }

  void unpack_and_multiply(const uint8_t* a, int64_t rows, const uint8_t* nibbles, int64_t k) {
    if (k == 0) products_(a, lda_, rows, unpacked_, 0, acc_, false, {});
    for (int64_t at = 0; at < k; at += kUnpackedK) {
      const int64_t piece = std::min(kUnpackedK, k - at);
      kernels_.unpack_s4(nibbles + at / 2 * kBlockN, piece / 8, unpacked_);
      Ahead next;
      if (kernels_.gemm_unpacked_s4) next.weights = nibbles + (at + piece) / 2 * kBlockN;
      products_(a + at, lda_, rows, unpacked_, piece / 4, acc_, at > 0, next);
    }
  }

  void finish_groups(Tile& tile) {
    if (extent_.groups == 0) std::fill(sum_, sum_ + tile.rows * kBlockN, 0.f);
    tile.acc = nullptr;
    tile.sum = sum_;
  }

  void store(const Tile& tile, int64_t row, int64_t b) {
    kernels_.epilogue(tile);
    to_planes(tile, row, b);
  }

  void to_planes(const Tile& tile, int64_t row, int64_t b) {
    if (!layer_.plane) return;
    switch (bytes_of(tile.out_type)) {
      case 1: return store_planes<uint8_t>(tile, row, b * kBlockN);
      case 2: return store_planes<uint16_t>(tile, row, b * kBlockN);
      default: store_planes<uint32_t>(tile, row, b * kBlockN);
    }
  }

  // A tile of results, whose rows may belong to several images, into their planes.
  template <class T>
  void store_planes(const Tile& tile, int64_t row, int64_t column) {
    const int64_t plane = layer_.plane;
    for (int64_t r = 0; r < tile.rows;) {
      const int64_t image = (row + r) / plane, pixel = (row + r) % plane;
      const int64_t rows = std::min(plane - pixel, tile.rows - r);
      transpose(reinterpret_cast<const T*>(planar_) + r * kBlockN, kBlockN, rows, columns_from(column),
                static_cast<T*>(layer_.tile.out) + (image * layer_.n + column) * plane + pixel, plane);
      r += rows;
    }
  }

  int64_t columns_from(int64_t column) const { return std::min(kBlockN, layer_.n - column); }

  Tile tile_of(int64_t m, int64_t r, int64_t rows, int64_t b, const BlockView& block) {
    static constexpr float kOne = 1.f;
    Tile t = layer_.tile;
    t.acc = acc_;
    t.rows = rows;
    t.cols = columns_from(b * kBlockN);
    t.w_sum = block.w_sum;
    t.w_scale = block.w_scale;
    t.bias = block.bias;
    t.x_zero = own_zeros_ ? zeros_ + r : zeros_;
    t.x_zero_step = own_zeros_ ? 1 : 0;
    if (own_scales_) {
      t.x_scale = scales_ + r;
      t.x_scale_step = 1;
    } else if (layer_.rows.scale) {
      t.x_scale_step = layer_.rows.scale_step;
      t.x_scale = layer_.rows.scale + (m + r) * t.x_scale_step;
    } else {
      t.x_scale = &kOne;
    }
    const int64_t row = m + r, column = b * kBlockN;
    if (layer_.plane) {
      t.out = planar_;
      t.ldo = kBlockN;
      if (!t.residual) t.cols = kBlockN;  // there is room for all, and no row is copied
    } else {
      t.out = static_cast<unsigned char*>(t.out) + (row * t.ldo + column) * bytes_of(t.out_type);
    }
    if (t.residual)
      t.residual = static_cast<const unsigned char*>(t.residual) + (row * t.ldr + column) * bytes_of(t.residual_type);
    return t;
  }

  const Layer& layer_;
  const Kernels& kernels_;
  const Extent& extent_;
  Range rows_, blocks_;
  int64_t stride_ = 0, pass_ = 0, quads_ = 0;
  bool own_scales_ = false, own_zeros_ = false;
  decltype(Kernels::gemm_s8) products_ = nullptr;  // of codes a byte each
  bool summed_ = false;                            // groups_s4 multiplies, and needs the sums of the codes
  uint8_t* codes_ = nullptr;
  const uint8_t* a_ = nullptr;  // what is multiplied: codes_, or rows that lie ready
  int64_t lda_ = 0;
  float* scales_ = nullptr;
  int32_t* zeros_ = nullptr;
  int32_t* acc_ = nullptr;
  float* sum_ = nullptr;
  int8_t* unpacked_ = nullptr;
  int8_t* row_ = nullptr;
  uint8_t* ones_ = nullptr;
  int32_t* plain_sum_ = nullptr;
  float* plain_scale_ = nullptr;
  float* plain_bias_ = nullptr;
  int32_t* code_sums_ = nullptr;
  unsigned char* planar_ = nullptr;  // results of a tile that goes into planes
};

struct Grid {
  int64_t rows = 1, blocks = 1;
};

// Cuts the layer into one task a thread. Parts of N repeat the quantising of their rows, parts of M the reading of
// the weights; the cheapest cut wins (cost in products: a quantised code is worth about 100, a weight about 16).
Grid grid_of(const Layer& layer) {
  const int64_t blocks = block_count(layer.n), threads = thread_count();
  const double work = static_cast<double>(layer.m) * static_cast<double>(layer.n) * static_cast<double>(layer.extent.k);
  if (threads == 1 || work < static_cast<double>(layer.m < 8 ? kSerialFew : kSerialMany)) return {};
  Grid best;
  double least = 0;
  for (int64_t r = 1; r <= std::min(threads, layer.m); ++r) {
    const int64_t c = std::min(threads / r, blocks);
    const auto rows = static_cast<double>((layer.m + r - 1) / r),
               columns = static_cast<double>((blocks + c - 1) / c * kBlockN);
    const double cost = rows * columns + 100 * rows + 16 * columns;
    if (r == 1 || cost < least) {
      least = cost;
      best = {r, c};
    }
  }
  return best;
}

// What a block of 64 channels costs, in products along K: its rows, and the reading of its weights.
int64_t block_cost(const Layer& layer) { return layer.m == 0 ? 0 : (layer.m + 16) * (layer.extent.k + 1); }

}  // namespace

void run_all(const Layer* layers, int64_t count) {
  const Kernels& in_use = kernels();
  std::vector<Blocks> blocks;
  for (int64_t l = 0; l < count; ++l) blocks.push_back({block_count(layers[l].n), block_cost(layers[l])});
  const Cut cut(std::move(blocks));
  cut.run(cut.total() * kBlockN < kSerialMany,
          [&](size_t l, Range mine) { Worker(layers[l], in_use, {0, layers[l].m}, mine).run(); });
}

void run(const Layer& layer) {
  if (layer.m == 0 || layer.n == 0) return;
  const Kernels& in_use = kernels();
  const Grid grid = grid_of(layer);
  const int64_t blocks = block_count(layer.n);
  Shares::of_one_unit(grid.rows * grid.blocks).run([&](Share share) {
    const int64_t row = share.index / grid.blocks, block = share.index % grid.blocks;
    Worker(layer, in_use, part(layer.m, grid.rows, row), part(blocks, grid.blocks, block)).run();
  });
}

}  // namespace pyquant::cpu
