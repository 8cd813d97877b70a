// Layers of float rows and integer weights (docs/numerics.md 8). Few rows: the codes become real numbers in registers.
// Many: in a panel of 64 channels and 256 columns, which all rows read; where the machine multiplies pairs of bfloat16,
// in a panel of pairs of codes, whose sums meet the scales of their group. Never the whole matrix.
#include "cpu/weight_only.h"

#include <algorithm>
#include <utility>

#include "core/epilogue_math.h"
#include "cpu/blocks.h"
#include "cpu/cut.h"
#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kProductGrain = 2'000'000;  // multiplications worth a thread: about 70 us
constexpr int64_t kGrain = 1 << 18;           // numbers to convert worth a thread
constexpr int64_t kRegisterRows = 8;          // up to here the panel costs more than decoding for every four rows
constexpr int64_t kRowBlock = 512;            // rows of one pass over the weights
constexpr int64_t kColumns = 256;             // of K at a time: 64 KiB of real numbers
constexpr int64_t kPairedGroup = 32;          // codes of a group that are worth sums of their own

// Whether the kernels read these codes as they stand: every piece that they load has whole groups, or is within one.
bool is_direct(const IntegerWeights& w) {
  const int64_t lanes = kernels().lanes;
  if (w.group_size == 0) return true;
  if (w.type == DType::s8) return w.group_size % lanes == 0;
  return w.group_size % (8 * lanes) == 0 || (w.group_size % 8 == 0 && 8 * lanes % w.group_size == 0);
}

int64_t groups_of(const IntegerWeights& w) { return w.group_size ? w.k / w.group_size : 1; }

WeightRun run_of(const IntegerWeights& w, int64_t first, int64_t count) {
  const int64_t groups = groups_of(w);
  WeightRun run;
  run.w = static_cast<const unsigned char*>(w.codes) + first * w.row_bytes;
  run.type = w.type;
  run.ldw = w.row_bytes;
  run.channels = count;
  run.k = w.k;
  run.group_size = w.group_size;
  run.scale = w.scale + first * groups;
  run.zero_point = w.zero_point ? w.zero_point + first * groups : nullptr;
  run.ld_scale = groups;
  return run;
}

int64_t ordered_columns(const IntegerWeights& w) { return round_up(w.k, 8 * kernels().lanes); }

// One channel, in the order of K, for groups that the kernels do not take. row: scratch of k bytes.
void convert_channel(const IntegerWeights& w, int64_t channel, int8_t* row, float* out) {
  const auto* codes = static_cast<const int8_t*>(w.codes) + channel * w.row_bytes;
  if (is_packed(w.type)) {
    unpack_int4(reinterpret_cast<const uint8_t*>(codes), 1, w.k, row);
    codes = row;
  }
  const int64_t groups = groups_of(w), size = w.k / groups;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t at = channel * groups + g;
    kernels().dequantize({codes + g * size, DType::s8, size, w.scale[at], w.zero_point ? w.zero_point[at] : 0,
                          out + g * size, DType::f32});
  }
}

// A row of x in the order of the kernels' int4 codes, padded.
void order_nibbles(const float* x, int64_t k, int64_t lanes, float* out) {
  const int64_t piece = 8 * lanes;
  for (int64_t p = 0; p < round_up(k, piece); p += piece)
    for (int64_t l = 0; l < lanes; ++l)
      for (int64_t i = 0; i < 8; ++i) out[p + i * lanes + l] = p + l * 8 + i < k ? x[p + l * 8 + i] : 0.f;
}

// What a block of channels costs, in products along K: its rows, and making real numbers of its codes.
int64_t block_cost(const WeightOnlyLayer& layer) {
  constexpr int64_t kDecode = 8;
  return layer.rows.m == 0 ? 0 : (layer.rows.m + kDecode) * (layer.weights.k + 1);
}

