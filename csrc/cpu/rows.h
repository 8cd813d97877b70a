// Row kernels over a vector type V (isa_*.cpp): statistics, quantise, dequantise, epilogue. V lives in an anonymous
// namespace, so every instantiation is private to its file and its instruction set.
#pragma once
#include <cstdint>
#include <cstring>

#include "core/epilogue_math.h"
#include "cpu/kernels.h"

namespace pyquant::cpu {

template <class V>
struct Rows {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr int64_t W = V::W;
  static constexpr int64_t S = 4 * W;  // elements of one step

  static int64_t bytes_of(DType t) {
    return t == DType::f32 || t == DType::s32 ? 4 : t == DType::f16 || t == DType::bf16 ? 2 : 1;
  }

  template <DType T>
  static F load(const void* p, int64_t i) {
    if constexpr (T == DType::f32)
      return V::load_f32(static_cast<const float*>(p) + i);
    else if constexpr (T == DType::f16)
      return V::load_f16(static_cast<const uint16_t*>(p) + i);
    else
      return V::load_bf16(static_cast<const uint16_t*>(p) + i);
  }

  static void load4(const void* p, DType t, int64_t i, F* v) {
    switch (t) {
      case DType::f16:
        for (int j = 0; j < 4; ++j) v[j] = load<DType::f16>(p, i + j * W);
        break;
      case DType::bf16:
        for (int j = 0; j < 4; ++j) v[j] = load<DType::bf16>(p, i + j * W);
        break;
      default:
        for (int j = 0; j < 4; ++j) v[j] = load<DType::f32>(p, i + j * W);
    }
  }

  static void store4(void* p, DType t, int64_t i, const F* v) {
    switch (t) {
      case DType::f16:
        for (int j = 0; j < 4; ++j) V::store_f16(static_cast<uint16_t*>(p) + i + j * W, v[j]);
        break;
      case DType::bf16:
        for (int j = 0; j < 4; ++j) V::store_bf16(static_cast<uint16_t*>(p) + i + j * W, v[j]);
        break;
      default:
        for (int j = 0; j < 4; ++j) V::store_f32(static_cast<float*>(p) + i + j * W, v[j]);
    }
  }

  // Runs step(source, target, i) over whole steps in place and over the rest in zero-filled copies.
  template <class Step>
  static void in_steps(const void* source, int64_t source_bytes, void* target, int64_t target_bytes, int64_t n,
                       Step step) {
    int64_t i = 0;
    for (; i + S <= n; i += S) step(source, target, i);
    if (i == n) return;
    alignas(64) unsigned char from[S * 4] = {}, to[S * 4];
    std::memcpy(from, static_cast<const unsigned char*>(source) + i * source_bytes,
                static_cast<size_t>((n - i) * source_bytes));
    step(from, to, 0);
    if (target)
      std::memcpy(static_cast<unsigned char*>(target) + i * target_bytes, to,
                  static_cast<size_t>((n - i) * target_bytes));
  }

  template <DType T, bool kRange>
  static RowStats stats_of(const void* x, int64_t n) {
    I bits[4];
    F low[4], high[4];
    for (int j = 0; j < 4; ++j) {
      bits[j] = V::set_i(0);
      low[j] = high[j] = V::set(0.f);
    }
    // The bit pattern of |x| orders like its value, with infinity above every number and NaN above infinity.
    in_steps(x, bytes_of(T), nullptr, 0, n, [&](const void* p, void*, int64_t i) {
      for (int j = 0; j < 4; ++j) {
        const F v = load<T>(p, i + j * W);
        bits[j] = V::max_i(bits[j], V::magnitude_bits(v));
        if constexpr (kRange) {
          low[j] = V::min(v, low[j]);
          high[j] = V::max(v, high[j]);
        }
      }
    });
    for (int j = 1; j < 4; ++j) {
      bits[0] = V::max_i(bits[0], bits[j]);
      low[0] = V::min(low[0], low[j]);
      high[0] = V::max(high[0], high[j]);
    }
    const int32_t top = V::reduce_max_i(bits[0]);
    if (top >= 0x7f800000) return {kInfinity, kNaN, kNaN};
    return {float_from_bits(static_cast<uint32_t>(top)), V::reduce_min(low[0]), V::reduce_max(high[0])};
  }

