// Float rows times integer weights: the pieces that bind/weight_only_cpu.cpp puts together.
#pragma once
#include <cstdint>
#include <vector>

#include "core/dtype.h"
#include "cpu/float_epilogue.h"

namespace pyquant::cpu {

// Weights as a checkpoint stores them: s8, or s4 two a byte, low nibble first.
struct IntegerWeights {
  const void* codes = nullptr;
  DType type = DType::s8;
  int64_t n = 0, k = 0, row_bytes = 0;
  int64_t group_size = 0;               // 0: per channel; divides k
  const float* scale = nullptr;         // [n] or [n, k / group_size]
  const int32_t* zero_point = nullptr;  // likewise; null: 0
};

// How the kernels read rows of x.
//   ordered    float32, in the order of the codes in registers
//   few_pairs  bf16, in that order: few rows, where the machine multiplies pairs of it
//   pairs      bf16, an even number of columns: many
enum class RowsForm { ordered, few_pairs, pairs };
RowsForm form_of(const IntegerWeights& w, DType x, int64_t m);

// Rows in the form of a layer.
struct LayerRows {
  RowsForm form = RowsForm::ordered;
  const void* x = nullptr;
  int64_t ld = 0, m = 0;  // numbers from one row to the next; rows
};

// Length of the rows that prepare_rows makes: k, rounded up; the rest is zeros.
int64_t columns_in(RowsForm form, const IntegerWeights& w);
// x of any float type (pairs of either kind: bf16), rows of k, ldx elements apart -> [m, columns_in] in that form.
// rows: [m], which rows of x they are; null: the first m. Rows of bf16 with even k are pairs where they lie.
void prepare_rows(RowsForm form, const IntegerWeights& w, const void* x, DType type, int64_t m, int64_t ldx, void* out,
                  const int64_t* rows = nullptr);

// One of several layers of one K, type and group size, on rows of its own; out is in `epilogue`.
struct WeightOnlyLayer {
  IntegerWeights weights;
  LayerRows rows;
  FloatEpilogue epilogue;
};
// The whole layer.
void weight_only(const WeightOnlyLayer& layer);
// All of them in one parallel region; each gives the bits that weight_only gives.
void weight_only_all(const std::vector<WeightOnlyLayer>& layers);

}  // namespace pyquant::cpu
