// Fake-quantise kernels over a vector type V (isa_*.cpp), one visit of every element. docs/numerics.md 10.
#pragma once
#include <cstdint>
#include <cstring>

#include "core/epilogue_math.h"
#include "cpu/kernels.h"
#include "cpu/row_codes.h"

namespace pyquant::cpu {

// What every element of a run is compared and multiplied with. rint(v) is in [low, high] exactly if v is between
// the outermost floats that still round to them (ties go to even limits), so one clamp of v serves mask and code.
struct FakeRange {
  float recip, scale, low, high;
};

static inline FakeRange fake_range(float scale, int32_t zero_point, int32_t qmin, int32_t qmax) {
  const int32_t low = qmin - zero_point, high = qmax - zero_point;
  float from = fsub(static_cast<float>(low), 0.5f), to = fadd(static_cast<float>(high), 0.5f);
  if (low & 1) from = float_from_bits(bits_from_float(from) + (from < 0.f ? ~0u : 1u));
  if (high & 1) to = float_from_bits(bits_from_float(to) + (to < 0.f ? 1u : ~0u));
  return {scale_recip(scale), scale, from, to};
}

template <class V>
struct FakeRows {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr int64_t W = V::W;
  static constexpr int64_t S = 64;  // elements of one step: a word of the mask
  static constexpr int64_t N = S / W;
  static constexpr uint64_t kAll = ~uint64_t{0};

  template <DType T>
  static constexpr int64_t kBytes = T == DType::f32 ? 4 : 2;

  template <DType T>
  static F load(const void* p) {
    if constexpr (T == DType::f32)
      return V::load_f32(static_cast<const float*>(p));
    else if constexpr (T == DType::f16)
      return V::load_f16(static_cast<const uint16_t*>(p));
    else
      return V::load_bf16(static_cast<const uint16_t*>(p));
  }

  template <DType T>
  static void store(void* p, F v) {
    if constexpr (T == DType::f32)
      V::store_f32(static_cast<float*>(p), v);
    else if constexpr (T == DType::f16)
      V::store_f16(static_cast<uint16_t*>(p), v);
    else
      V::store_bf16(static_cast<uint16_t*>(p), v);
  }

  // The mask as a stream of bits: runs may begin and end inside of a byte. Starts at a multiple of 64 elements.
  struct Bits {
    uint8_t* to;
    uint64_t word = 0;
    int fill = 0;

    void put(uint64_t bits, int count) {  // count in [1, 64]; bits beyond it are 0
      word |= bits << fill;
      fill += count;
      if (fill < 64) return;
      std::memcpy(to, &word, 8);
      to += 8;
      fill -= 64;
      word = fill ? bits >> (count - fill) : 0;
    }
    void finish() { std::memcpy(to, &word, static_cast<size_t>((fill + 7) / 8)); }
  };

  struct NoBits {
    void put(uint64_t, int) {}
    void finish() {}
  };

  struct Constants {
    F recip, scale, low, high;
    explicit Constants(const FakeRange& r)
        : recip(V::set(r.recip)), scale(V::set(r.scale)), low(V::set(r.low)), high(V::set(r.high)) {}
  };

  // One vector from x to y; returns the bits of what is inside.
  template <DType T, bool kStream = false>
  static uint64_t vector(const unsigned char* x, unsigned char* y, const Constants& c) {
    const F v = V::mul(load<T>(x), c.recip);
    const F limited = V::min(c.high, V::max(c.low, v));
    const F real = V::mul(V::to_float(V::to_int_nan_zero(limited)), c.scale);
    if constexpr (kStream)
      V::stream_f32(reinterpret_cast<float*>(y), real);
    else
      store<T>(y, real);
    return V::equal_bits(v, limited);
  }

  // n neighbours under one scale.
  template <DType T, class Mask>
  static void run(const unsigned char* x, unsigned char* y, int64_t n, const FakeRange& range, Mask& bits,
                  bool stream) {
    constexpr int64_t B = kBytes<T>;
    const Constants c(range);
    int64_t i = 0;
    if (T == DType::f32 && stream) {
      for (; i + S <= n; i += S) {
        uint64_t word = 0;
        for (int64_t j = 0; j < N; ++j) word |= vector<T, true>(x + (i + j * W) * B, y + (i + j * W) * B, c) << (j * W);
        bits.put(word, 64);
      }
      V::fence();
    }
    for (; i + S <= n; i += S) {
      uint64_t word = 0;
      for (int64_t j = 0; j < N; ++j) word |= vector<T>(x + (i + j * W) * B, y + (i + j * W) * B, c) << (j * W);
      bits.put(word, 64);
    }
    for (; i + W <= n; i += W) bits.put(vector<T>(x + i * B, y + i * B, c), W);
    if (i == n) return;
    alignas(64) unsigned char from[W * B] = {}, to[W * B];
    std::memcpy(from, x + i * B, static_cast<size_t>((n - i) * B));
    const uint64_t word = vector<T>(from, to, c);
    std::memcpy(y + i * B, to, static_cast<size_t>((n - i) * B));
    bits.put(word & ((uint64_t{1} << (n - i)) - 1), static_cast<int>(n - i));
  }

