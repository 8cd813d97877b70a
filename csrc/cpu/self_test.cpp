// Every kernel of a table against the scalar one, over the full range of codes: a processor, hypervisor or compiler
// that computes something else is detected before it is used. Seven milliseconds.
#include <cstring>
#include <vector>

#include "core/arith.h"
#include "cpu/kernels.h"
#include "cpu/self_test.h"

namespace pyquant::cpu {
namespace {

constexpr int64_t kQuads = 33;  // two tiles of AMX and one quad more
constexpr int64_t kStride = kQuads * 4 + 64;

bool same(const void* a, const void* b, size_t bytes) { return std::memcmp(a, b, bytes) == 0; }

bool multiplies(const Kernels& candidate, const Kernels& scalar, Random& random) {
  std::vector<uint8_t> a(static_cast<size_t>((kMaxRowBlock + kRowSlack) * kStride)), b(kQuads * kBlockN * 4);
  std::vector<int32_t> want(kMaxRowBlock * kBlockN), got(kMaxRowBlock * kBlockN);
  std::vector<int8_t> wide(2 * b.size()), wide_want(2 * b.size());
  for (int mode = 0; mode < 2; ++mode) {
    // Random codes, then only the two ends of the range, where saturating instructions fail.
    for (auto& v : a) v = mode ? (random.next() & 1 ? 255 : 0) : static_cast<uint8_t>(random.next());
    for (auto& v : b) v = mode ? (random.next() & 1 ? 0x80 : 0x7f) : static_cast<uint8_t>(random.next());
    const auto* w = reinterpret_cast<const int8_t*>(b.data());
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 16, 17, 33, 48, 67, 96}) {
      for (int64_t quads : {int64_t{16}, int64_t{32}, kQuads}) {
        candidate.begin(rows);
        const auto bytes = static_cast<size_t>(rows * kBlockN) * 4;
        for (bool add : {false, true}) {
          scalar.gemm_s8(a.data(), kStride, rows, w, quads, want.data(), add, {});
          candidate.gemm_s8(a.data(), kStride, rows, w, quads, got.data(), add, {add ? w : nullptr});
        }
        candidate.end(rows);
        if (!same(want.data(), got.data(), bytes)) return false;
        if (rows > kDirectRows) continue;
        scalar.gemm_s4(a.data(), kStride, rows, b.data(), quads / 2, want.data());
        candidate.gemm_s4(a.data(), kStride, rows, b.data(), quads / 2, got.data());
        if (!same(want.data(), got.data(), bytes)) return false;
      }
    }
    scalar.unpack_s4(b.data(), kQuads, wide_want.data());
    candidate.unpack_s4(b.data(), kQuads, wide.data());
    if (!same(wide_want.data(), wide.data(), wide.size())) return false;
    if (!candidate.gemm_unpacked_s4) continue;
    for (auto& v : wide) v = static_cast<int8_t>(mode ? (v < 0 ? -8 : 7) : v);
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 17, 33}) {
      for (bool add : {false, true}) {
        scalar.gemm_s8(a.data(), kStride, rows, wide.data(), kQuads, want.data(), add, {});
        candidate.gemm_unpacked_s4(a.data(), kStride, rows, wide.data(), kQuads, got.data(), add, {wide.data()});
      }
      if (!same(want.data(), got.data(), static_cast<size_t>(rows * kBlockN) * 4)) return false;
    }
  }
  return true;
}

constexpr int64_t kRow = 77;  // a tail for every vector width