  template <DType T>
  static RowStats stats_by_range(const void* x, int64_t n, bool range) {
    return range ? stats_of<T, true>(x, n) : stats_of<T, false>(x, n);
  }

  static RowStats stats(const void* x, DType type, int64_t n, bool range) {
    switch (type) {
      case DType::f16: return stats_by_range<DType::f16>(x, n, range);
      case DType::bf16: return stats_by_range<DType::bf16>(x, n, range);
      default: return stats_by_range<DType::f32>(x, n, range);
    }
  }

  // rint then clamp equals clamp then rint, because the limits are integers: code_from_real of epilogue_math.h.
  static I code(F t, F recip, F low, F high, I zero_point) {
    F v = V::mul(t, recip);
    v = V::max(low, v);
    v = V::min(high, v);
    return V::add_i(V::to_int_nan_zero(v), zero_point);
  }

  template <DType T, bool kFinite>
  static void quantize_as(const QuantizeRun& given) {
    const QuantizeRun r = given;  // what is written are bytes, which may be anything
    const F recip = V::set(r.recip);
    const F low = V::set(static_cast<float>(r.qmin - r.zero_point)),
            high = V::set(static_cast<float>(r.qmax - r.zero_point));
    const I zero_point = V::set_i(r.zero_point);
    in_steps(r.x, bytes_of(T), r.out, 1, r.n, [&](const void* p, void* o, int64_t i) {
      I q[4];
      for (int j = 0; j < 4; ++j) {
        const F x = load<T>(p, i + j * W);
        if constexpr (kFinite)
          q[j] = V::add_i(V::to_int(V::mul(x, recip)), zero_point);
        else
          q[j] = code(x, recip, low, high, zero_point);
      }
      V::store_bytes(static_cast<uint8_t*>(o) + i, q, r.qmin, r.qmax, r.flip);
    });
  }

  template <DType T>
  static void quantize_by_range(const QuantizeRun& r) {
    if (r.finite)
      quantize_as<T, true>(r);
    else
      quantize_as<T, false>(r);
  }

  static void quantize(const QuantizeRun& r) {
    switch (r.type) {
      case DType::f16: return quantize_by_range<DType::f16>(r);
      case DType::bf16: return quantize_by_range<DType::bf16>(r);
      default: return quantize_by_range<DType::f32>(r);
    }
  }

  static void dequantize(const DequantizeRun& r) {
    const F scale = V::set(r.scale);
    const I zero_point = V::set_i(r.zero_point);
    in_steps(r.q, 1, r.out, bytes_of(r.out_type), r.n, [&](const void* p, void* o, int64_t i) {
      F v[4];
      for (int j = 0; j < 4; ++j) {
        const I q = r.q_type == DType::u8 ? V::load_u8(static_cast<const uint8_t*>(p) + i + j * W)
                                          : V::load_s8(static_cast<const int8_t*>(p) + i + j * W);
        v[j] = V::mul(V::to_float(V::sub_i(q, zero_point)), scale);
      }
      store4(o, r.out_type, i, v);
    });
  }

  static void widen(const void* x, DType type, int64_t n, float* out) {
    in_steps(x, bytes_of(type), out, 4, n, [&](const void* p, void* o, int64_t i) {
      F v[4];
      load4(p, type, i, v);
      store4(o, DType::f32, i, v);
    });
  }

  static void narrow(const float* x, int64_t n, void* out, DType type) {
    in_steps(x, 4, out, bytes_of(type), n, [&](const void* p, void* o, int64_t i) {
      F v[4];
      load4(p, DType::f32, i, v);
      store4(o, type, i, v);
    });
  }

