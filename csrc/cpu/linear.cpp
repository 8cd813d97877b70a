// The packed buffer of a fused layer, and the layer itself. The buffer reads the same on every instruction set:
// header, w_scale [blocks][groups][64], w_sum (same shape), bias [blocks][64], codes [blocks][padded_k / 4][64][4].
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/epilogue_math.h"
#include "cpu/layer.h"

namespace pyquant::cpu {
namespace {

struct Header {
  float x_scale = 1.f, x_recip = 1.f, out_recip = 1.f;
  int32_t x_zero_point = 0, out_zero_point = 0;
  uint8_t reserved[44] = {};
};
static_assert(sizeof(Header) == 64);

struct Sections {
  Extent extent;
  int64_t blocks, vectors, block_bytes;  // vectors: entries of w_scale of one block
  size_t w_scale, w_sum, bias, codes, end;
};

Sections sections_of(const LinearSpec& spec) {
  Sections s;
  s.extent = extent_of(spec.k, spec.group_size, spec.w->type);
  s.blocks = block_count(spec.n);
  s.vectors = s.extent.groups * kBlockN;
  s.block_bytes = columns_of(spec.w->type, s.extent.padded_k) * kBlockN;
  s.w_scale = sizeof(Header);
  s.w_sum = s.w_scale + static_cast<size_t>(s.blocks * s.vectors) * 4;
  s.bias = s.w_sum + static_cast<size_t>(s.blocks * s.vectors) * 4;
  s.codes = s.bias + static_cast<size_t>(s.blocks * kBlockN) * 4;
  s.end = s.codes + static_cast<size_t>(s.blocks * s.block_bytes);
  return s;
}

bool is_static(const LinearSpec& spec) { return spec.input == InputMode::static_per_tensor; }

int64_t row_bytes(const LinearSpec& spec) { return columns_of(spec.w->type, spec.k); }

constexpr int64_t kPackGrain = 1 << 20;  // codes worth a task

}  // namespace

size_t packed_bytes(const LinearSpec& spec) { return sections_of(spec).end; }

int32_t input_zero_point(const void* packed) {
  Header header;
  std::memcpy(&header, packed, sizeof header);
  return header.x_zero_point;
}

void pack_linear(const LinearSpec& spec, const LinearWeights& w, void* packed) {
  const Sections s = sections_of(spec);
  const Extent& e = s.extent;
  auto* base = static_cast<unsigned char*>(packed);
  advise_huge_pages(packed, s.end);
  Header header;
  const float x_scale = is_static(spec) && w.x_scale ? *w.x_scale : 1.f;
  header.x_scale = x_scale;
  header.x_recip = scale_recip(x_scale);
  header.x_zero_point = w.x_zero_point ? *w.x_zero_point : 0;
  header.out_recip = spec.codes_out && w.out_scale ? scale_recip(*w.out_scale) : 1.f;
  header.out_zero_point = w.out_zero_point ? *w.out_zero_point : 0;
  std::memcpy(base, &header, sizeof header);
  // Per channel the static input scale is one product with the channel's; after a sum over groups it is a step of its
  // own.
  auto* w_scale = reinterpret_cast<float*>(base + s.w_scale);
  auto* w_sum = reinterpret_cast<int32_t*>(base + s.w_sum);
  auto* bias = reinterpret_cast<float*>(base + s.bias);
  const Kernels& in_use = kernels();
  Shares(s.blocks, spec.n * spec.k, kPackGrain).run([&](Share share) {
    const auto k = static_cast<size_t>(e.padded_k);
    auto& scratch = Scratch::of_this_thread();
    scratch.reset(Scratch::rounded(k * kBlockN) + 2 * Scratch::rounded(k));
    auto* wide = scratch.take<int8_t>(k * kBlockN);
    auto* row = scratch.take<int8_t>(k);
    auto* ones = scratch.take<uint8_t>(k);
    for (int64_t b = share.begin; b < share.end; ++b) {
      const int64_t first = b * kBlockN, channels = std::min(kBlockN, spec.n - first);
      unsigned char* codes = base + s.codes + static_cast<size_t>(b * s.block_bytes);
      pack_block_s8({w.codes, spec.w->type, row_bytes(spec)}, e, first, channels, row, wide);
      block_sums(in_use, wide, e, ones, w_sum + b * s.vectors);
      if (spec.w->is_packed())
        squeeze_block(wide, e, codes);
      else
        std::memcpy(codes, wide, k * kBlockN);
      for (int64_t c = 0; c < kBlockN; ++c) {
        bias[first + c] = c < channels && spec.has_bias && w.bias ? w.bias[first + c] : -0.f;
        for (int64_t g = 0; g < e.groups; ++g) {
          const float scale = c < channels ? w.w_scale[(first + c) * e.groups + g] : 1.f;
          w_scale[b * s.vectors + g * kBlockN + c] = e.grouped ? scale : fmul(x_scale, scale);
        }
      }
    }
  });
}

void unpack_linear(const LinearSpec& spec, const void* packed, void* codes) {
  const Sections s = sections_of(spec);
  const auto* base = static_cast<const unsigned char*>(packed) + s.codes;
  const Kernels& in_use = kernels();
  const auto k = static_cast<size_t>(s.extent.padded_k);
  auto& scratch = Scratch::of_this_thread();
  scratch.reset(Scratch::rounded(k * kBlockN) + Scratch::rounded(k));
  auto* wide = scratch.take<int8_t>(k * kBlockN);
  auto* row = scratch.take<int8_t>(k);
  for (int64_t n = 0; n < spec.n; ++n) {
    const unsigned char* block = base + n / kBlockN * s.block_bytes;
    if (spec.w->is_packed()) {
      if (n % kBlockN == 0) in_use.unpack_s4(block, s.extent.padded_k / 8, wide);
      unpack_block_row(wide, s.extent, n % kBlockN, row);
      pack_int4(row, 1, spec.k, static_cast<uint8_t*>(codes) + n * row_bytes(spec));
    } else {
      unpack_block_row(reinterpret_cast<const int8_t*>(block), s.extent, n % kBlockN,
                       static_cast<int8_t*>(codes) + n * spec.k);
    }
  }
}

Layer packed_layer(const LinearSpec& spec, const void* packed) {
  const Sections s = sections_of(spec);
  const auto* base = static_cast<const unsigned char*>(packed);
  const auto& header = *reinterpret_cast<const Header*>(base);
  Layer layer;
  layer.n = spec.n;
  layer.extent = s.extent;
  layer.rows.dynamic = !is_static(spec);
  layer.rows.symmetric = spec.x_symmetric;
  layer.rows.qmin = spec.x_qmin;
  layer.rows.qmax = spec.x_qmax;
  layer.rows.recip = header.x_recip;
  layer.rows.zero_point = &header.x_zero_point;
  if (is_static(spec) && s.extent.grouped) layer.rows.scale = &header.x_scale;
  layer.first.w_scale = reinterpret_cast<const float*>(base + s.w_scale);
  layer.first.w_sum = reinterpret_cast<const int32_t*>(base + s.w_sum);
  layer.first.bias = reinterpret_cast<const float*>(base + s.bias);
  if (spec.w->is_packed())
    layer.first.codes_s4 = base + s.codes;
  else
    layer.first.codes_s8 = reinterpret_cast<const int8_t*>(base + s.codes);
  layer.block_bytes = s.block_bytes;
  layer.tile.activation = spec.activation;
  layer.tile.clamp_min = spec.clamp_min;
  layer.tile.clamp_max = spec.clamp_max;
  layer.tile.ldo = spec.n;
  layer.tile.out_recip = header.out_recip;
  layer.tile.out_zero_point = header.out_zero_point;
  layer.tile.out_qmin = spec.out_qmin;
  layer.tile.out_qmax = spec.out_qmax;
  return layer;
}

namespace {

// Rows [first, first + m) of x, and of what came with their codes.
void take_rows(Layer& layer, const void* x, DType x_type, int64_t first, int64_t m, int64_t ldx, const float* x_scale,
               const int32_t* x_zero_point) {
  layer.m = m;
  layer.rows.x = static_cast<const unsigned char*>(x) + first * ldx * bytes_of(x_type);
  layer.rows.type = x_type;
  layer.rows.ld = ldx;
  if (!x_scale) return;
  layer.rows.scale = x_scale + first;
  layer.rows.zero_point = x_zero_point ? x_zero_point + first : nullptr;
  layer.rows.scale_step = layer.rows.zero_point_step = 1;
}

}  // namespace

void linear(const LinearSpec& spec, const void* packed, const void* x, DType x_type, int64_t m, int64_t ldx,
            const void* residual, DType residual_type, int64_t ldr, void* out, DType out_type, const float* x_scale,
            const int32_t* x_zero_point) {
  Layer layer = packed_layer(spec, packed);
  take_rows(layer, x, x_type, 0, m, ldx, x_scale, x_zero_point);
  layer.tile.residual = residual;
  layer.tile.residual_type = residual_type;
  layer.tile.ldr = ldr;
  layer.tile.out = out;
  layer.tile.out_type = out_type;
  run(layer);
}

namespace {

// Accumulators of up to kMaxRowBlock rows and 64 channels, through the epilogue that ends products elsewhere.
void finish_block(const Layer& layer, const int32_t* acc, int64_t lda, const float* x_scale, int64_t row, int64_t rows,
                  int64_t block) {
  static constexpr float kOne = 1.f;
  static constexpr int32_t kNone = 0;
  alignas(64) static constexpr int32_t kNoSums[kBlockN] = {};
  alignas(64) int32_t sums[kMaxRowBlock * kBlockN];
  const int64_t column = block * kBlockN;
  Tile t = layer.tile;
  t.cols = std::min(kBlockN, layer.n - column);
  if (t.cols < kBlockN) std::memset(sums, 0, sizeof sums);
  for (int64_t r = 0; r < rows; ++r)
    std::memcpy(sums + r * kBlockN, acc + (row + r) * lda + column, static_cast<size_t>(t.cols) * 4);
  t.acc = sums;
  t.rows = rows;
  t.w_sum = kNoSums;  // the accumulators have their zero-point term
  t.x_zero = &kNone;
  t.w_scale = layer.first.w_scale + column;
  t.bias = layer.first.bias + column;
  t.x_scale = x_scale ? x_scale + row : &kOne;
  t.x_scale_step = x_scale ? 1 : 0;
  t.out = static_cast<unsigned char*>(t.out) + (row * t.ldo + column) * bytes_of(t.out_type);
  if (t.residual)
    t.residual = static_cast<const unsigned char*>(t.residual) + (row * t.ldr + column) * bytes_of(t.residual_type);
  kernels().epilogue(t);
}

constexpr int64_t kFinishGrain = 1 << 16;  // results worth a task

}  // namespace

void finish_linear(const LinearSpec& spec, const void* packed, const int32_t* acc, int64_t m, int64_t lda,
                   const float* x_scale, const void* residual, DType residual_type, int64_t ldr, void* out,
                   DType out_type) {
  Layer layer = packed_layer(spec, packed);
  layer.tile.residual = residual;
  layer.tile.residual_type = residual_type;
  layer.tile.ldr = ldr;
  layer.tile.out = out;
  layer.tile.out_type = out_type;
  const int64_t bands = (m + kMaxRowBlock - 1) / kMaxRowBlock, blocks = block_count(layer.n);
  Shares(bands * blocks, m * layer.n, kFinishGrain).run([&](Share share) {
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t row = i / blocks * kMaxRowBlock;
      finish_block(layer, acc, lda, x_scale, row, std::min(kMaxRowBlock, m - row), i % blocks);
    }
  });
}

