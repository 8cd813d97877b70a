// The CPU backend: exact integers at the speed of the machine's dot-product instructions. Raw pointers and sizes
// only. Every function is exact for every size >= 0 and gives the same bits on every instruction set and thread count.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/dtype.h"
#include "core/gate.h"
#include "core/hadamard.h"
#include "core/linear.h"
#include "core/problem.h"
#include "core/conv.h"
#include "cpu/isas.h"

namespace pyquant::cpu {

// ---- threads: the face that loads the library (torch) lends its pool; without one everything runs serially.
using Body = void (*)(void* context, int64_t begin, int64_t end);
using ParallelFor = void (*)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);
void set_parallel_for(ParallelFor parallel_for, int (*thread_count)());

// ---- instruction sets (isas.h); every one gives the same bits.
Isa isa();  // in use: best one that the machine has, that PYQUANT_CPU_ISA allows and that passed its self-test
const char* name_of(Isa isa);
std::string isa_report();  // one line per instruction set: available, self-test, in use

// ---- quantise and dequantise a matrix [rows, cols] with row stride ld (elements). docs/numerics.md 2.
// scale / zero_point: [1], [rows] or [rows, cols / group_size] by granularity; zero_point may be null (0).
void quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
              int64_t group_size, const float* scale, const int32_t* zero_point, int32_t qmin, int32_t qmax, int8_t* q);
// Computes scale (and zero_point when affine) from the data. symmetric: amax / qmax; a row (group, tensor) that holds a
// NaN or infinity gets a NaN scale and codes zero_point.
void quantize_dynamic(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                      int64_t group_size, bool symmetric, int32_t qmin, int32_t qmax, int8_t* q, float* scale,
                      int32_t* zero_point);
// Norm, or silu(gate) * up of x [rows, 2 * cols], then codes per row [rows, cols] of the result. docs/numerics.md 9.
void norm_quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, const NormOperands& norm,
                   bool symmetric, int32_t qmin, int32_t qmax, int8_t* q, float* scale, int32_t* zero_point);
void activation_mul_quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld,
                             const GateOperands& gate, bool symmetric, int32_t qmin, int32_t qmax, int8_t* q,
                             float* scale, int32_t* zero_point);
// The Hadamard transform of blocks of columns (numerics.md 15), in the type of x; or its codes per row, from float32.
void hadamard_transform(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, const Hadamard& by,
                        void* out);
void hadamard_quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, const Hadamard& by,
                       bool symmetric, int32_t qmin, int32_t qmax, int8_t* q, float* scale, int32_t* zero_point);
// q_type: s8 or u8. out_type: f32, f16, bf16.
void dequantize(const void* q, DType q_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                int64_t group_size, const float* scale, const int32_t* zero_point, void* out, DType out_type);

// ---- fake quantisation. docs/numerics.md 10. x: matrix as above; y, mask, gradients contiguous.
void fake_quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                   int64_t group_size, const float* scale, const int32_t* zero_point, int32_t qmin, int32_t qmax,
                   void* y, uint8_t* mask);
void fake_quantize_dynamic(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                           int64_t group_size, bool symmetric, int32_t qmin, int32_t qmax, void* y, float* scale,
                           int32_t* zero_point);
// out may be grad.
void fake_quantize_backward(const void* grad, DType type, int64_t count, const uint8_t* mask, void* out);
// grad, x [rows, cols] contiguous; grad_scale like scale.
void fake_quantize_lsq_backward(const void* grad, const void* x, DType type, int64_t rows, int64_t cols,
                                Granularity granularity, int64_t group_size, const float* scale,
                                const int32_t* zero_point, int32_t qmin, int32_t qmax, void* grad_x, float* grad_scale);
// Counts of |x| in floating bins (core/histogram_math.h), int64 [2][kHistogramBins]: negative numbers, then the others.
void magnitude_histogram(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, int32_t exponent,
                         int64_t* counts);