// One thread's blocks of channels.
class Worker {
 public:
  explicit Worker(const WeightOnlyLayer& layer)
      : w_(layer.weights),
        x_(layer.rows),
        epilogue_(layer.epilogue),
        columns_(ordered_columns(w_)),
        direct_(is_direct(w_)),
        in_pairs_(x_.form == RowsForm::pairs) {
    in_registers_ = direct_ && x_.m <= kRegisterRows;
    const auto rows = static_cast<size_t>(std::min(x_.m, kRowBlock)), lanes = static_cast<size_t>(kernels_.lanes);
    const auto k = static_cast<size_t>(in_registers_ ? 0 : columns_);
    const size_t panel = in_registers_ || in_pairs_ ? 0 : kColumns * kBlockN;
    const size_t reals = direct_ ? kColumns * lanes : k * kBlockN, pairs = in_pairs_ ? kColumns / 2 * kBlockN : 0;
    const size_t factors = in_pairs_ ? (kColumns / kPairedGroup + 1) * kBlockN : 0;
    auto& scratch = Scratch::of_this_thread();
    scratch.reset(Scratch::rounded(rows * kBlockN * 4) + Scratch::rounded(panel * 4) + Scratch::rounded(reals * 4) +
                  Scratch::rounded(k) + Scratch::rounded(pairs * 4) + 2 * Scratch::rounded(factors * 4));
    sum_ = scratch.take<float>(rows * kBlockN);
    panel_ = scratch.take<float>(panel);
    reals_ = scratch.take<float>(reals);
    row_ = scratch.take<int8_t>(k);
    pairs_ = scratch.take<uint32_t>(pairs);
    scales_ = scratch.take<float>(factors);
    zeros_ = scratch.take<float>(factors);
  }

  void run(Range blocks) {
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const int64_t first = block * kBlockN, count = std::min(kBlockN, w_.n - first);
      if (!direct_) convert_block(first, count);
      for (int64_t row = 0; row < x_.m; row += kRowBlock) {
        const int64_t rows = std::min(kRowBlock, x_.m - row);
        switch (x_.form) {
          case RowsForm::pairs: multiply_pairs(first, count, rows_from<uint16_t>(row), rows); break;
          case RowsForm::few_pairs:
            kernels_.few_pairs(run_of(w_, first, count), rows_from<uint16_t>(row), rows, x_.ld, sum_, kBlockN);
            break;
          case RowsForm::ordered: multiply(first, count, rows_from<float>(row), rows);
        }
        float_tile(epilogue_, sum_, kBlockN, row, rows, first, count);
      }
    }
  }

 private:
  template <class T>
  const T* rows_from(int64_t row) const {
    return static_cast<const T*>(x_.x) + row * x_.ld;
  }

  void multiply_pairs(int64_t first, int64_t count, const uint16_t* x, int64_t rows) {
    const int64_t group = w_.group_size ? w_.group_size : round_up(w_.k, kColumns);
    const WeightRun from = run_of(w_, first, count);
    for (int64_t begin = 0; begin < w_.k; begin += kColumns) {
      const int64_t end = std::min(begin + kColumns, w_.k), before = begin / group;
      take_factors(from, before, (end - 1) / group + 1);
      PairRun codes;
      codes.w = static_cast<const uint8_t*>(from.w);
      codes.type = w_.type;
      codes.ldw = w_.row_bytes;
      codes.channels = count;
      codes.begin = begin;
      codes.end = end;
      codes.zeros = from.zero_point ? zeros_ : nullptr;
      codes.group_size = group;
      codes.pairs = pairs_;
      kernels_.pair_codes(codes);
      for (int64_t at = begin; at < end;) {
        const int64_t to = std::min(end, (at / group + 1) * group);
        kernels_.pair_products(x + at, rows, x_.ld, pairs_ + (at - begin) / 2 * kBlockN, (to - at + 1) / 2,
                               scales_ + (at / group - before) * kBlockN, sum_, at > 0);
        at = to;
      }
    }
  }

  // Scales and zero points of groups [begin, end), a vector of channels each.
  void take_factors(const WeightRun& from, int64_t begin, int64_t end) {
    for (int64_t c = 0; c < kBlockN; ++c)
      for (int64_t g = begin; g < end; ++g) {
        const int64_t to = (g - begin) * kBlockN + c, at = c * from.ld_scale + g;
        scales_[to] = c < from.channels ? from.scale[at] : 0.f;
        if (from.zero_point) zeros_[to] = c < from.channels ? static_cast<float>(from.zero_point[at]) : 0.f;
      }
  }

  void multiply(int64_t first, int64_t count, const float* x, int64_t rows) {
    if (in_registers_) return kernels_.weight_products(run_of(w_, first, count), x, rows, columns_, sum_, kBlockN);
    for (int64_t begin = 0; begin < columns_ || begin == 0; begin += kColumns) {
      const int64_t columns = std::min(kColumns, columns_ - begin);
      for (int64_t c = 0; c < kBlockN; c += kernels_.lanes) fill_panel(first, count, c, begin, columns);
      kernels_.panel_products(x + begin, rows, columns_, panel_, columns, sum_, begin > 0);
    }
  }

  // Channels c and on of the block, as many as a vector has lanes; zeros for those that there are not.
  void fill_panel(int64_t first, int64_t count, int64_t c, int64_t begin, int64_t columns) {
    const float* from = direct_ ? reals_ : reals_ + c * columns_ + begin;
    if (direct_) {
      const int64_t here = std::clamp<int64_t>(count - c, 0, kernels_.lanes), end = std::min(begin + columns, w_.k);
      // K may end within a vector.
      if (here < kernels_.lanes || begin + columns > w_.k) std::fill(reals_, reals_ + kernels_.lanes * kColumns, 0.f);
      if (here > 0) kernels_.real_weights(run_of(w_, first + c, here), begin, end, reals_, kColumns);
    }
    kernels_.transpose(from, direct_ ? kColumns : columns_, columns, panel_ + c);
  }

  void convert_block(int64_t first, int64_t count) {
    std::fill(reals_, reals_ + kBlockN * columns_, 0.f);
    for (int64_t c = 0; c < count; ++c) convert_channel(w_, first + c, row_, reals_ + c * columns_);
  }

  const IntegerWeights& w_;
  const LayerRows& x_;
  const FloatEpilogue& epilogue_;
  const Kernels& kernels_ = kernels();
  const int64_t columns_;
  const bool direct_, in_pairs_;
  bool in_registers_;
  float *sum_, *panel_, *reals_, *scales_, *zeros_;
  int8_t* row_;
  uint32_t* pairs_;
};

}  // namespace