  static void activation_mul(const void* gate, DType type, int64_t n, const GateOperands& by, float* out) {
    in_steps(gate, bytes_of(type), out, 4, n, [&](const void* p, void* o, int64_t i) {
      F v[4];
      load4(p, type, i, v);
      activate4(by, v);
      store4(o, DType::f32, i, v);
    });
    alignas(64) float ups[S];
    for (int64_t i = 0; i < n; i += S) {
      const int64_t count = n - i < S ? n - i : S;
      widen(static_cast<const unsigned char*>(by.up) + i * bytes_of(type), type, count, ups);
      for (int64_t j = 0; j < count; ++j) out[i + j] = fmul(out[i + j], ups[j]);
    }
  }

  static void accumulate(const Tile& t, float* sum, bool first) {
    alignas(64) int32_t shared[kBlockN];
    zero_terms(t, shared);
    for (int64_t r = 0; r < t.rows; ++r) {
      const I zero = V::set_i(t.x_zero[r * t.x_zero_step]);
      for (int64_t c = 0; c < kBlockN; c += W) {
        const I term = t.x_zero_step ? V::mul_i(zero, V::load_i(t.w_sum + c)) : V::load_i(shared + c);
        const F value = V::to_float(V::sub_i(V::load_i(t.acc + r * kBlockN + c), term));
        float* s = sum + r * kBlockN + c;
        V::store_f32(s, V::add(first ? V::set(0.f) : V::load_f32(s), V::mul(value, V::load_f32(t.w_scale + c))));
      }
    }
  }

  // x_zero * w_sum for all rows at once, where they share one zero point.
  static void zero_terms(const Tile& t, int32_t* shared) {
    if (t.x_zero_step || !t.acc) return;
    const I zero = V::set_i(t.x_zero[0]);
    for (int64_t c = 0; c < kBlockN; c += W) V::store_i(shared + c, V::mul_i(zero, V::load_i(t.w_sum + c)));
  }

  template <class Function>
  static void each(F* t, Function function) {
    alignas(64) float buffer[S];
    for (int j = 0; j < 4; ++j) V::store_f32(buffer + j * W, t[j]);
    for (int64_t i = 0; i < S; ++i) buffer[i] = function(buffer[i]);
    for (int j = 0; j < 4; ++j) t[j] = V::load_f32(buffer + j * W);
  }

  template <class A>
  static void activate_as(F* t, float low, float high) {
    if constexpr (A::kHasVectors)
      for (int j = 0; j < 4; ++j) t[j] = A::template vectors<V>(t[j], low, high);
    else
      each(t, [=](float v) { return A::of(v, low, high); });
  }

  // of: has an activation and its limits
  template <class Of>
  static void activate4(const Of& of, F* t) {
    switch (of.activation) {
#define PYQUANT_ACTIVATION(NAME) \
  case Activation::NAME: return activate_as<activations::NAME>(t, of.clamp_min, of.clamp_max);
      PYQUANT_ACTIVATIONS(PYQUANT_ACTIVATION)
#undef PYQUANT_ACTIVATION
    }
  }