bool converts(const Kernels& candidate, const Kernels& scalar, Random& random) {
  std::vector<uint32_t> x(kRow), special = {0u, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
                                            1u, 0x3f000000u, 0x40200000u, 0x477ff000u, 0x38800000u};
  for (size_t i = 0; i < x.size(); ++i)
    x[i] = i < special.size() ? special[i] : (random.next() & 0x8fffffffu) | 0x38000000u;
  for (DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (int64_t skip : {0, 10}) {
      const void* from = reinterpret_cast<const unsigned char*>(x.data()) + skip * 4;
      const int64_t n = kRow - skip;
      const RowStats s = scalar.stats(from, type, n, true), t = candidate.stats(from, type, n, true);
      if (!same(&s.amax, &t.amax, 4) || (s.amax < kInfinity && (s.low != t.low || s.high != t.high))) return false;
      std::vector<uint8_t> want(kRow), got(kRow);
      scalar.quantize({from, type, n, 3.7f, 5, -128, 127, false, 0x80, want.data()});
      candidate.quantize({from, type, n, 3.7f, 5, -128, 127, false, 0x80, got.data()});
      if (!same(want.data(), got.data(), kRow)) return false;
      std::vector<float> real_want(kRow), real(kRow);
      for (DType q : {DType::s8, DType::u8}) {
        scalar.dequantize({want.data(), q, n, 0.37f, 5, real_want.data(), type});
        candidate.dequantize({want.data(), q, n, 0.37f, 5, real.data(), type});
        if (!same(real_want.data(), real.data(), kRow * 4)) return false;
      }
      scalar.widen(from, type, n, real_want.data());
      candidate.widen(from, type, n, real.data());
      if (!same(real_want.data(), real.data(), kRow * 4)) return false;
      if (skip == 0) continue;  // what follows has no special values: the bits of NaN are not part of the contract
      const auto* numbers = static_cast<const float*>(from);
      scalar.narrow(numbers, n, real_want.data(), type);
      candidate.narrow(numbers, n, real.data(), type);
      if (!same(real_want.data(), real.data(), kRow * 4)) return false;
      for (int32_t i = 0; i < kActivations; ++i) {
        const GateOperands by{numbers + n / 2, 0, static_cast<Activation>(i), -0.5f, 2.f};
        scalar.activation_mul(numbers, DType::f32, n / 2, by, real_want.data());
        candidate.activation_mul(numbers, DType::f32, n / 2, by, real.data());
        if (!same(real_want.data(), real.data(), kRow * 4)) return false;
      }
    }
  }
  return true;
}

// Two blocks of orders of every base, with and without whole vectors.
bool transforms(const Kernels& candidate, const Kernels& scalar, Random& random) {
  for (const int32_t base : {1, 12, 20, 28}) {
    for (const int32_t log2 : {1, 2, 5, 8, 10}) {
      const Hadamard by{{base, log2}, 0.75f};
      const int64_t count = 2 * size_of(by.order);
      std::vector<float> want(static_cast<size_t>(count));
      for (float& v : want) v = static_cast<float>(static_cast<int32_t>(random.next()));
      std::vector<float> got = want;
      scalar.hadamard(want.data(), count, by);
      candidate.hadamard(got.data(), count, by);
      if (!same(want.data(), got.data(), want.size() * sizeof(float))) return false;
    }
  }
  return true;
}

// One row of two groups, against the two kernels that gemv_s4 replaces. tile: vectors of one block, at least one row.
bool grouped_row(const Kernels& candidate, const Kernels& scalar, Random& random, Tile tile) {
  constexpr int64_t kOcts = 5;
  std::vector<uint8_t> a(2 * kOcts * 8), b(2 * kOcts * kBlockN * 4);
  for (auto* bytes : {&a, &b})
    for (auto& v : *bytes) v = static_cast<uint8_t>(random.next());
  std::vector<int32_t> w_sum(2 * kBlockN), acc(kBlockN);
  std::vector<float> w_scale(2 * kBlockN), want(kBlockN), got(kBlockN);
  for (int64_t i = 0; i < 2 * kBlockN; ++i) {
    w_sum[static_cast<size_t>(i)] = tile.w_sum[i % kBlockN] + static_cast<int32_t>(i);
    w_scale[static_cast<size_t>(i)] = tile.w_scale[(i * 7) % kBlockN];
  }
  tile.rows = 1;
  tile.w_sum = w_sum.data();
  tile.w_scale = w_scale.data();
  candidate.gemv_s4(a.data(), b.data(), kOcts, 2, tile, got.data());
  tile.acc = acc.data();
  for (int64_t g = 0; g < 2; ++g) {
    scalar.gemm_s4(a.data() + g * kOcts * 8, 0, 1, b.data() + g * kOcts * kBlockN * 4, kOcts, acc.data());
    tile.w_sum = w_sum.data() + g * kBlockN;
    tile.w_scale = w_scale.data() + g * kBlockN;
    scalar.accumulate(tile, want.data(), g == 0);
  }
  return same(want.data(), got.data(), want.size() * 4);
}