RowsForm form_of(const IntegerWeights& w, DType x, int64_t m) {
  if (kernels().pair_products == nullptr || x != DType::bf16 || w.k == 0 || !is_direct(w)) return RowsForm::ordered;
  const int64_t group = w.group_size, whole = 512 / bits_of(w.type);  // of 64 bytes
  if (m > kRegisterRows)
    return group == 0 || (group >= kPairedGroup && group % 2 == 0) ? RowsForm::pairs : RowsForm::ordered;
  return group % whole == 0 || (group >= kPairedGroup && group < whole && w.type == DType::s4) ? RowsForm::few_pairs
                                                                                               : RowsForm::ordered;
}

int64_t columns_in(RowsForm form, const IntegerWeights& w) {
  if (form == RowsForm::pairs) return round_up(w.k, 2);
  return form == RowsForm::few_pairs ? round_up(w.k, 128) : ordered_columns(w);
}

void prepare_rows(RowsForm form, const IntegerWeights& w, const void* x, DType type, int64_t m, int64_t ldx, void* out,
                  const int64_t* rows) {
  const Kernels& in_use = kernels();
  const int64_t columns = columns_in(form, w);
  const bool reorders = form == RowsForm::ordered && w.type == DType::s4 && is_direct(w);
  Shares(m, m * w.k, kGrain).run([&](Share share) {
    auto& scratch = Scratch::of_this_thread();
    scratch.reset(Scratch::rounded(reorders ? static_cast<size_t>(w.k) * 4 : 0));
    auto* wide = scratch.take<float>(reorders ? static_cast<size_t>(w.k) : 0);
    for (int64_t r = share.begin; r < share.end; ++r) {
      const auto* from = static_cast<const unsigned char*>(x) + (rows ? rows[r] : r) * ldx * bytes_of(type);
      const auto* narrow = reinterpret_cast<const uint16_t*>(from);
      if (form == RowsForm::few_pairs) {
        auto* to = static_cast<uint16_t*>(out) + r * columns;
        if (w.type == DType::s8) std::fill(to + w.k / 64 * 64, to + columns, uint16_t{0});
        in_use.order_pairs(w.type, narrow, w.k, to);
      } else if (form == RowsForm::pairs) {
        auto* to = static_cast<uint16_t*>(out) + r * columns;
        std::fill(std::copy_n(narrow, w.k, to), to + columns, uint16_t{0});
      } else {
        auto* to = static_cast<float*>(out) + r * columns;
        in_use.widen(from, type, w.k, reorders ? wide : to);
        if (reorders)
          order_nibbles(wide, w.k, in_use.lanes, to);
        else
          std::fill(to + w.k, to + columns, 0.f);
      }
    }
  });
}

void weight_only(const WeightOnlyLayer& layer) {
  const IntegerWeights& w = layer.weights;
  const Shares shares(block_count(w.n), layer.rows.m * w.n * w.k, kProductGrain);
  shares.run([&](Share share) { Worker(layer).run({share.begin, share.end}); });
}

void weight_only_all(const std::vector<WeightOnlyLayer>& layers) {
  std::vector<Blocks> blocks;
  int64_t products = 0;
  for (const WeightOnlyLayer& one : layers) {
    blocks.push_back({block_count(one.weights.n), block_cost(one)});
    products += one.rows.m * one.weights.n * one.weights.k;
  }
  Cut(std::move(blocks)).run(products < 2 * kProductGrain, [&](size_t l, Range mine) { Worker(layers[l]).run(mine); });
}

}  // namespace pyquant::cpu
