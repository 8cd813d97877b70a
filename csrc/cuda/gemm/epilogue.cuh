// The ordered epilogue, once for every GEMM family: int32 zero-point term, then one separately rounded fp32 operation
// per step (docs/numerics.md 4), then the store's rounding. Families differ only in who holds which element:
//   simt  each thread a 4 x 4 patch;  sm80, sm90  eight neighbouring columns of a row (swapped operands: two).
// Output types are chosen at run time, so that an instance serves all; floats accumulate without a zero-point term.
// Absent operands become values that change no bit: scale 1, zero point 0, bias and residual -0.0.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/bounds.h"
#include "core/epilogue_math.h"
#include "cuda/gemm/call.h"
#include "cuda/pairs.cuh"

namespace pyquant::cuda {

// What the straight-line epilogues (plain80.cuh, plain90.cuh) may store in a launch.
enum class PlainOut : uint8_t { none, f16, bf16, codes, f32 };

// Passed by value to kernels.
struct EpilogueParams {
  const float* x_scale;
  const int32_t* x_zero_point;
  const float* w_scale;
  const int32_t* w_sum;
  const float* bias;
  const void* residual;
  void* out;
  const float* out_scale;
  const int32_t* out_zero_point;
  int64_t ldo, ldr;
  int32_t m, n;
  int32_t x_scale_step, x_zero_point_step;  // 1: one per token; 0: one scalar
  bool scale_product_first;                 // one scalar x_scale: t * (x_scale * w_scale)
  DType out_type, residual_type;
  bool out_vector, residual_vector;  // rows of 8 elements lie on 16 (8-bit: 8) byte boundaries
  Activation activation;
  float clamp_min, clamp_max;
  int32_t out_qmin, out_qmax;
  PlainOut plain, plain90;  // of mma.sync and of wgmma accumulators
};

// Zero points, scales, a bias, an activation and a residual of 16 bits, on boundaries that vector loads and 16-byte
// stores need. One scale of all tokens is multiplied with the channels' first, or (group scales) is not plain.
inline PlainOut plain_out90(const EpilogueParams& p, int64_t out_align) {
  const auto in_pairs = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 8 == 0; };
  // Scalars, which layers keep side by side, are loaded one by one.
  if (out_align < 16 || !in_pairs(p.w_scale) || !in_pairs(p.bias) || (p.x_scale_step && !in_pairs(p.x_scale)) ||
      (p.x_zero_point && !in_pairs(p.w_sum)) || (p.x_scale && p.x_scale_step == 0 && !p.scale_product_first) ||
      (p.residual && (p.residual_type == DType::f32 || !p.residual_vector)))
    return PlainOut::none;
  switch (p.out_type) {
    case DType::f32: return PlainOut::f32;
    case DType::f16: return PlainOut::f16;
    case DType::bf16: return PlainOut::bf16;
    case DType::s8: return PlainOut::codes;
    default: return PlainOut::none;
  }
}

// Of these what comes without an activation and a residual, to 16 bits or codes.
inline PlainOut plain_out(const EpilogueParams& p, int64_t out_align) {
  const bool is_bare = p.activation == Activation::none && !p.residual && p.out_type != DType::f32;
  return is_bare ? plain_out90(p, out_align) : PlainOut::none;
}

inline EpilogueParams epilogue_params(const GemmCall& call) {
  const GemmProblem& p = call.problem;
  const GemmOperands& o = call.operands;
  const Epilogue& e = call.epilogue;
  EpilogueParams r{};
  const bool integer = p.out == DType::s32;
  r.x_scale = integer ? nullptr : o.x_scale;
  r.w_scale = integer ? nullptr : o.w_scale;
  r.x_zero_point = p.has_zero_point ? o.x_zero_point : nullptr;
  r.w_sum = o.w_sum;
  r.bias = o.bias;
  r.residual = o.residual;
  r.out = o.out;
  r.out_scale = o.out_scale;
  r.out_zero_point = o.out_zero_point;
  r.ldo = p.ldo;
  r.ldr = p.ldr;
  r.m = static_cast<int32_t>(p.m);
  r.n = static_cast<int32_t>(p.n);
  r.x_scale_step = p.per_token_scale ? 1 : 0;
  r.x_zero_point_step = p.per_token_zero_point ? 1 : 0;
  r.scale_product_first = r.x_scale != nullptr && !p.per_token_scale && p.group_size == 0;
  r.out_type = p.out;
  r.residual_type = p.residual;
  const int32_t out_bytes = 8 * bits_of(p.out) / 8, residual_bytes = 8 * bits_of(p.residual) / 8;
  r.out_vector = p.out_align >= (out_bytes < 16 ? out_bytes : 16);
  r.residual_vector = p.residual_align >= (residual_bytes < 16 ? residual_bytes : 16);
  r.activation = e.activation;
  r.clamp_min = e.clamp_min;
  r.clamp_max = e.clamp_max;
  r.out_qmin = e.out_qmin;
  r.out_qmax = e.out_qmax;
  r.plain = plain_out(r, p.out_align);
  r.plain90 = plain_out90(r, p.out_align);
  // Rows that hold sixteen times the sums add a zero point's terms to them.
  if (r.x_zero_point && p.k > k_max_affine(0, 16 * 255, 8)) r.plain = r.plain90 = PlainOut::none;
  return r;
}