// Rows of two groups, against the two kernels that groups_s4 replaces.
template <int64_t kOcts>
bool grouped_rows(const Kernels& candidate, const Kernels& scalar, Random& random, Tile tile, const int32_t* zero) {
  constexpr int64_t kGroups = 2, kRows = 19, kGroup = kOcts * 8, kCodes = kGroups * kGroup;
  std::vector<uint8_t> a((kRows + kRowSlack) * kCodes), b(kCodes / 2 * kBlockN);
  for (auto* bytes : {&a, &b})
    for (auto& v : *bytes) v = static_cast<uint8_t>(random.next());
  std::vector<int32_t> w_sum(kGroups * kBlockN), acc(kRows * kBlockN), zeros(kRows), sums(kRows * kGroups);
  std::vector<float> w_scale(kGroups * kBlockN), want(kRows * kBlockN), got(kRows * kBlockN);
  for (size_t i = 0; i < w_sum.size(); ++i) {
    w_sum[i] = tile.w_sum[i % kBlockN] + static_cast<int32_t>(i);
    w_scale[i] = tile.w_scale[i * 7 % kBlockN];
  }
  for (size_t r = 0; r < zeros.size(); ++r) zeros[r] = zero[r % 3];
  tile.x_zero = zeros.data();
  for (int64_t r = 0; r < kRows; ++r) {
    candidate.code_sums(a.data() + r * kCodes, kGroup, kGroups, sums.data() + r * kGroups);
    for (int64_t g = 0; g < kGroups; ++g) {
      int32_t sum = 0;
      for (int64_t i = 0; i < kGroup; ++i) sum += a[static_cast<size_t>(r * kCodes + g * kGroup + i)];
      if (sum != sums[static_cast<size_t>(r * kGroups + g)]) return false;
    }
  }
  for (int64_t rows : {int64_t{5}, int64_t{8}, int64_t{13}, kRows}) {
    tile.rows = rows;
    tile.w_sum = w_sum.data();
    tile.w_scale = w_scale.data();
    candidate.begin(rows);
    candidate.groups_s4(a.data(), kCodes, sums.data(), b.data(), kOcts, kGroups, tile, got.data(), {b.data()});
    candidate.end(rows);
    tile.acc = acc.data();
    for (int64_t g = 0; g < kGroups; ++g) {
      scalar.gemm_s4(a.data() + g * kGroup, kCodes, rows, b.data() + g * kOcts * kBlockN * 4, kOcts, acc.data());
      tile.w_sum = w_sum.data() + g * kBlockN;
      tile.w_scale = w_scale.data() + g * kBlockN;
      scalar.accumulate(tile, want.data(), g == 0);
    }
    if (!same(want.data(), got.data(), static_cast<size_t>(rows * kBlockN) * 4)) return false;
    if (!candidate.linear_s4 || rows < 6) continue;
    std::vector<float> sum(kRows * kBlockN), out(kRows * kBlockN), x_scale(kRows, 0.5f);
    std::vector<int8_t> codes(2 * b.size());
    tile.sum = want.data();
    tile.acc = nullptr;
    tile.residual = nullptr;
    tile.x_scale = x_scale.data();
    tile.cols = kBlockN;
    tile.out_type = DType::f32;
    tile.out = out.data();
    scalar.epilogue(tile);
    tile.w_sum = w_sum.data();
    tile.w_scale = w_scale.data();
    for (bool fill : {true, false}) {  // the second call reads the codes of the first
      tile.out = got.data();
      candidate.begin(rows);
      candidate.linear_s4(a.data(), kCodes, b.data(), codes.data(), fill, kOcts, kGroups, tile, sum.data(), {b.data()});
      candidate.end(rows);
      if (!same(out.data(), got.data(), static_cast<size_t>(rows * kBlockN) * 4)) return false;
    }
  }
  return true;
}

