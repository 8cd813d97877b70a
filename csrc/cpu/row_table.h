// The part of an instruction set's table that its vector type alone decides; products are added by isa_*.cpp.
#pragma once
#include "cpu/fake_rows.h"
#include "cpu/hadamard_rows.h"
#include "cpu/kernels.h"
#include "cpu/least_squares_rows.h"
#include "cpu/rows.h"
#include "cpu/weight_rows.h"

namespace pyquant::cpu {

template <class V>
constexpr Kernels row_table(Isa isa) {
  Kernels k{};
  k.isa = isa;
  k.begin = k.end = [](int64_t) {};
  k.stats = Rows<V>::stats;
  k.quantize = Rows<V>::quantize;
  k.dequantize = Rows<V>::dequantize;
  k.widen = Rows<V>::widen;
  k.narrow = Rows<V>::narrow;
  k.activation_mul = Rows<V>::activation_mul;
  k.hadamard = HadamardRows<V>::transform;
  k.accumulate = Rows<V>::accumulate;
  k.epilogue = Rows<V>::epilogue;
  k.lanes = V::W;
  k.weight_products = WeightRows<V>::products;
  k.real_weights = WeightRows<V>::real_weights;
  k.transpose = WeightRows<V>::transpose;
  k.panel_products = WeightRows<V>::panel_products;
  k.fake_quantize = FakeRows<V>::given;
  k.fake_quantize_dynamic = FakeRows<V>::dynamic;
  k.fake_quantize_keep = FakeRows<V>::keep;
  k.fake_quantize_learned = FakeRows<V>::learned;
  k.least_squares = LeastSquaresRows<V>::run;
  return k;
}

}  // namespace pyquant::cpu