// Column (channel) and row (token) operands of one output element.
struct Channel {
  float w_scale = 1.f, bias = -0.f;
  int32_t w_sum = 0;
};
struct Token {
  float x_scale = 1.f;
  int32_t zero_point = 0;
};

__device__ __forceinline__ Channel load_channel(const EpilogueParams& p, int32_t n) {
  Channel c;
  if (n < p.n) {
    if (p.w_scale) c.w_scale = __ldg(p.w_scale + n);
    if (p.bias) c.bias = __ldg(p.bias + n);
    if (p.x_zero_point) c.w_sum = __ldg(p.w_sum + n);
  }
  return c;
}

// use(element, index) for the first `count` of t, one after another through t[0]: rolled, for the ends of rows and odd
// addresses, which would be most of a kernel's code.
template <class Element, int Count, class Use>
__device__ __forceinline__ void in_turn(Element (&t)[Count], int32_t count, Use use) {
#pragma unroll 1
  for (int i = 0; i < Count; ++i) {
    if (i < count) use(t[0], i);
    const Element first = t[0];
#pragma unroll
    for (int j = 0; j + 1 < Count; ++j) t[j] = t[j + 1];
    t[Count - 1] = first;
  }
}

// Channels n .. n + 8: whole vectors inside of N (the operands' sections start on 256-byte boundaries, n is a multiple
// of 8; an odd pointer falls back to single loads).
__device__ __forceinline__ void load_channels(const EpilogueParams& p, int32_t n, Channel (&c)[8]) {
  const auto whole = [&](const void* base) { return n + 8 <= p.n && reinterpret_cast<uintptr_t>(base) % 16 == 0; };
#pragma unroll
  for (int i = 0; i < 8; ++i) c[i] = Channel{};
  const auto load = [&](const auto* base, auto set) {
    if (base == nullptr) return;
    int32_t word[8] = {};  // 0 beyond N, where nobody stores
    if (whole(base)) {
      const int4 low = __ldg(reinterpret_cast<const int4*>(base + n));
      const int4 high = __ldg(reinterpret_cast<const int4*>(base + n) + 1);
      word[0] = low.x, word[1] = low.y, word[2] = low.z, word[3] = low.w;
      word[4] = high.x, word[5] = high.y, word[6] = high.z, word[7] = high.w;
    } else {
      in_turn(word, p.n - n, [&](int32_t& to, int i) { to = __ldg(reinterpret_cast<const int32_t*>(base) + n + i); });
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) set(c[i], word[i]);
  };
  load(p.w_scale, [](Channel& to, int32_t bits) { to.w_scale = __int_as_float(bits); });
  load(p.bias, [](Channel& to, int32_t bits) { to.bias = __int_as_float(bits); });
  if (p.x_zero_point) load(p.w_sum, [](Channel& to, int32_t bits) { to.w_sum = bits; });
}

__device__ __forceinline__ Token load_token(const EpilogueParams& p, int32_t m) {
  Token t;
  if (m < p.m) {
    if (p.x_scale) t.x_scale = __ldca(p.x_scale + static_cast<int64_t>(m) * p.x_scale_step);
    if (p.x_zero_point) t.zero_point = __ldca(p.x_zero_point + static_cast<int64_t>(m) * p.x_zero_point_step);
  }
  return t;
}

// acc - zero_point * w_sum: wraps like the hardware; the true value fits (core/bounds.h).
__device__ __forceinline__ int32_t corrected(int32_t acc, int32_t zero_point, int32_t w_sum) {
  return static_cast<int32_t>(static_cast<uint32_t>(acc) -
                              static_cast<uint32_t>(zero_point) * static_cast<uint32_t>(w_sum));
}

__device__ __forceinline__ float corrected(float acc, int32_t, int32_t) { return acc; }  // no zero point

__device__ __forceinline__ float real_of(int32_t acc) { return __int2float_rn(acc); }
__device__ __forceinline__ float real_of(float acc) { return acc; }

template <class Acc>
__device__ __forceinline__ float scaled(Acc acc, float w_scale, float x_scale, bool product_first) {
  const float t = real_of(acc);
  return product_first ? fmul(t, fmul(x_scale, w_scale)) : fmul(fmul(t, w_scale), x_scale);
}