// A product with its epilogue, against the two kernels that linear_s8 replaces. tile: see finishes; acc is not read.
bool linear_rows(const Kernels& candidate, const Kernels& scalar, Random& random, Tile tile) {
  constexpr int64_t kRows = 37;
  std::vector<uint8_t> a((kRows + kRowSlack) * kStride), b(kQuads * kBlockN * 4);
  for (auto* bytes : {&a, &b})
    for (auto& v : *bytes) v = static_cast<uint8_t>(random.next());
  const auto* w = reinterpret_cast<const int8_t*>(b.data());
  std::vector<int32_t> acc(kRows * kBlockN), zeros(kRows), own((kRows + kRowSlack) * kBlockN);
  std::vector<float> x_scale(kRows), want(kRows * kBlockN), got(kRows * kBlockN);
  for (size_t r = 0; r < zeros.size(); ++r) {
    zeros[r] = tile.x_zero[r % 3];
    x_scale[r] = tile.x_scale[r % 3];
  }
  tile.x_zero = zeros.data();
  tile.x_scale = x_scale.data();
  tile.residual = nullptr;
  for (tile.rows = 1; tile.rows <= kRows; tile.rows += tile.rows < 13 ? 1 : 6)
    for (DType out : {DType::f32, DType::bf16, DType::s8})
      for (int64_t cols : {kBlockN, int64_t{37}}) {
        tile.out_type = out;
        tile.cols = cols;
        tile.acc = acc.data();
        tile.out = want.data();
        const int64_t quads = kQuads - tile.rows % 2;  // whole tiles of AMX, and a quad more
        scalar.gemm_s8(a.data(), kStride, tile.rows, w, quads, acc.data(), false, {});
        scalar.epilogue(tile);
        tile.acc = own.data();
        tile.out = got.data();
        candidate.begin(tile.rows);
        candidate.linear_s8(a.data(), kStride, w, quads, tile, own.data(), {w});
        candidate.end(tile.rows);
        if (!same(want.data(), got.data(), want.size() * 4)) return false;
      }
  return true;
}

bool finishes(const Kernels& candidate, const Kernels& scalar, Random& random) {
  constexpr int64_t kRows = 3;
  std::vector<int32_t> acc(kRows * kBlockN), w_sum(kBlockN), zero(kRows);
  std::vector<float> w_scale(kBlockN), bias(kBlockN), x_scale(kRows), residual(kRows * kBlockN), want(kRows * kBlockN),
      got(kRows * kBlockN);
  for (auto& v : acc) v = static_cast<int32_t>(random.next());
  for (auto& v : w_sum) v = static_cast<int32_t>(random.next()) >> 12;
  for (auto& v : zero) v = static_cast<int32_t>(random.next() & 255);
  const auto real = [&] { return static_cast<float>(static_cast<int32_t>(random.next())) * 0x1p-31f; };
  for (auto* values : {&w_scale, &bias, &x_scale, &residual})
    for (auto& v : *values) v = real();
  for (auto& v : w_scale) v *= 0x1p-28f;
  Tile tile;
  tile.acc = acc.data();
  tile.rows = kRows;
  tile.w_sum = w_sum.data();
  tile.w_scale = w_scale.data();
  tile.bias = bias.data();
  tile.x_scale = x_scale.data();
  tile.x_scale_step = 1;
  tile.x_zero = zero.data();
  tile.residual = residual.data();
  tile.ldr = tile.ldo = kBlockN;
  tile.clamp_min = -0.5f;
  tile.clamp_max = 0.25f;
  tile.out_recip = 50.f;
  for (int64_t step : {0, 1}) {
    tile.x_zero_step = step;
    for (bool first : {true, false}) {
      scalar.accumulate(tile, want.data(), first);
      candidate.accumulate(tile, got.data(), first);
    }
    if (!same(want.data(), got.data(), want.size() * 4)) return false;
    // A tile of codes, and a vector of them and a rest.
    if (candidate.groups_s4 && !grouped_rows<8>(candidate, scalar, random, tile, zero.data())) return false;
    if (candidate.groups_s4 && !grouped_rows<9>(candidate, scalar, random, tile, zero.data())) return false;
    if (candidate.linear_s8 && !linear_rows(candidate, scalar, random, tile)) return false;
    if (candidate.gemv_s4 && !grouped_row(candidate, scalar, random, tile)) return false;
    for (int activation = 0; activation < kActivations; ++activation)
      for (DType out : {DType::f32, DType::f16, DType::bf16, DType::s8, DType::s32})
        for (int64_t cols : {kBlockN, int64_t{37}}) {
          tile.activation = static_cast<Activation>(activation);
          tile.out_type = out;
          tile.cols = cols;
          tile.out = want.data();
          scalar.epilogue(tile);
          tile.out = got.data();
          candidate.epilogue(tile);
          if (!same(want.data(), got.data(), want.size() * 4)) return false;
        }
  }
  return true;
}

