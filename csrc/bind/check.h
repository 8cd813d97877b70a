// The one place where tensors become pointers and sizes. Every refusal reads
// "argument 'x': got <what it was>; allowed: <what is allowed>", the text that pyquant/ops/check.py builds too.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "core/gate.h"
#include "core/hadamard.h"
#include "core/linear.h"
#include "core/problem.h"

namespace pyquant::bind {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Shape = std::vector<int64_t>;

[[noreturn]] void refuse(const char* argument, const std::string& got, const std::string& allowed);
// What every failed allocation throws. The stable ABI keeps neither the class nor the text of torch's own error;
// pyquant/ops/translate.py gives both back.
[[noreturn]] void out_of_memory(int64_t bytes, const std::string& device);
std::string device_of(const Tensor& tensor);  // "cpu", "cuda:0"
std::string describe(const Tensor& tensor);
std::string text_of(const Shape& shape);
const char* name_of_scalar(ScalarType type);

DType dtype_of(const Tensor& tensor);
void dtype_in(const char* argument, const Tensor& tensor, std::initializer_list<ScalarType> allowed);
void floats(const char* argument, const Tensor& tensor);
void same_device(const char* argument, const Tensor& tensor, const Tensor& x, const char* name_of_x = "x");
void min_dim(const char* argument, const Tensor& tensor, int64_t dim);
void exact_dim(const char* argument, const Tensor& tensor, int64_t dim);
void shape_is(const char* argument, const Tensor& tensor, const Shape& shape);
void vector(const char* argument, const MaybeTensor& tensor, const Tensor& x, ScalarType type, const Shape& shape);
void scalar_or(const char* argument, const MaybeTensor& tensor, const Tensor& x, ScalarType type, const Shape& shape);
// An operand that is written: this dtype and shape, on the device of x, in one contiguous piece.
void buffer(const char* argument, const Tensor& tensor, const Tensor& x, ScalarType type, const Shape& shape);
// A buffer that is written shares no byte with another operand; `same` allows the very same elements (in place).
void apart(const char* argument, const Tensor& written, const char* other_name, const Tensor& other, bool same = false);
void code_range(int64_t qmin, int64_t qmax, const char* low = "qmin", const char* high = "qmax");
// And 0 is one of the codes where there is no zero point: it is what stands for it.
void code_range_with(const MaybeTensor& zero_point, int64_t qmin, int64_t qmax);
void group(int64_t group_size, int64_t k);
// Zero points whose memory the host can read (null: none): beyond [low, high] the bounds of docs/numerics.md 3 would
// not hold. On a GPU they cannot be seen without a synchronisation.
void zero_points(const char* argument, const int32_t* values, int64_t count, int64_t low, int64_t high);
int64_t count_of(const MaybeTensor& tensor);         // entries; 0 when absent
int64_t unpacked_columns(int64_t bytes, int64_t k);  // k, when so many int4 codes fill the bytes
Activation activation_of(const std::string& name, double clamp_min, double clamp_max);
bool is_float_type(ScalarType type);
ScalarType float_type(std::optional<ScalarType> wanted, ScalarType otherwise);
DType dtype_of_scalar(ScalarType type);
ScalarType memory_of(DType type);  // of the tensor that holds codes of the type
DType weight_type_of(const char* argument, int64_t bits);

Shape shape_of(const Tensor& tensor);
Shape lead_of(const Tensor& tensor);  // all dimensions but the last

// A matrix [rows, cols] over a tensor [..., cols]: no copy when the last stride is 1 and the leading dimensions
// collapse to one row stride; otherwise a contiguous copy that `keep` owns.
struct Matrix {
  Tensor keep;
  const void* data = nullptr;
  DType type = DType::f32;
  int64_t rows = 0, cols = 0, ld = 0;
};
Matrix matrix(const Tensor& tensor);
Tensor compact(const Tensor& tensor);  // the tensor, or a contiguous copy where it is strided (device.h: two flavours)
// Contiguous memory of a small operand; null when absent. `keep` owns the copy where one was needed.
const void* dense(const MaybeTensor& tensor, std::vector<Tensor>& keep);

struct Quantisation {
  Granularity granularity;
  Shape scale_shape;
};
Quantisation granularity_of(const std::string& name, const Tensor& x, int64_t group_size);
void qparams(const Tensor& x, const Tensor& scale, const MaybeTensor& zero_point, const std::string& granularity,
             const Quantisation& q);

void histogram_call(const Tensor& x, int64_t exponent);
void residual_check(const MaybeTensor& residual, const Tensor& x, const Shape& out_shape);
// The ops that norm or gate a row before they quantise it: every rule of their arguments. `keep` owns copies.
struct NormCall {
  Matrix x;
  NormOperands norm;
  Shape scale_shape;
  std::vector<Tensor> keep;
};
NormCall norm_call(bool subtract_mean, const Tensor& x, const MaybeTensor& residual, const MaybeTensor& weight,
                   const MaybeTensor& bias, double eps, bool symmetric, int64_t qmin, int64_t qmax);
void dynamic_code_range(bool symmetric, int64_t qmin, int64_t qmax);
struct GateCall {
  Matrix x, up;
  GateOperands gate;
  Shape out_shape;
};
// x: [.., 2K], gates and then ups.
GateCall silu_mul_call(const Tensor& x, bool symmetric, int64_t qmin, int64_t qmax);
GateCall gate_call(const Tensor& x, const Tensor& up, const std::string& activation, double clamp_min, double clamp_max,
                   bool symmetric, int64_t qmin, int64_t qmax);
// scale: none for that of an orthogonal map.
Hadamard hadamard_call(const Tensor& x, int64_t block, std::optional<double> scale);

// The fake quantisers: every rule of their arguments (fake_quantize_calls.cpp). `keep` owns copies; a tensor without
// dimensions is a row of one.
struct FakeCall {
  Quantisation q;
  Matrix x;
  const float* scale = nullptr;
  const int32_t* zero_point = nullptr;
  std::vector<Tensor> keep;
};
FakeCall fake_call(const Tensor& x, const Tensor& scale, const MaybeTensor& zero_point, const std::string& granularity,
                   int64_t group_size, int64_t qmin, int64_t qmax);
FakeCall fake_dynamic_call(const Tensor& x, const std::string& granularity, int64_t group_size, bool symmetric,
                           int64_t qmin, int64_t qmax);
Shape mask_shape(const Tensor& x);
void fake_out_apart(const Tensor& x, const Tensor& scale, const MaybeTensor& zero_point, const Tensor& y,
                    const Tensor& mask);
void fake_dynamic_out_apart(const Tensor& x, const Tensor& y, const Tensor& scale, const Tensor& zero_point);
void fake_backward_check(const Tensor& grad, const Tensor& mask);
void lsq_check(const Tensor& grad, const Tensor& x);

// Sizes below this are what layouts and indices can hold: no product of them leaves 64 bits.
constexpr int64_t kMaxSize = int64_t{1} << 31;
LinearSpec linear_spec(const std::vector<int64_t>& spec);
size_t packed_bytes(const LinearSpec& spec);

// The GEMM ops: every rule of their arguments, then the plain structs. `keep` owns copies. `gemm` takes
// all pairs of types, floats of 16 bits too. int4 activations also come two a byte: K is then even.
struct GemmCall {
  GemmProblem problem;
  GemmOperands operands;
  Epilogue epilogue;
  Shape out_shape;
  ScalarType out_type = ScalarType::Float;
  std::vector<Tensor> keep;
};
struct GemmArgs {
  const Product* product;  // null: that of the operands' types (`gemm`)
  const Tensor& x;
  const Tensor& w;
  const MaybeTensor &w_scale, &x_scale, &x_zero_point, &bias, &residual, &out_scale, &out_zero_point;
  int64_t group_size;
  const std::string& activation;
  double clamp_min, clamp_max;
  int64_t out_qmin, out_qmax;
  ScalarType out_dtype;
};
GemmCall gemm_call(const GemmArgs& args);

// The fused layer: x, packed and residual against the spec. Where the spec's code range has 4 bits, codes may also come
// and go two per byte: x of type s4 (cols and ld count codes), and out of type s4 (out_type is then Byte).
struct LinearCall {
  LinearSpec spec;
  Matrix x, residual;
  // One a row, of codes under a spec with dynamic inputs; null for all others. `keep` owns copies.
  const float* x_scale = nullptr;
  const int32_t* x_zero_point = nullptr;
  std::vector<Tensor> keep;
  Shape out_shape;
  ScalarType out_type = ScalarType::Float;
  DType out = DType::f32;
};
LinearCall linear_call(const Tensor& x, const Tensor& packed, const MaybeTensor& residual,
                       const std::vector<int64_t>& spec, std::optional<ScalarType> out_dtype,
                       const MaybeTensor& x_scale, const MaybeTensor& x_zero_point);
// Which rows are whose, of a call for several layers. Values are not looked at; `keep` owns copies.
struct GroupedRows {
  const int32_t* ends = nullptr;  // [layers]: where the rows of each end
  const int64_t* rows = nullptr;  // [count]: which rows of x they are; null: all, as they are
  int64_t count = 0;              // rows of the result
};
GroupedRows grouped_rows(const Tensor& x, size_t layers, const Tensor& ends, const MaybeTensor& rows,
                         std::vector<Tensor>& keep);
// Layers of one spec on rows of their own.
struct GroupedCall : GroupedRows {
  LinearCall call;  // of the first layer, x as it is given
};
GroupedCall grouped_call(const Tensor& x, const std::vector<Tensor>& packed, const Tensor& ends,
                         const std::vector<int64_t>& spec, const MaybeTensor& rows, std::optional<ScalarType> out_dtype,
                         const MaybeTensor& x_scale, const MaybeTensor& x_zero_point);
// Codes that come ready made are bounded by their type.
void codes_bound(const LinearSpec& s, DType type);
void pack_check(const LinearSpec& s, const Tensor& w, const Tensor& w_scale, const MaybeTensor& bias,
                const MaybeTensor& x_scale, const MaybeTensor& x_zero_point, const MaybeTensor& out_scale,
                const MaybeTensor& out_zero_point);
// The values of the zero points of a buffer to be packed, in memory that the host can read.
void pack_zero_points(const LinearSpec& s, const LinearWeights& weights);

}  // namespace pyquant::bind