template <class A, int Count>
__device__ __forceinline__ void activate_as(float (&t)[Count], const EpilogueParams& p) {
#pragma unroll
  for (int i = 0; i < Count; ++i) t[i] = A::of(t[i], p.clamp_min, p.clamp_max);
}

// One switch per fragment, not per element: the activation is uniform over the launch.
template <int Count>
__device__ __forceinline__ void activate_all(float (&t)[Count], const EpilogueParams& p) {
  switch (p.activation) {
#define PYQUANT_ACTIVATION(NAME) \
  case Activation::NAME: activate_as<activations::NAME>(t, p); break;
    PYQUANT_ACTIVATIONS(PYQUANT_ACTIVATION)
#undef PYQUANT_ACTIVATION
  }
}

__device__ __forceinline__ float half_bits_to_float(uint16_t h, DType type) {
  return type == DType::f16 ? __half2float(__ushort_as_half(h)) : __uint_as_float(static_cast<uint32_t>(h) << 16);
}

// Adds residual[m, n .. n + Count) to t. Any type, any stride; whole 16-byte loads where the rows allow it.
template <int Count>
__device__ __forceinline__ void add_residual(float (&t)[Count], const EpilogueParams& p, int32_t m, int32_t n) {
  if (!p.residual || m >= p.m) return;
  const int64_t at = static_cast<int64_t>(m) * p.ldr + n;
  const bool whole = p.residual_vector && n + Count <= p.n;
  if (p.residual_type == DType::f32) {
    const float* r = static_cast<const float*>(p.residual) + at;
    if (Count % 4 == 0 && whole) {
#pragma unroll
      for (int i = 0; i < Count / 4; ++i) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(r) + i);
        t[4 * i] = fadd(t[4 * i], v.x);
        t[4 * i + 1] = fadd(t[4 * i + 1], v.y);
        t[4 * i + 2] = fadd(t[4 * i + 2], v.z);
        t[4 * i + 3] = fadd(t[4 * i + 3], v.w);
      }
      return;
    }
    return in_turn(t, p.n - n, [&](float& v, int i) { v = fadd(v, __ldcg(r + i)); });
  }
  const uint16_t* r = static_cast<const uint16_t*>(p.residual) + at;
  if (Count % 8 == 0 && whole) {
    const auto add = [&](auto is_f16) {
#pragma unroll
      for (int i = 0; i < Count / 8; ++i) {
        const uint4 v = __ldcg(reinterpret_cast<const uint4*>(r) + i);
        const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = floats_of_pair<decltype(is_f16)::value>(word[j]);
          t[8 * i + 2 * j] = fadd(t[8 * i + 2 * j], pair.x);
          t[8 * i + 2 * j + 1] = fadd(t[8 * i + 2 * j + 1], pair.y);
        }
      }
    };
    if (p.residual_type == DType::f16)
      add(std::true_type{});
    else
      add(std::false_type{});
    return;
  }
  in_turn(t, p.n - n, [&](float& v, int i) { v = fadd(v, half_bits_to_float(__ldcg(r + i), p.residual_type)); });
}

// Requantisation of the output, read once per thread.
struct CodeLimits {
  float recip = 1.f, low = 0.f, high = 0.f;  // limits of t / scale: whole numbers
  int32_t zero_point = 0;
};

__device__ __forceinline__ CodeLimits load_code_limits(const EpilogueParams& p) {
  CodeLimits c;
  c.recip = p.out_scale ? scale_recip(__ldg(p.out_scale)) : 1.f;
  c.zero_point = p.out_zero_point ? __ldg(p.out_zero_point) : 0;
  c.low = static_cast<float>(p.out_qmin - c.zero_point);
  c.high = static_cast<float>(p.out_qmax - c.zero_point);
  return c;
}

// code_from_real. Between whole numbers clamping may come before rounding, which then is the conversion's own. NaN
// passes the clamp and converts to 0.
__device__ __forceinline__ int32_t code(float t, const CodeLimits& c) {
  float v = fmul(t, c.recip);
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(c.low));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(v) : "f"(c.high));
  return __float2int_rn(v) + c.zero_point;
}

__device__ __forceinline__ uint16_t half_bits(float t, DType type) {
  return type == DType::f16 ? __half_as_ushort(__float2half_rn(t)) : __bfloat16_as_ushort(__float2bfloat16_rn(t));
}