// linear_taps, against the two kernels that it replaces; the rows of 64 sums of whole fours of pixels.
bool finishes_taps(const Kernels& candidate, const Kernels& scalar, Random& random, TapRun run) {
  const auto size = static_cast<size_t>(run.pixels * kBlockN);
  std::vector<int32_t> acc(size), own(size), w_sum(kBlockN);
  std::vector<float> w_scale(kBlockN, 0x1p-7f), bias(kBlockN), want(size), got(size);
  for (auto& v : w_sum) v = static_cast<int32_t>(random.next() & 0xffff);
  for (auto& v : bias) v = static_cast<float>(random.next() & 255);
  const int32_t zero = 117;
  const float x_scale = 0.3f;
  Tile tile;
  tile.rows = (run.ld == kBlockN ? run.pixels : run.pixels / 4 * 4) * run.ld / kBlockN;
  tile.w_sum = w_sum.data();
  tile.w_scale = w_scale.data();
  tile.bias = bias.data();
  tile.x_zero = &zero;
  tile.x_scale = &x_scale;
  tile.ldo = kBlockN;
  for (DType out : {DType::f32, DType::bf16, DType::s8})
    for (int64_t cols : {kBlockN, int64_t{37}}) {
      tile.out_type = out;
      tile.cols = cols;
      tile.acc = run.acc = acc.data();
      tile.out = want.data();
      scalar.taps(run);
      scalar.epilogue(tile);
      tile.acc = run.acc = own.data();
      tile.out = got.data();
      candidate.linear_taps(run, tile);
      if (!same(want.data(), got.data(), want.size() * 4)) return false;
    }
  return true;
}

// Convolutions in groups: lines woven together, then every way to find dwords, for few channels side by side and
// for 64.
bool convolves(const Kernels& candidate, const Kernels& scalar, Random& random) {
  constexpr int64_t kPixels = 7, kTaps = 5, kPixel = kBlockN * 4;
  std::vector<uint8_t> image(4 * kPixels * kBlockN), want(kPixels * kPixel), got(want.size());
  std::vector<uint8_t> strip((kPixels + kTaps) * kPixel + 4 * kPixel), w(kTaps * kPixel);
  std::vector<int32_t> acc_want(kPixels * kBlockN), acc(acc_want.size()), dwords(kBlockN);
  for (auto* bytes : {&image, &strip, &w})
    for (auto& v : *bytes) v = random.next() & 3 ? static_cast<uint8_t>(random.next()) : random.next() & 1 ? 255 : 128;
  for (int64_t channels : {16, 48, 64})
    for (int64_t count = 1; count <= 4; ++count) {
      Interleave run;
      for (int64_t i = 0; i < count; ++i) {
        run.lines[i] = image.data() + i * kPixels * kBlockN;
        run.strides[i] = i == 1 ? 0 : kBlockN;
      }
      run.count = count;
      run.pixels = kPixels;
      run.channels = channels;
      run.step = kPixel;
      run.to = want.data();
      scalar.interleave(run);
      run.to = got.data();
      candidate.interleave(run);
      if (!same(want.data(), got.data(), want.size())) return false;
    }
  const int64_t offsets[kTaps] = {0, kPixel, 8, 2 * kPixel, kPixel + 12};
  TapRun run;
  run.codes = strip.data();
  run.step = kPixel;
  run.pixels = kPixels;
  run.offsets = offsets;
  run.taps = kTaps;
  run.dwords = dwords.data();
  run.weights = reinterpret_cast<const int8_t*>(w.data());
  for (Spread spread : {Spread::side_by_side, Spread::one, Spread::near, Spread::far})
    for (int64_t channels : {16, 32, 48, 64}) {
      const int64_t each = spread == Spread::one ? candidate.lanes : spread == Spread::near ? 3 : 1;
      for (int64_t n = 0; n < kBlockN; ++n)
        dwords[static_cast<size_t>(n)] = static_cast<int32_t>(spread == Spread::far ? n * 3 : n / each);
      run.spread = spread;
      run.channels = channels;
      run.ld = channels == 48 ? kBlockN : channels;
      run.acc = acc_want.data();
      scalar.taps(run);
      run.acc = acc.data();
      candidate.taps(run);
      if (!same(acc_want.data(), acc.data(), acc.size() * 4)) return false;
      if (candidate.linear_taps && !finishes_taps(candidate, scalar, random, run)) return false;
    }
  return true;
}