  template <DType T, class Mask>
  static void runs(const FakeRun& r, Mask bits) {
    constexpr int64_t B = kBytes<T>;
    int64_t s = r.begin / r.length, run_end = (s + 1) * r.length;
    int64_t row = r.begin / r.cols, row_end = (row + 1) * r.cols;
    const auto* x = static_cast<const unsigned char*>(r.x) + (row * (r.ld - r.cols) + r.begin) * B;
    auto* y = static_cast<unsigned char*>(r.y) + r.begin * B;
    FakeRange range = fake_range(r.scale[s], r.zero_point ? r.zero_point[s] : 0, r.qmin, r.qmax);
    for (int64_t i = r.begin; i < r.end;) {
      int64_t stop = run_end < row_end ? run_end : row_end;
      if (r.end < stop) stop = r.end;
      run<T>(x, y, stop - i, range, bits, r.stream);
      x += (stop - i) * B;
      y += (stop - i) * B;
      i = stop;
      if (i == r.end) break;
      if (i == row_end) {
        x += (r.ld - r.cols) * B;
        row_end += r.cols;
      }
      if (i == run_end) {
        run_end += r.length;
        ++s;
        range = fake_range(r.scale[s], r.zero_point ? r.zero_point[s] : 0, r.qmin, r.qmax);
      }
    }
    bits.finish();
  }

  template <DType T>
  static void given_as(const FakeRun& r) {
    if (r.mask)
      runs<T>(r, Bits{r.mask + r.begin / 8});
    else
      runs<T>(r, NoBits{});
  }

  static void given(const FakeRun& r) {
    switch (r.type) {
      case DType::f16: return given_as<DType::f16>(r);
      case DType::bf16: return given_as<DType::bf16>(r);
      default: return given_as<DType::f32>(r);
    }
  }

  // ---- scales from the data

  template <DType T, bool kRange>
  static RowStats stats(const unsigned char* x, int64_t n) {
    constexpr int64_t B = kBytes<T>;
    constexpr int kSets = 4;
    I top[kSets];
    F low[kSets], high[kSets];
    for (int j = 0; j < kSets; ++j) {
      top[j] = V::set_i(0);
      low[j] = high[j] = V::set(0.f);
    }
    // The bit pattern of |x| orders like its value, with infinity above every number and NaN above infinity.
    const auto take = [&](const unsigned char* p, int j) {
      const F v = load<T>(p);
      top[j] = V::max_i(top[j], V::magnitude_bits(v));
      if constexpr (kRange) {
        low[j] = V::min(v, low[j]);
        high[j] = V::max(v, high[j]);
      }
    };
    int64_t i = 0;
    for (; i + kSets * W <= n; i += kSets * W)
      for (int j = 0; j < kSets; ++j) take(x + (i + j * W) * B, j);
    for (; i + W <= n; i += W) take(x + i * B, 0);
    if (i < n) {
      alignas(64) unsigned char from[W * B] = {};
      std::memcpy(from, x + i * B, static_cast<size_t>((n - i) * B));
      take(from, 0);
    }
    for (int j = 1; j < kSets; ++j) {
      top[0] = V::max_i(top[0], top[j]);
      low[0] = V::min(low[0], low[j]);
      high[0] = V::max(high[0], high[j]);
    }
    const int32_t amax = V::reduce_max_i(top[0]);
    if (amax >= 0x7f800000) return {kInfinity, kNaN, kNaN};
    if constexpr (!kRange) return {float_from_bits(static_cast<uint32_t>(amax)), 0.f, 0.f};
    return {float_from_bits(static_cast<uint32_t>(amax)), V::reduce_min(low[0]), V::reduce_max(high[0])};
  }

  template <DType T>
  static void dynamic_as(const FakeDynamicRun& r) {
    constexpr int64_t B = kBytes<T>;
    for (int64_t s = r.begin; s < r.end; ++s) {
      const auto* x = static_cast<const unsigned char*>(r.x) + (s / r.per_row * r.ld + s % r.per_row * r.length) * B;
      auto* y = static_cast<unsigned char*>(r.y) + s * r.length * B;
      const RowParams p = params_of(r.symmetric ? stats<T, false>(x, r.length) : stats<T, true>(x, r.length),
                                    r.symmetric, r.qmin, r.qmax);
      r.scale[s] = p.scale;
      r.zero_point[s] = p.zero_point;
      NoBits bits;
      // a scale of NaN makes NaN
      run<T>(x, y, r.length, fake_range(p.scale, p.zero_point, r.qmin, r.qmax), bits, r.stream);
    }
  }

