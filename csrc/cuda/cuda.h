// The CUDA backend as the rest of pyquant sees it: raw device pointers, sizes, a device number and a stream. No CUDA
// header is needed to include this. Every function throws std::runtime_error with the CUDA error's text; a build
// without CUDA throws "built without CUDA kernels". Launches are asynchronous on the stream; nothing synchronises.
#pragma once
#include <cstdint>
#include <string>

#include "core/device.h"
#include "core/gate.h"
#include "core/hadamard.h"
#include "core/problem.h"

namespace pyquant {
struct Row;  // a row of the kernel table (plan/row.h); kernels do not depend on the table
}

namespace pyquant::cuda {

struct Context {
  int32_t device = 0;
  void* stream = nullptr;  // cudaStream_t
};

bool is_built();
const char* cutlass_version();  // "4.2.0", or "" without CUDA
int runtime_version();          // of the CUDA headers compiled against, 0 without CUDA
int device_count();             // 0 when there is no driver
DeviceInfo device_info(int32_t device);
std::string device_name(int32_t device);  // as reported by the driver: "NVIDIA H200"

// Memory that a kernel clears beside its own work, because the next one counts in it; on 16-byte boundaries.
struct Zeros {
  void* at = nullptr;
  int64_t bytes = 0;
};

// Device memory that a row needs in addition to its operands: sums of a divided K and the counters of those who add
// them. Of most rows nothing.
struct Workspace {
  int64_t bytes = 0;
  int64_t counters = 0, counter_bytes = 0;  // where they begin, and how many bytes have to be 0 before the launch
  Zeros zeros(void* memory) const { return {static_cast<char*>(memory) + counters, counter_bytes}; }
};
Workspace workspace(const Row& row, const GemmProblem& problem, const Context& context);

// Runs one row of the kernel table. Precondition: plan/ says that the row accepts the problem; K = 0 is the
// epilogue of a zero accumulator, M = 0 or N = 0 launches nothing.
void gemm(const Row& row, const GemmProblem& problem, const GemmOperands& operands, const Epilogue& epilogue,
          const Context& context);

// The epilogue of a ready product t [m, n] (f32, f16, bf16, row stride ldt), which may be operands.out itself: bias,
// activation, residual, store. Of the problem it reads m, n, out, residual and their strides and alignments.
void float_epilogue(const void* t, DType type, int64_t ldt, const GemmProblem& problem, const GemmOperands& operands,
                    const Epilogue& epilogue, const Context& context);

// ---- quantise. Matrices are [rows, cols] with row stride ld elements; zero rows or columns are allowed everywhere.
struct FloatMatrix {
  const void* data = nullptr;
  DType type = DType::f32;  // f32, f16, bf16
  int64_t rows = 0, cols = 0, ld = 0;
};
struct CodeRange {
  int32_t qmin = -127, qmax = 127;
  bool symmetric = true;  // of dynamic ranges: zero point 0
};
// Destination of the codes, their layout, and optional further outputs.
struct QuantizeOut {
  void* q = nullptr;           // int8 [rows, ldq], or uint8 [rows, ldq / 2] when packed
  int64_t ldq = 0;             // codes from row to row, >= cols; those beyond cols become 0, so a padded K adds nothing
  bool packed = false;         // two codes a byte, low nibble = even column: limits in [-8, 7], ldq and group_size even
  int32_t* row_sum = nullptr;  // sum of the codes of each row (with group scales: of each group), or null
  Zeros zeros{};               // of the kernel that reads the codes; cleared only if there is a row
};
// Scales and zero points that a dynamic quantiser writes; zero_point may be null.
struct QuantizeParams {
  float* scale = nullptr;
  int32_t* zero_point = nullptr;
};
// scale / zero_point: [1], [rows] or [rows, cols / group_size]; zero_point may be null (0).
void quantize(const FloatMatrix& x, Granularity granularity, int64_t group_size, const float* scale,
              const int32_t* zero_point, const CodeRange& range, const QuantizeOut& out, const Context& context);
// Granularity::tensor needs workspace of so many bytes; the others take null.
constexpr int64_t kQuantizeWorkspaceBytes = 4096;
void quantize_dynamic(const FloatMatrix& x, Granularity granularity, int64_t group_size, const CodeRange& range,
                      const QuantizeParams& params, const QuantizeOut& out, void* workspace, const Context& context);

// The rows of x that `chosen` [count] names, in its order: codes per row of each.
void quantize_chosen_rows(const FloatMatrix& x, const int64_t* chosen, int64_t count, const CodeRange& range,
                          const QuantizeParams& params, const QuantizeOut& out, const Context& context);
// Norm (core/problem.h), then codes per row of the result.
void norm_quantize(const FloatMatrix& x, const NormOperands& norm, const CodeRange& range, const QuantizeParams& params,
                   const QuantizeOut& out, const Context& context);
// Codes per row of activation(x) * gate.up.
void activation_mul_quantize(const FloatMatrix& x, const GateOperands& gate, const CodeRange& range,
                             const QuantizeParams& params, const QuantizeOut& out, const Context& context);
// Blocks of columns through the Hadamard transform (numerics.md 15), in the type of x, contiguous; or its codes per
// row, from float32. Rows of more columns than a block's shared memory holds as float32 are refused.
void hadamard_transform(const FloatMatrix& x, const Hadamard& by, void* out, const Context& context);
void hadamard_quantize(const FloatMatrix& x, const Hadamard& by, const CodeRange& range, const QuantizeParams& params,
                       const QuantizeOut& out, const Context& context);

// Fake quantisation (docs/numerics.md 10). y, mask [ceil(rows * cols / 8)] and gradients are contiguous.
void fake_quantize(const FloatMatrix& x, Granularity granularity, int64_t group_size, const float* scale,
                   const int32_t* zero_point, const CodeRange& range, void* y, uint8_t* mask, const Context& context);
// workspace as for quantize_dynamic.
void fake_quantize_dynamic(const FloatMatrix& x, Granularity granularity, int64_t group_size, const CodeRange& range,
                           const QuantizeParams& params, void* y, void* workspace, const Context& context);
// out may be grad: then only what is clipped is written.
void fake_quantize_backward(const void* grad, DType type, int64_t count, const uint8_t* mask, void* out,
                            const Context& context);
// x contiguous. grad_scale like scale; workspace: lsq_workspace_bytes.
int64_t lsq_workspace_bytes(const FloatMatrix& x, Granularity granularity, int64_t group_size);
void fake_quantize_lsq_backward(const void* grad, const FloatMatrix& x, Granularity granularity, int64_t group_size,
                                const float* scale, const int32_t* zero_point, const CodeRange& range, void* grad_x,
                                float* grad_scale, void* workspace, const Context& context);

// q_type: s8, u8, or s4, two codes a byte; ld in codes.
void dequantize(const void* q, DType q_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                int64_t group_size, const float* scale, const int32_t* zero_point, void* out, DType out_type,
                const Context& context);

// Counts of |x| in floating bins (core/histogram_math.h), int64 [2][kHistogramBins]: negative numbers, then the others.
void magnitude_histogram(const FloatMatrix& x, int32_t exponent, int64_t* counts, const Context& context);

// Codes as they come (s8, u8, or s4 packed two per byte, row stride ld elements) -> signed bytes in rows of ldq (a
// multiple of 4), zero between cols and ldq. u8 codes are shifted by -128, and so is their zero point: one number on
// the device (null: 0), written to shifted_zero_point unless that is null. zeros: as of QuantizeOut.
void arrange_codes(const void* x, DType type, int64_t rows, int64_t cols, int64_t ld, int8_t* q, int64_t ldq,
                   const int32_t* zero_point, int32_t* shifted_zero_point, const Zeros& zeros, const Context& context);

// int4 codes one per byte [rows, cols] <-> two per byte [rows, ceil(cols / 2)], low nibble = even column.
void pack_int4(const int8_t* q, int64_t rows, int64_t cols, uint8_t* packed, const Context& context);
void unpack_int4(const uint8_t* packed, int64_t rows, int64_t cols, int8_t* q, const Context& context);
// Packed int4 weights [n, k], row stride ldw nibbles, <-> the layout blocked128: blocked128_bytes(n, k) bytes on a
// 16-byte boundary (core/blocked128.h).
void pack_blocked128(const uint8_t* w, int64_t n, int64_t k, int64_t ldw, uint8_t* blocked, const Context& context);
void unpack_blocked128(const uint8_t* blocked, int64_t n, int64_t k, int64_t ldw, uint8_t* w, const Context& context);
// Sum of codes per row and group (group_size 0: the whole row); weights s8, or s4 packed. ldw counts elements.
void weight_sums(const void* w, DType w_type, int64_t n, int64_t k, int64_t ldw, int64_t group_size, int32_t* sums,
                 const Context& context);

}  // namespace pyquant::cuda
