// Products and their epilogue in one kernel, in AVX-512. For isa_avx512_vnni.cpp, whose flags it needs.
#pragma once
#include <type_traits>

#include "cpu/rows.h"
#include "cpu/vector_avx512.h"

namespace pyquant::cpu {
namespace {

// What follows a product: the epilogue of its rows, tile by tile, while their sums are near.
class Finish {
 public:
  explicit Finish(const Tile& tile)
      : tile_(tile),
        plain_(!tile.residual && !tile.x_zero_step && tile.activation == Activation::none &&
               (tile.out_type == DType::f32 || tile.out_type == DType::bf16)) {
    Rows<V>::zero_terms(tile, shared_);
  }

  void rows(int64_t begin, int64_t end) const { Rows<V>::epilogue_of(tile_, shared_, begin, end); }

  // Whether nothing but scales and a bias stands between sums and results, which then never leave the registers.
  bool is_plain() const { return plain_; }

  template <int R>
  PYQ_INLINE void from_registers(const __m512i (&c)[R][4], int64_t begin) const {
    if (tile_.out_type == DType::bf16)
      as<R, DType::bf16>(c, begin);
    else
      as<R, DType::f32>(c, begin);
  }

 private:
  // Every field is read once: results might be fields, for all that the compiler knows.
  template <int R, DType T>
  PYQ_INLINE void as(const __m512i (&c)[R][4], int64_t begin) const {
    using Out = std::conditional_t<T == DType::f32, float, uint16_t>;
    const int64_t ldo = tile_.ldo, step = tile_.x_scale_step, cols = tile_.cols;
    const float *w_scale = tile_.w_scale, *bias = tile_.bias, *x_scale = tile_.x_scale + begin * step;
    Out* out = static_cast<Out*>(tile_.out) + begin * ldo;
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const int64_t left = cols - j * 16;
      if (left <= 0) break;
      const __m512i zero = _mm512_load_si512(shared_ + j * 16);
      const __m512 scale = _mm512_loadu_ps(w_scale + j * 16), plus = _mm512_loadu_ps(bias + j * 16);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m512 t = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(c[r][j], zero)), scale);
        const __m512 v = _mm512_add_ps(_mm512_mul_ps(t, _mm512_set1_ps(x_scale[r * step])), plus);
        if (left >= 16)
          store(out + r * ldo + j * 16, v);
        else
          store(out + r * ldo + j * 16, v, first(left));
      }
    }
  }

  static void store(float* to, __m512 v) { V::store_f32(to, v); }
  static void store(uint16_t* to, __m512 v) { V::store_bf16(to, v); }
  static void store(float* to, __m512 v, __mmask16 lanes) { _mm512_mask_storeu_ps(to, lanes, v); }
  static void store(uint16_t* to, __m512 v, __mmask16 lanes) {
    alignas(32) uint16_t whole[16];
    V::store_bf16(whole, v);
    _mm256_mask_storeu_epi16(to, lanes, _mm256_load_si256(reinterpret_cast<const __m256i*>(whole)));
  }

  static __mmask16 first(int64_t lanes) { return static_cast<__mmask16>((1u << lanes) - 1); }

  const Tile& tile_;
  bool plain_;
  alignas(64) int32_t shared_[kBlockN];
};

}  // namespace
}  // namespace pyquant::cpu