  static void dynamic(const FakeDynamicRun& r) {
    switch (r.type) {
      case DType::f16: return dynamic_as<DType::f16>(r);
      case DType::bf16: return dynamic_as<DType::bf16>(r);
      default: return dynamic_as<DType::f32>(r);
    }
  }

  // ---- gradients

  // Elements [begin, end) of a gradient of 2 or 4 bytes each; begin is a multiple of 64. out may be grad: then only
  // words of the mask that clip something cause a write.
  static void keep(const void* grad, const uint8_t* mask, int64_t bytes, int64_t begin, int64_t end, void* out) {
    const bool in_place = grad == out;
    const auto* from = static_cast<const unsigned char*>(grad);
    auto* to = static_cast<unsigned char*>(out);
    int64_t i = begin;
    for (; i + S <= end; i += S) {
      uint64_t word;
      std::memcpy(&word, mask + i / 8, 8);
      if (in_place && word == kAll) continue;
      if (bytes == 4)
        V::keep32(to + i * 4, from + i * 4, word);
      else
        V::keep16(to + i * 2, from + i * 2, word);
    }
    if (i == end) return;
    uint64_t word = 0;
    std::memcpy(&word, mask + i / 8, static_cast<size_t>((end - i + 7) / 8));
    alignas(64) unsigned char copy[S * 4] = {};
    const auto rest = static_cast<size_t>((end - i) * bytes);
    std::memcpy(copy, from + i * bytes, rest);
    if (bytes == 4)
      V::keep32(copy, copy, word);
    else
      V::keep16(copy, copy, word);
    std::memcpy(to + i * bytes, copy, rest);
  }

  template <DType T>
  static void learned_as(const FakeLearnedRun& r) {
    constexpr int64_t B = kBytes<T>;
    const int64_t per_run = (r.length + kFakeBlock - 1) / kFakeBlock;
    int64_t s = r.begin / per_run, k = r.begin % per_run;
    for (int64_t b = r.begin; b < r.end; ++b) {
      const FakeRange range = fake_range(r.scale[s], r.zero_point ? r.zero_point[s] : 0, r.qmin, r.qmax);
      const int64_t first = s * r.length + k * kFakeBlock, left = r.length - k * kFakeBlock;
      r.sums[b] = block<T>(
          static_cast<const unsigned char*>(r.x) + first * B, static_cast<const unsigned char*>(r.grad) + first * B,
          static_cast<unsigned char*>(r.grad_x) + first * B, left < kFakeBlock ? left : kFakeBlock, Constants(range));
      if (++k == per_run) {
        k = 0;
        ++s;
      }
    }
  }

  template <DType T>
  static float block(const unsigned char* x, const unsigned char* grad, unsigned char* grad_x, int64_t n,
                     const Constants& c) {
    constexpr int64_t B = kBytes<T>;
    F lanes[N];
    for (int64_t j = 0; j < N; ++j) lanes[j] = V::set(0.f);
    const auto step = [&](const unsigned char* from, const unsigned char* g_from, unsigned char* to) {
      uint64_t word = 0;
      for (int64_t j = 0; j < N; ++j) {
        const F v = V::mul(load<T>(from + j * W * B), c.recip);
        const F g = load<T>(g_from + j * W * B);
        const F limited = V::min(c.high, V::max(c.low, v));
        const F code = V::to_float(V::to_int_nan_zero(limited));
        const uint64_t bits = V::equal_bits(v, limited);
        lanes[j] = V::add(lanes[j], V::mul(g, V::sub_where(code, v, bits)));
        word |= bits << (j * W);
      }
      if constexpr (B == 4)
        V::keep32(to, g_from, word);
      else
        V::keep16(to, g_from, word);
    };
    int64_t i = 0;
    for (; i + S <= n; i += S) step(x + i * B, grad + i * B, grad_x + i * B);
    if (i < n) {
      const auto rest = static_cast<size_t>((n - i) * B);
      alignas(64) unsigned char from[S * B] = {}, g_from[S * B] = {}, to[S * B];
      std::memcpy(from, x + i * B, rest);
      std::memcpy(g_from, grad + i * B, rest);
      step(from, g_from, to);
      std::memcpy(grad_x + i * B, to, rest);
    }
    alignas(64) float s[S];
    for (int64_t j = 0; j < N; ++j) V::store_f32(s + j * W, lanes[j]);
    for (int64_t count = S; count > 1; count /= 2)
      for (int64_t j = 0; j < count / 2; ++j) s[j] = fadd(s[2 * j], s[2 * j + 1]);
    return s[0];
  }

  static void learned(const FakeLearnedRun& r) {
    switch (r.type) {
      case DType::f16: return learned_as<DType::f16>(r);
      case DType::bf16: return learned_as<DType::bf16>(r);
      default: return learned_as<DType::f32>(r);
    }
  }
};

}  // namespace pyquant::cpu