  // kBlockN columns of one row; sum (without acc), residual and out point at the row, and hold kBlockN elements.
  static void row(const Tile& tile, int64_t r, const int32_t* shared, const float* sum, const void* residual,
                  void* out) {
    const F x_scale = V::set(tile.x_scale[r * tile.x_scale_step]);
    const I zero = V::set_i(tile.acc ? tile.x_zero[r * tile.x_zero_step] : 0);
    for (int64_t c = 0; c < kBlockN; c += S) {
      F t[4];
      if (tile.acc) {
        I a[4];
        for (int j = 0; j < 4; ++j) {
          const int64_t at = c + j * W;
          const I term = tile.x_zero_step ? V::mul_i(zero, V::load_i(tile.w_sum + at)) : V::load_i(shared + at);
          a[j] = V::sub_i(V::load_i(tile.acc + r * kBlockN + at), term);
        }
        if (tile.out_type == DType::s32) {
          for (int j = 0; j < 4; ++j) V::store_i(static_cast<int32_t*>(out) + c + j * W, a[j]);
          continue;
        }
        for (int j = 0; j < 4; ++j) t[j] = V::mul(V::to_float(a[j]), V::load_f32(tile.w_scale + c + j * W));
      } else {
        for (int j = 0; j < 4; ++j) t[j] = V::load_f32(sum + c + j * W);
      }
      for (int j = 0; j < 4; ++j) t[j] = V::add(V::mul(t[j], x_scale), V::load_f32(tile.bias + c + j * W));
      activate4(tile, t);
      if (residual) {
        F v[4];
        load4(residual, tile.residual_type, c, v);
        for (int j = 0; j < 4; ++j) t[j] = V::add(t[j], v[j]);
      }
      if (tile.out_type != DType::s8) {
        store4(out, tile.out_type, c, t);
        continue;
      }
      const F low = V::set(static_cast<float>(tile.out_qmin - tile.out_zero_point));
      const F high = V::set(static_cast<float>(tile.out_qmax - tile.out_zero_point));
      I q[4];
      for (int j = 0; j < 4; ++j) q[j] = code(t[j], V::set(tile.out_recip), low, high, V::set_i(tile.out_zero_point));
      V::store_bytes(static_cast<uint8_t*>(out) + c, q, tile.out_qmin, tile.out_qmax, 0);
    }
  }

  static void epilogue(const Tile& tile) {
    alignas(64) int32_t shared[kBlockN];
    zero_terms(tile, shared);
    epilogue_of(tile, shared, 0, tile.rows);
  }

  // Rows [begin, end) of the tile, in ascending order from call to call; shared: zero_terms of the tile.
  static void epilogue_of(const Tile& tile, const int32_t* shared, int64_t begin, int64_t end) {
    const int64_t out_bytes = bytes_of(tile.out_type), residual_bytes = bytes_of(tile.residual_type);
    auto* out = static_cast<unsigned char*>(tile.out);
    const auto* residual = static_cast<const unsigned char*>(tile.residual);
    if (tile.cols == kBlockN) {
      for (int64_t r = begin; r < end; ++r)
        row(tile, r, shared, tile.acc ? nullptr : tile.sum + r * tile.ld_sum,
            residual ? residual + r * tile.ldr * residual_bytes : nullptr, out + r * tile.ldo * out_bytes);
      return;
    }
    alignas(64) float sum_row[kBlockN] = {};
    alignas(64) unsigned char residual_row[kBlockN * 4] = {}, out_row[kBlockN * 4];
    // Results of fewer than kBlockN channels in all lie row after row: what is written beyond a row is written again by
    // the next ones, but for the last rows of the tile.
    const int64_t spill = tile.ldo > 0 ? (kBlockN + tile.ldo - 1) / tile.ldo : tile.rows;
    const bool dense = tile.acc && !residual && tile.cols == tile.ldo;
    const int64_t direct = dense ? tile.rows - spill + 1 : 0;
    for (int64_t r = begin; r < end; ++r) {
      if (r < direct) {
        row(tile, r, shared, nullptr, nullptr, out + r * tile.ldo * out_bytes);
        continue;
      }
      if (!tile.acc) std::memcpy(sum_row, tile.sum + r * tile.ld_sum, static_cast<size_t>(tile.cols) * 4);
      if (residual)
        std::memcpy(residual_row, residual + r * tile.ldr * residual_bytes,
                    static_cast<size_t>(tile.cols * residual_bytes));
      row(tile, r, shared, sum_row, residual ? residual_row : nullptr, out_row);
      std::memcpy(out + r * tile.ldo * out_bytes, out_row, static_cast<size_t>(tile.cols * out_bytes));
    }
  }
};

}  // namespace pyquant::cpu
