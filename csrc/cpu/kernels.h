// What one instruction set has to offer: a table of row and block kernels. Everything above it (blocking, packing,
// threads) is written once. Every table gives the same bits.
//
// Activations reach the kernels as u8 = code + 128, weights as s8 in blocks of 64 output channels, four codes along K
// side by side: [k / 4][64][4]. That order serves vpdpbusd, AMX tiles and pmaddwd alike. Accumulators wrap modulo 2^32:
// the result after the zero-point term fits, so its value is exact (docs/numerics.md 3).
#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "core/gate.h"
#include "core/hadamard.h"
#include "core/problem.h"
#include "cpu/ahead.h"
#include "cpu/cpu.h"
#include "cpu/taps.h"

namespace pyquant::cpu {

constexpr int64_t kBlockN = 64;       // output channels of one weight block
constexpr int64_t kMaxRowBlock = 96;  // most rows of one accumulator tile
constexpr int64_t kRowSlack = 16;     // activation rows are readable up to the next multiple of this
constexpr int64_t kDirectRows = 4;    // up to here int4 weights are unpacked in registers
constexpr int64_t kGroupOcts = 1 << 14;

struct RowStats {
  float amax, low, high;  // amax is infinite, low and high are NaN, where the row holds a NaN or an infinity
};

struct QuantizeRun {
  const void* x;
  DType type;  // f32, f16, bf16
  int64_t n;
  float recip;
  int32_t zero_point, qmin, qmax;
  bool finite;   // the caller knows that |x * recip| stays below 2^20: no NaN, no infinity
  uint8_t flip;  // xor of the stored byte: 0x80 turns an s8 code into u8 = code + 128
  void* out;
};

struct DequantizeRun {
  const void* q;
  DType q_type;  // s8, u8
  int64_t n;
  float scale;
  int32_t zero_point;
  void* out;
  DType out_type;  // f32, f16, bf16
};

// Fake quantisation (docs/numerics.md 10) of elements [begin, end) of a tensor seen as runs of `length` neighbours that
// share a scale; begin is a multiple of 64. x: rows of cols elements, ld apart; y and mask contiguous.
struct FakeRun {
  const void* x;
  DType type;  // f32, f16, bf16
  int64_t cols, ld, begin, end, length;
  const float* scale;
  const int32_t* zero_point;  // null for 0
  int32_t qmin, qmax;
  void* y;
  uint8_t* mask;        // null: no mask is written
  bool stream = false;  // y goes past the caches: float32, aligned to 64 bytes, length a multiple of 64
};

// The same for whole runs [begin, end) under scales of their own; per_row runs to a row of x.
struct FakeDynamicRun {
  const void* x;
  DType type;
  int64_t ld, begin, end, length, per_row;
  bool symmetric;
  int32_t qmin, qmax;
  void* y;
  float* scale;
  int32_t* zero_point;
  bool stream = false;  // as above
};

constexpr int64_t kFakeBlock = 1024;  // elements of one partial sum

// Blocks [begin, end) of a learned scale's gradient; every run is cut into blocks of kFakeBlock. All contiguous.
struct FakeLearnedRun {
  const void* x;
  const void* grad;
  DType type;
  int64_t begin, end, length;
  const float* scale;
  const int32_t* zero_point;
  int32_t qmin, qmax;
  void* grad_x;
  float* sums;  // one a block
};

// Rows [begin, end) of n numbers, n at most kLongestRow: the step of each with the least squared error.
struct LeastSquaresRun {
  const float* rows;
  int64_t n, begin, end;
  int32_t qmin, qmax;
  const double* ratios;  // candidates of the first pass, of the step that clips nothing
  int64_t points;        // at least kStepsKept, at most kMostRatios
  double* out;
};

// Channels of integer weights, row-major, as real numbers: (code - zero_point) * scale.
struct WeightRun {
  const void* w = nullptr;
  DType type = DType::s8;  // s8, s4 (low nibble = even column)
  int64_t ldw = 0;         // bytes
  int64_t channels = 0, k = 0;
  int64_t group_size = 0;               // 0: one scale a channel; else one that the kernels take (weight_only.cpp)
  const float* scale = nullptr;         // [channels][ld_scale]
  const int32_t* zero_point = nullptr;  // likewise; null: 0
  int64_t ld_scale = 0;
};

// Columns [begin, end) of up to kBlockN channels of codes less their zero points, as pairs of bfloat16, the first
// column lowest: pairs[i / 2][channel] of columns begin + i and begin + i + 1. begin and group_size are multiples of 32
// bits of codes. Zeros stand for channels that there are not.
struct PairRun {
  const uint8_t* w = nullptr;
  DType type = DType::s8;  // s8, s4
  int64_t ldw = 0;         // bytes
  int64_t channels = 0, begin = 0, end = 0;
  const float* zeros = nullptr;  // [group, from that of begin on][kBlockN], or null
  int64_t group_size = 0;        // not 0
  uint32_t* pairs = nullptr;     // written for whole 32 bits of codes
};

// One tile of the output, at most kBlockN columns wide, and all that its epilogue needs. The vectors of a block hold
// kBlockN entries each, whatever cols is.
struct Tile {
  const int32_t* acc = nullptr;  // [rows][kBlockN]; null when the source is sum
  const float* sum = nullptr;    // [rows][ld_sum]: group sums or a float accumulator
  int64_t ld_sum = kBlockN;
  int64_t rows = 0, cols = 0;
  const int32_t* w_sum = nullptr;
  const float* w_scale = nullptr;
  const float* bias = nullptr;     // -0.0 where there is none: adding it changes no bit
  const float* x_scale = nullptr;  // multiplied last; entries of 1 where there is none
  int64_t x_scale_step = 0;
  const int32_t* x_zero = nullptr;  // zero point of the u8 activations
  int64_t x_zero_step = 0;
  Activation activation = Activation::none;
  float clamp_min = 0.f, clamp_max = 0.f;
  const void* residual = nullptr;
  DType residual_type = DType::f32;
  int64_t ldr = 0;
  void* out = nullptr;
  DType out_type = DType::f32;
  int64_t ldo = 0;
  float out_recip = 1.f;
  int32_t out_zero_point = 0, out_qmin = -127, out_qmax = 127;
};

struct Kernels {
  Isa isa;
  int64_t row_block;      // rows of one gemm_s8 call that suit the kernel, <= kMaxRowBlock
  int64_t quad_step = 1;  // quads that gemm_s8 multiplies at a time: K is filled up with zero weights to so many
  // Around the gemm calls of one task that has this many rows (AMX loads its tile configuration here).
  void (*begin)(int64_t rows);
  void (*end)(int64_t rows);
  // acc[rows][64] (+)= a[rows][4 * quads] * b[quads][64][4].
  void (*gemm_s8)(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc, bool add,
                  const Ahead& ahead);
  // gemm_s8 for weights that are int4 codes, a byte each, as unpack_s4 leaves them; ahead.weights: nibbles, half as
  // many bytes. Null where gemm_s8 serves as well.
  void (*gemm_unpacked_s4)(const uint8_t* a, int64_t lda, int64_t rows, const int8_t* b, int64_t quads, int32_t* acc,
                           bool add, const Ahead& ahead);
  // gemm_s8 and the epilogue of its tile, whose rows are finished while their sums are near. acc: tile.acc, memory that
  // the kernel may use. Null where the two calls serve as well.
  void (*linear_s8)(const uint8_t* a, int64_t lda, const int8_t* b, int64_t quads, const Tile& tile, int32_t* acc,
                    const Ahead& ahead);
  // gemm_s8 for int4 [octs][64][4]: low nibble = code + 8 of quad 2j, high nibble = two's complement code of quad 2j +
  // 1, so that (byte & 15) is an offset code and (byte & 0xf0) sixteen times a code, each after one instruction; rows
  // <= kDirectRows.
  void (*gemm_s4)(const uint8_t* a, int64_t lda, int64_t rows, const uint8_t* b, int64_t octs, int32_t* acc);
  // One row against int4 in groups of `octs` <= kGroupOcts: gemm_s4 and accumulate of every group, sum starting from
  // zero. Null where the two calls serve as well. tile: w_sum and w_scale of the first group, x_zero.
  void (*gemv_s4)(const uint8_t* a, const uint8_t* b, int64_t octs, int64_t groups, const Tile& tile, float* sum);
  // Rows against int4 in groups of `octs`: gemm_s8 on the unpacked codes and accumulate of every group, sum starting
  // from zero. a_sum: [tile.rows][groups] sums of the codes of a, from code_sums. Both null where the machine gains
  // nothing.
  void (*groups_s4)(const uint8_t* a, int64_t lda, const int32_t* a_sum, const uint8_t* b, int64_t octs, int64_t groups,
                    const Tile& tile, float* sum, const Ahead& ahead);
  // Rows against int4 in groups of `octs`, and the epilogue: gemm_s8 on the unpacked codes and accumulate of every
  // group, a tile of rows at a time. codes: the whole block unpacked, as unpack_s4 does; `fill` leaves that to this
  // call, which then has at least six rows. sum: memory for tile.rows. Null where nothing is gained.
  void (*linear_s4)(const uint8_t* a, int64_t lda, const uint8_t* b, int8_t* codes, bool fill, int64_t octs,
                    int64_t groups, const Tile& tile, float* sum, const Ahead& ahead);
  void (*code_sums)(const uint8_t* a, int64_t group, int64_t groups, int32_t* sums);
  void (*unpack_s4)(const uint8_t* b, int64_t octs, int8_t* out);
  void (*taps)(const TapRun& run);
  // taps and the epilogue of its rows of 64 sums, while they are near: those of whole fours of pixels, and of all where
  // run.ld is 64. Null where the two calls serve as well.
  void (*linear_taps)(const TapRun& run, const Tile& tile);
  void (*interleave)(const Interleave& run);
  RowStats (*stats)(const void* x, DType type, int64_t n, bool range);
  void (*quantize)(const QuantizeRun& run);
  void (*dequantize)(const DequantizeRun& run);
  void (*widen)(const void* x, DType type, int64_t n, float* out);
  void (*narrow)(const float* x, int64_t n, void* out, DType type);
  // out = silu(gate) * up, both of one type.
  // A row of activation(gate) * by.up
  void (*activation_mul)(const void* gate, DType type, int64_t n, const GateOperands& by, float* out);
  // Blocks transformed in place, rounded to no other type; n: a multiple of the block.
  void (*hadamard)(float* x, int64_t n, const Hadamard& by);
  // sum[rows][64] (+)= float(acc - x_zero * w_sum) * w_scale, for one group; first starts from zero.
  void (*accumulate)(const Tile& tile, float* sum, bool first);
  void (*epilogue)(const Tile& tile);
  // Lanes L of a vector. What follows reads int4 as dwords of eight codes, L at a time: of 8 L neighbours, number 8 l +
  // i stands at i L + l in x, and in what real_weights writes; int8 in the order of the channel. x is padded with zeros
  // to a multiple of 8 L, real_weights to one of L.
  int64_t lanes;
  // out[r][c] = x[r] . channel c, in float32, for a few rows; x: rows ldx apart, in that order.
  void (*weight_products)(const WeightRun& run, const float* x, int64_t rows, int64_t ldx, float* out, int64_t ldo);
  // out[c] = columns [begin, end) of channel c in float32, ldo apart; begin and end multiples of 8 L, or end that of K.
  void (*real_weights)(const WeightRun& run, int64_t begin, int64_t end, float* out, int64_t ldo);
  // panel[i][c] = reals[c][i], kBlockN apart: L channels, ldr apart, and a multiple of L columns.
  void (*transpose)(const float* reals, int64_t ldr, int64_t columns, float* panel);
  // sum[rows][kBlockN] (+)= x[rows][columns] * panel[columns][kBlockN]; x: rows ldx apart.
  void (*panel_products)(const float* x, int64_t rows, int64_t ldx, const float* panel, int64_t columns, float* sum,
                         bool add);
  // For machines that multiply pairs of bfloat16, else null.
  void (*pair_codes)(const PairRun& run);
  // sum[rows][kBlockN] (+)= (x[rows][2 * count] * pairs[count][kBlockN]) * scale[kBlockN]; x: bfloat16, rows ldx apart.
  void (*pair_products)(const uint16_t* x, int64_t rows, int64_t ldx, const uint32_t* pairs, int64_t count,
                        const float* scale, float* sum, bool add);
  // out[r][c] = x[r] . channel c for up to 8 rows of bfloat16, ldx apart, in the order of order_pairs, which fills them
  // up to whole 128. Groups: one, or of 32, 64 or whole 128 codes (s8: of whole 64).
  void (*few_pairs)(const WeightRun& run, const uint16_t* x, int64_t rows, int64_t ldx, float* out, int64_t ldo);
  void (*order_pairs)(DType weights, const uint16_t* x, int64_t k, uint16_t* out);
  void (*fake_quantize)(const FakeRun& run);
  void (*fake_quantize_dynamic)(const FakeDynamicRun& run);
  // out = grad where the mask is 1, else 0: elements [begin, end) of 2 or 4 bytes; begin is a multiple of 64. out may
  // be grad.
  void (*fake_quantize_keep)(const void* grad, const uint8_t* mask, int64_t bytes, int64_t begin, int64_t end,
                             void* out);
  void (*fake_quantize_learned)(const FakeLearnedRun& run);
  void (*least_squares)(const LeastSquaresRun& run);
};

const Kernels& kernels();            // those in use
const Kernels& kernels_of(Isa isa);  // says nothing of the machine
bool machine_has(Isa isa);
// For tests: use this instruction set from now on; false where the machine lacks it.
bool use_isa(Isa isa);
// Compares every kernel of the table with the scalar one over the full range of codes.
bool self_test(const Kernels& candidate);

#define PYQ_TABLE(name, condition) const Kernels& kernels_##name();
PYQUANT_CPU_ISAS(PYQ_TABLE)
#undef PYQ_TABLE

}  // namespace pyquant::cpu