// The step of least squared error of every short row (core/least_squares.h), contiguous; 0 for rows of zeros.
void least_squares_steps(const float* rows, int64_t count, int64_t n, int32_t qmin, int32_t qmax, const double* ratios,
                         int64_t points, double* steps);

// ---- int4: [rows, cols] codes in int8 <-> uint8 [rows, ceil(cols / 2)], low nibble = even column, two's complement.
void pack_int4(const int8_t* q, int64_t rows, int64_t cols, uint8_t* packed);
void unpack_int4(const uint8_t* packed, int64_t rows, int64_t cols, int8_t* q);
// Sum of codes per row and group (group_size 0: whole row) of row-major weights, w_type s8 or s4.
void weight_sums(const void* w, DType w_type, int64_t n, int64_t k, int64_t ldw, int64_t group_size, int32_t* sums);

// ---- GEMM on plain row-major operands, full ordered epilogue (packs the weights on the fly).
void gemm(const GemmProblem& problem, const GemmOperands& operands, const Epilogue& epilogue);

// ---- the fused layer: quantise (or take codes), multiply, epilogue; one parallel region.
size_t packed_bytes(const LinearSpec& spec);
int32_t input_zero_point(const void* packed);  // of a static input, as it was packed
void pack_linear(const LinearSpec& spec, const LinearWeights& weights, void* packed);
// Codes back in their row-major form, exactly as they were given.
void unpack_linear(const LinearSpec& spec, const void* packed, void* codes);
// x_type f32/f16/bf16 (quantised here as the spec says) or s8/u8 (codes of the static input scale; with dynamic inputs
// s8 codes of x_scale and x_zero_point, one a row, null for 0). residual may be null. out_type f32/f16/bf16, or s8 when
// spec.codes_out; s32 (where a channel has one scale): accumulators after the zero-point term, and nothing else.
void linear(const LinearSpec& spec, const void* packed, const void* x, DType x_type, int64_t m, int64_t ldx,
            const void* residual, DType residual_type, int64_t ldr, void* out, DType out_type,
            const float* x_scale = nullptr, const int32_t* x_zero_point = nullptr);
// What linear() makes of accumulators that it gave as s32: acc [m, n] with rows lda apart. x_scale: one a row with
// dynamic inputs, else null.
void finish_linear(const LinearSpec& spec, const void* packed, const int32_t* acc, int64_t m, int64_t lda,
                   const float* x_scale, const void* residual, DType residual_type, int64_t ldr, void* out,
                   DType out_type);
// out, dense [count, row_bytes]: the rows of x, stride bytes apart, that `rows` names, in its order.
void gather_rows(const void* x, int64_t stride, int64_t row_bytes, const int64_t* rows, int64_t count, void* out);
// Layers of one spec on rows of their own, in one parallel region: the first rows[0] rows of x by packed[0], the next
// rows[1] by packed[1] ... Each gives the bits that linear() gives.
void grouped_linear(const LinearSpec& spec, const void* const* packed, const int64_t* rows, int64_t count,
                    const void* x, DType x_type, int64_t ldx, void* out, DType out_type, const float* x_scale,
                    const int32_t* x_zero_point);

// ---- the fused convolution: `linear` over the codes under each window, which are read from the image.
// docs/numerics.md 11.
void conv(const LinearSpec& spec, const void* packed, const ConvOperands& operands);

// ---- whether memory has changed (pyquant/qat/kept.py): a number that any change of one word changes, and others but
// for one in billions.
int64_t fingerprint(const void* data, int64_t bytes);

// ---- what layers are held to (bench.cpu_linear).
// The inner loop of the fused layer on operands that stay in the caches, `calls` times on every thread of the pool:
// rows in [1, 48], 4 * quads codes along K. -> products done.
int64_t multiply_in_cache(int64_t rows, int64_t quads, int64_t calls);
// Reads every element `times` times, on all threads where that pays. -> the largest magnitude, so no read is elided.
float read_all(const float* x, int64_t count, int64_t times);

}  // namespace pyquant::cpu
