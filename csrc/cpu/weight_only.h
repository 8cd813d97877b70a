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

// Rows of x as a layer reads them: in pairs where it takes pairs, else ordered.
struct LayerRows {
  const float* ordered = nullptr;
  const uint16_t* pairs = nullptr;
  int64_t pairs_ld = 0;  // numbers from one row to the next
  int64_t m = 0;
};

// Length of the rows that follow: k, rounded up; the rest is zeros.
int64_t ordered_columns(const IntegerWeights& w);
// x f32, f16 or bf16, rows of k, ldx elements apart -> float32 [m, ordered_columns] in the order that the kernels read.
// rows: [m], which rows of x they are; null: the first m.
void order_rows(const IntegerWeights& w, const void* x, DType type, int64_t m, int64_t ldx, float* out,
                const int64_t* rows = nullptr);

// Whether m rows of this type are multiplied as pairs of bfloat16, by codes that are no real numbers yet.
bool takes_pairs(const IntegerWeights& w, DType x, int64_t m);
// bf16 rows of an even number of columns are pairs where they lie. Others: -> [m, paired_columns], zeros at the end.
int64_t paired_columns(const IntegerWeights& w);
void pair_rows(const IntegerWeights& w, const uint16_t* x, int64_t m, int64_t ldx, uint16_t* out, const int64_t* rows);

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
