// The CUDA backend as the rest of pyquant sees it: raw device pointers, sizes, a device number and a stream. No CUDA
// header is needed to include this. Every function throws std::runtime_error with the CUDA error's text; a build
// without CUDA throws "built without CUDA kernels". Launches are asynchronous on the stream; nothing synchronises.
#pragma once
#include <cstdint>

#include "core/device.h"
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

// Bytes of device memory that a row needs beside its operands (sums of a divided K); 0 for most.
int64_t workspace_bytes(const Row& row, const GemmProblem& problem, const Context& context);

// Runs one row of the kernel table. The caller has asked plan/ whether the row accepts the problem; K = 0 is the
// epilogue of a zero accumulator, M = 0 or N = 0 launches nothing.
void gemm(const Row& row, const GemmProblem& problem, const GemmOperands& operands, const Epilogue& epilogue,
          const Context& context);

// Matrix [rows, cols], row stride ld elements. scale / zero_point: [1], [rows] or [rows, cols / group_size].
void quantize(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
              int64_t group_size, const float* scale, const int32_t* zero_point, int32_t qmin, int32_t qmax, int8_t* q,
              const Context& context);
// Per row (token): scale, and zero point unless null, from the row's own range; q is dense, row stride ldq >= cols.
// The codes between cols and ldq are set to 0, so that a padded K adds nothing.
void quantize_dynamic(const void* x, DType x_type, int64_t rows, int64_t cols, int64_t ld, bool symmetric, int32_t qmin,
                      int32_t qmax, int8_t* q, int64_t ldq, float* scale, int32_t* zero_point, const Context& context);
void dequantize(const void* q, DType q_type, int64_t rows, int64_t cols, int64_t ld, Granularity granularity,
                int64_t group_size, const float* scale, const int32_t* zero_point, void* out, DType out_type,
                const Context& context);

// int4 codes one per byte [rows, cols] <-> two per byte [rows, ceil(cols / 2)], low nibble = even column.
void pack_int4(const int8_t* q, int64_t rows, int64_t cols, uint8_t* packed, const Context& context);
void unpack_int4(const uint8_t* packed, int64_t rows, int64_t cols, int8_t* q, const Context& context);
// Sum of codes per row and group (group_size 0: the whole row); weights s8, or s4 packed. ldw counts elements.
void weight_sums(const void* w, DType w_type, int64_t n, int64_t k, int64_t ldw, int64_t group_size, int32_t* sums,
                 const Context& context);

}  // namespace pyquant::cuda