void gather_rows(const void* x, int64_t stride, int64_t row_bytes, const int64_t* rows, int64_t count, void* out) {
  constexpr int64_t kGrain = 1 << 18;  // bytes whose copy is worth a thread
  Shares(count, count * row_bytes, kGrain).run([&](Share share) {
    for (int64_t i = share.begin; i < share.end; ++i)
      std::memcpy(static_cast<char*>(out) + i * row_bytes, static_cast<const char*>(x) + rows[i] * stride,
                  static_cast<size_t>(row_bytes));
  });
}

void grouped_linear(const LinearSpec& spec, const void* const* packed, const int64_t* rows, int64_t count,
                    const void* x, DType x_type, int64_t ldx, void* out, DType out_type, const float* x_scale,
                    const int32_t* x_zero_point) {
  std::vector<Layer> layers;
  layers.reserve(static_cast<size_t>(count));
  int64_t first = 0;
  for (int64_t i = 0; i < count; first += rows[i++]) {
    if (rows[i] == 0) continue;
    Layer& layer = layers.emplace_back(packed_layer(spec, packed[i]));
    take_rows(layer, x, x_type, first, rows[i], ldx, x_scale, x_zero_point);
    layer.tile.out = static_cast<unsigned char*>(out) + first * spec.n * bytes_of(out_type);
    layer.tile.out_type = out_type;
  }
  run_all(layers.data(), static_cast<int64_t>(layers.size()));
}

}  // namespace pyquant::cpu