// Three runs under scales of their own, special values and a tail among them.
bool fake_quantizes(const Kernels& candidate, const Kernels& scalar, Random& random) {
  constexpr int64_t kCount = 3 * kRow;
  const std::vector<float> scale = {0.01f, 0.5f, 3.f};
  const std::vector<int32_t> zero_point = {0, -128, 17};
  std::vector<uint32_t> x(kCount), grad(kCount);
  for (auto& v : x) v = (random.next() & 0x8fff8fffu) | 0x38003800u;
  for (auto& v : grad) v = (random.next() & 0x83ff83ffu) | 0x3c003c00u;  // numbers in every type
  for (size_t i = 0; i < 4; ++i) x[40 + i] = std::vector<uint32_t>{0x7fc00000u, 0x7f800000u, 0xff800000u, 1u}[i];
  for (DType type : {DType::f32, DType::f16, DType::bf16}) {
    struct Result {
      std::vector<float> y, kept, grad_x, dynamic, own, sums;
      std::vector<uint8_t> mask;
      std::vector<int32_t> zero;
    } results[2];
    for (int which = 0; which < 2; ++which) {
      const Kernels& k = which ? candidate : scalar;
      Result& r = results[which];
      for (auto* v : {&r.y, &r.kept, &r.grad_x, &r.dynamic}) v->assign(kCount, 0.f);
      r.mask.assign(kCount / 8 + 1, 0);
      r.own.assign(3, 0.f);
      r.sums.assign(3, 0.f);
      r.zero.assign(3, 0);
      k.fake_quantize({x.data(), type, kCount, kCount, 0, kCount, kRow, scale.data(), zero_point.data(), -128, 127,
                       r.y.data(), r.mask.data()});
      const int64_t bytes = bytes_of(type);
      k.fake_quantize_keep(grad.data(), r.mask.data(), bytes, 0, kCount, r.kept.data());
      k.fake_quantize_learned({x.data(), grad.data(), type, 0, 3, kRow, scale.data(), zero_point.data(), -128, 127,
                               r.grad_x.data(), r.sums.data()});
      k.fake_quantize_dynamic(
          {grad.data(), type, kRow, 0, 3, kRow, 1, false, -128, 127, r.dynamic.data(), r.own.data(), r.zero.data()});
    }
    const Result &a = results[0], &b = results[1];
    if (a.mask != b.mask || a.zero != b.zero) return false;
    for (auto part : {&Result::y, &Result::kept, &Result::grad_x, &Result::dynamic, &Result::own, &Result::sums})
      if (!same((a.*part).data(), (b.*part).data(), (a.*part).size() * 4)) return false;
  }
  return true;
}

}  // namespace

bool self_test(const Kernels& candidate) {
  const Kernels& scalar = kernels_scalar();
  Random random;
  return multiplies(candidate, scalar, random) && converts(candidate, scalar, random) &&
         transforms(candidate, scalar, random) && finishes(candidate, scalar, random) &&
         convolves(candidate, scalar, random) && fake_quantizes(candidate, scalar, random) &&
         multiplies_pairs(candidate, random);
}

}  // namespace pyquant::cpu