// Stores t as f16, bf16, f32 or codes at out[m, n .. n + Count).
template <int Count>
__device__ __forceinline__ void store_real(float (&t)[Count], const EpilogueParams& p, const CodeLimits& limits,
                                           int32_t m, int32_t n) {
  const int64_t at = static_cast<int64_t>(m) * p.ldo + n;
  const bool whole = p.out_vector && n + Count <= p.n;
  if (p.out_type == DType::f32) {
    float* out = static_cast<float*>(p.out) + at;
    if (Count % 4 == 0 && whole) {
#pragma unroll
      for (int i = 0; i < Count / 4; ++i)
        reinterpret_cast<float4*>(out)[i] = make_float4(t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]);
      return;
    }
    in_turn(t, p.n - n, [&](float v, int i) { out[i] = v; });
  } else if (p.out_type == DType::s4) {
    // Two codes a byte; a thread's columns start at an even one, so that no byte has two writers.
    static_assert(Count % 2 == 0 || Count == 1, "single columns are paired by the caller");
    int32_t low = 0;
    uint8_t* out = static_cast<uint8_t*>(p.out) + at / 2;
    if constexpr (Count == 8) {
      if (whole) {
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < Count; ++i) word |= static_cast<uint32_t>(code(t[i], limits) & 15) << (4 * i);
        *reinterpret_cast<uint32_t*>(out) = word;
        return;
      }
    }
    in_turn(t, (p.n - n + 1) & ~1, [&](float v, int i) {
      const int32_t nibble = n + i < p.n ? code(v, limits) & 15 : 0;
      if (i % 2 == 0)
        low = nibble;
      else
        out[i / 2] = static_cast<uint8_t>(low | nibble << 4);
    });
  } else if (p.out_type == DType::s8) {
    int8_t* out = static_cast<int8_t*>(p.out) + at;
    if (Count == 8 && whole) {
      uint32_t word[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < Count; ++i) word[i / 4] |= static_cast<uint32_t>(code(t[i], limits) & 255) << (8 * (i % 4));
      *reinterpret_cast<uint2*>(out) = make_uint2(word[0], word[1]);
      return;
    }
    in_turn(t, p.n - n, [&](float v, int i) { out[i] = static_cast<int8_t>(code(v, limits)); });
  } else {
    uint16_t* out = static_cast<uint16_t*>(p.out) + at;
    if ((Count == 2 || Count == 8) && whole) {
      uint32_t word[(Count + 1) / 2];
      if (p.out_type == DType::f16) {
#pragma unroll
        for (int i = 0; i + 1 < Count; i += 2) word[i / 2] = pair_of_floats<true>(t[i], t[i + 1]);
      } else {
#pragma unroll
        for (int i = 0; i + 1 < Count; i += 2) word[i / 2] = pair_of_floats<false>(t[i], t[i + 1]);
      }
      if constexpr (Count == 8)
        *reinterpret_cast<uint4*>(out) = make_uint4(word[0], word[1], word[2], word[3]);
      else
        *reinterpret_cast<uint32_t*>(out) = word[0];
      return;
    }
    in_turn(t, p.n - n, [&](float v, int i) { out[i] = half_bits(v, p.out_type); });
  }
}

template <int Count>
__device__ __forceinline__ void store_acc(const int32_t (&acc)[Count], const EpilogueParams& p, int32_t m, int32_t n) {
  int32_t* out = static_cast<int32_t*>(p.out) + static_cast<int64_t>(m) * p.ldo + n;
  if (Count % 4 == 0 && p.out_vector && n + Count <= p.n) {
#pragma unroll
    for (int i = 0; i < Count / 4; ++i)
      reinterpret_cast<int4*>(out)[i] = make_int4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
    return;
  }
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (n + i < p.n) out[i] = acc[i];
  }
}

// The whole epilogue of Count neighbouring elements of one row.
template <class Acc, int Count>
__device__ __forceinline__ void finish_row(const Acc (&raw)[Count], const Channel (&channel)[Count], const Token& token,
                                           const CodeLimits& limits, const EpilogueParams& p, int32_t m, int32_t n) {
  if (m >= p.m || n >= p.n) return;
  Acc acc[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) acc[i] = raw[i];
  if (p.x_zero_point) {
#pragma unroll
    for (int i = 0; i < Count; ++i) acc[i] = corrected(raw[i], token.zero_point, channel[i].w_sum);
  }
  if constexpr (std::is_same_v<Acc, int32_t>) {
    if (p.out_type == DType::s32) {
      store_acc(acc, p, m, n);
      return;
    }
  }
  // `scaled` without a choice an element: a factor of 1 changes no bit.
  const float before = p.scale_product_first ? token.x_scale : 1.f, after = p.scale_product_first ? 1.f : token.x_scale;
  float t[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i)
    t[i] = fadd(fmul(fmul(real_of(acc[i]), fmul(before, channel[i].w_scale)), after), channel[i].bias);
  activate_all(t, p);
  add_residual(t, p, m, n);
  store_real(t, p, limits, m, n);
}

}  // namespace pyquant::cuda
