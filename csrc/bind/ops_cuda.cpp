// torch.ops.pyquant.* on CUDA: check, ask plan/ for a kernel, allocate through torch, launch through csrc/cuda.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <mutex>
#include <stdexcept>

#include "bind/check.h"
#include "bind/text.h"
#include "bind/stream.h"
#include "core/rows_layout.h"
#include "cuda/cuda.h"
#include "plan/select.h"

namespace pyquant::bind {
namespace {

// Device guard first, then stream and properties: everything below belongs to the device of `x`.
struct On {
  torch::stable::accelerator::DeviceGuard guard;
  cuda::Context context;
  explicit On(const Tensor& x) : guard(x.get_device_index()) {
    context.device = x.get_device_index();
    context.stream = current_cuda_stream(context.device);
  }
};

const DeviceInfo& device_info(int32_t device) {
  constexpr int32_t kDevices = 64;
  static DeviceInfo known[kDevices];
  static std::once_flag asked[kDevices];
  if (device < 0 || device >= kDevices) throw std::runtime_error("pyquant: device index " + std::to_string(device));
  std::call_once(asked[device], [&] { known[device] = cuda::device_info(device); });
  return known[device];
}

int32_t alignment(const void* pointer, int64_t row_bytes) {
  const uint64_t bits = reinterpret_cast<uint64_t>(pointer) | static_cast<uint64_t>(row_bytes) | 16;
  return static_cast<int32_t>(bits & (~bits + 1));
}

void align(GemmProblem* p, const GemmOperands& o) {
  p->x_align = alignment(o.x, p->ldx * bits_of(p->x == DType::s4 ? DType::s8 : p->x) / 8);
  p->w_align = alignment(o.w, p->ldw * bits_of(p->w) / 8);
  p->out_align = alignment(o.out, p->ldo * bits_of(p->out) / 8);
  p->residual_align = o.residual ? alignment(o.residual, p->ldr * bits_of(p->residual) / 8) : 16;
}

void run(GemmProblem problem, const GemmOperands& operands, const Epilogue& epilogue, const Tensor& like,
         const On& on) {
  align(&problem, operands);
  const Selection selection = select(problem, operands.residual != nullptr, device_info(on.context.device));
  if (!selection.row)
    throw std::runtime_error("pyquant: no kernel takes this problem on this device\n" + text_of(selection));
  GemmOperands with_workspace = operands;
  Tensor workspace;  // the allocator keeps it alive until the stream has passed the launch
  if (const int64_t bytes = cuda::workspace_bytes(*selection.row, problem, on.context); bytes > 0) {
    workspace = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
    with_workspace.workspace = workspace.mutable_data_ptr();
  }
  cuda::gemm(*selection.row, problem, with_workspace, epilogue, on.context);
}

int32_t small(int64_t value) { return static_cast<int32_t>(value); }

Tensor quantize(const Tensor& x, const Tensor& scale, MaybeTensor zero_point, Text granularity, int64_t group_size,
                int64_t qmin, int64_t qmax) {
  floats("x", x);
  const Quantisation q = granularity_of(granularity, x, group_size);
  qparams(x, scale, zero_point, granularity, q);
  code_range(qmin, qmax);
  const On on(x);
  Tensor out = torch::stable::new_empty(x, x.sizes(), ScalarType::Char);
  if (out.numel() == 0) return out;
  std::vector<Tensor> keep;
  const Matrix m = matrix(x.dim() == 0 ? torch::stable::view(x, {1}) : x);
  cuda::quantize(m.data, m.type, m.rows, m.cols, m.ld, q.granularity, group_size,
                 static_cast<const float*>(dense(scale, keep)), static_cast<const int32_t*>(dense(zero_point, keep)),
                 small(qmin), small(qmax), static_cast<int8_t*>(out.mutable_data_ptr()), on.context);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> quantize_dynamic(const Tensor& x, Text granularity, int64_t group_size,
                                                    bool symmetric, int64_t qmin, int64_t qmax) {
  floats("x", x);
  const Quantisation q = granularity_of(granularity, x, group_size);
  code_range(qmin, qmax);
  if (q.granularity != Granularity::rows)
    refuse("granularity", "'" + granularity + "'", "'per_token' or 'per_channel' on CUDA so far");
  if (symmetric && (qmin > -1 || qmax < 1))
    refuse("qmin", std::to_string(qmin), "below zero, with qmax above zero, when symmetric");
  const On on(x);
  Tensor codes = torch::stable::new_empty(x, x.sizes(), ScalarType::Char);
  Tensor scale = torch::stable::new_empty(x, q.scale_shape, ScalarType::Float);
  Tensor zero_point = torch::stable::new_empty(x, q.scale_shape, ScalarType::Int);
  const Matrix m = matrix(x);
  cuda::quantize_dynamic(m.data, m.type, m.rows, m.cols, m.ld, symmetric, small(qmin), small(qmax),
                         static_cast<int8_t*>(codes.mutable_data_ptr()), m.cols,
                         static_cast<float*>(scale.mutable_data_ptr()),
                         static_cast<int32_t*>(zero_point.mutable_data_ptr()), on.context);
  return {codes, scale, zero_point};
}

Tensor dequantize(const Tensor& q, const Tensor& scale, MaybeTensor zero_point, Text granularity, int64_t group_size,
                  ScalarType out_dtype) {
  dtype_in("q", q, {ScalarType::Char, ScalarType::Byte});
  const Quantisation g = granularity_of(granularity, q, group_size);
  qparams(q, scale, zero_point, granularity, g);
  float_type(out_dtype, out_dtype);
  const On on(q);
  Tensor out = torch::stable::new_empty(q, q.sizes(), out_dtype);
  if (out.numel() == 0) return out;
  std::vector<Tensor> keep;
  const Matrix m = matrix(q.dim() == 0 ? torch::stable::view(q, {1}) : q);
  cuda::dequantize(m.data, m.type, m.rows, m.cols, m.ld, g.granularity, group_size,
                   static_cast<const float*>(dense(scale, keep)), static_cast<const int32_t*>(dense(zero_point, keep)),
                   out.mutable_data_ptr(), dtype_of_scalar(out_dtype), on.context);
  return out;
}

Tensor gemm(const char* op, const Tensor& x, const Tensor& w, const MaybeTensor& w_scale, const MaybeTensor& x_scale,
            const MaybeTensor& x_zero_point, const MaybeTensor& bias, const MaybeTensor& residual,
            const MaybeTensor& out_scale, const MaybeTensor& out_zero_point, int64_t group_size,
            const std::string& activation, double clamp_min, double clamp_max, int64_t out_qmin, int64_t out_qmax,
            ScalarType out_dtype) {
  GemmCall call = gemm_call({op, x, w, w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point,
                             group_size, activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype});
  const On on(x);
  Tensor out = torch::stable::new_empty(x, call.out_shape, call.out_type);
  if (out.numel() == 0) return out;
  call.operands.out = out.mutable_data_ptr();
  Tensor sums;
  if (call.problem.has_zero_point) {
    sums = torch::stable::new_empty(
        x, {call.problem.n, call.problem.group_size ? call.problem.k / call.problem.group_size : 1}, ScalarType::Int);
    auto* data = static_cast<int32_t*>(sums.mutable_data_ptr());
    cuda::weight_sums(call.operands.w, call.problem.w, call.problem.n, call.problem.k, call.problem.ldw,
                      call.problem.group_size, data, on.context);
    call.operands.w_sum = data;
  }
  run(call.problem, call.operands, call.epilogue, x, on);
  return out;
}

#define PYQUANT_GEMM_OP(NAME)                                                                                       \
  Tensor NAME(const Tensor& x, const Tensor& w, MaybeTensor w_scale, MaybeTensor x_scale, MaybeTensor x_zero_point, \
              MaybeTensor bias, MaybeTensor residual, MaybeTensor out_scale, MaybeTensor out_zero_point,            \
              int64_t group_size, Text activation, double clamp_min, double clamp_max, int64_t out_qmin,            \
              int64_t out_qmax, ScalarType out_dtype) {                                                             \
    return gemm(#NAME, x, w, w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point, group_size, \
                activation, clamp_min, clamp_max, out_qmin, out_qmax, out_dtype);                                   \
  }
PYQUANT_GEMM_OP(gemm_s8s8)
PYQUANT_GEMM_OP(gemm_s8s4)
PYQUANT_GEMM_OP(gemm_s4s4)

// Codes of the activations with rows padded to the weights' k_pad, so that every row is 16-byte aligned.
struct Codes {
  Tensor q, scale, zero_point;
};

Codes quantised_rows(const Tensor& x, const LinearCall& call, const RowsLayout& at, const float* x_scale,
                     const int32_t* x_zero_point, const On& on) {
  const LinearSpec& s = call.spec;
  const Matrix& m = call.x;
  Codes c;
  c.q = torch::stable::new_empty(x, {m.rows, at.k_pad}, ScalarType::Char);
  auto* q = static_cast<int8_t*>(c.q.mutable_data_ptr());
  if (s.input == InputMode::dynamic_per_token) {
    c.scale = torch::stable::new_empty(x, {m.rows}, ScalarType::Float);
    c.zero_point = torch::stable::new_empty(x, {m.rows}, ScalarType::Int);
    cuda::quantize_dynamic(m.data, m.type, m.rows, m.cols, m.ld, s.x_symmetric, s.x_qmin, s.x_qmax, q, at.k_pad,
                           static_cast<float*>(c.scale.mutable_data_ptr()),
                           static_cast<int32_t*>(c.zero_point.mutable_data_ptr()), on.context);
    return c;
  }
  if (at.k_pad == m.cols) {
    cuda::quantize(m.data, m.type, m.rows, m.cols, m.ld, Granularity::tensor, 0, x_scale, x_zero_point, s.x_qmin,
                   s.x_qmax, q, on.context);
    return c;
  }
  // The static quantiser writes dense rows; a K tail is widened by one copy. The padding meets zero weights.
  Tensor narrow = torch::stable::new_empty(x, {m.rows, m.cols}, ScalarType::Char);
  cuda::quantize(m.data, m.type, m.rows, m.cols, m.ld, Granularity::tensor, 0, x_scale, x_zero_point, s.x_qmin,
                 s.x_qmax, static_cast<int8_t*>(narrow.mutable_data_ptr()), on.context);
  Tensor left = torch::stable::narrow(c.q, 1, 0, m.cols);
  torch::stable::copy_(left, narrow);
  return c;
}

Tensor qlinear(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
               std::optional<ScalarType> out_dtype) {
  const LinearCall call = linear_call(x, packed, residual, spec, out_dtype);
  const LinearSpec& s = call.spec;
  if (s.layout != Layout::rows) refuse("spec", "layout 'cpu_blocked'", "layout 'rows' on CUDA");
  const On on(x);
  const RowsLayout at = rows_layout(s);
  const bool padded_n = at.n_pad != s.n;
  Shape wide = call.out_shape;
  wide.back() = at.n_pad;
  Tensor out = torch::stable::new_empty(x, padded_n ? wide : call.out_shape, call.out_type);
  if (call.x.rows == 0 || s.n == 0) return torch::stable::new_empty(x, call.out_shape, call.out_type);
  const auto* base = static_cast<const char*>(packed.const_data_ptr());
  const auto* scalars = base + at.scalars;
  const auto* x_scale = reinterpret_cast<const float*>(scalars);
  const auto* x_zero_point = reinterpret_cast<const int32_t*>(scalars + 4);

  GemmProblem p;
  GemmOperands o;
  Codes codes;
  if (is_float(call.x.type)) {
    codes = quantised_rows(x, call, at, x_scale, x_zero_point, on);
    o.x = codes.q.const_data_ptr();
    p.ldx = at.k_pad;
    p.k = s.group_size ? s.k : at.k_pad;  // groups end at k; without them the zero padding adds nothing
  } else if (call.x.type == DType::s8) {
    o.x = call.x.data;
    p.ldx = call.x.ld;
    p.k = s.k;
  } else {
    refuse("x", describe(x), "int8 codes or a float tensor on CUDA so far");
  }
  const bool dynamic = s.input == InputMode::dynamic_per_token;
  p.m = call.x.rows;
  p.n = at.n_pad;
  p.x = DType::s8;
  p.w = s.w_bits == 4 ? DType::s4 : DType::s8;
  p.out = dtype_of_scalar(call.out_type);
  p.ldw = at.k_pad;
  p.ldo = at.n_pad;
  p.group_size = s.group_size;
  p.per_token_scale = p.per_token_zero_point = dynamic;
  p.has_zero_point = !dynamic || !s.x_symmetric;
  o.w = base;
  o.w_scale = reinterpret_cast<const float*>(base + at.w_scale);
  o.w_sum = reinterpret_cast<const int32_t*>(base + at.w_sum);
  o.bias = s.has_bias ? reinterpret_cast<const float*>(base + at.bias) : nullptr;
  o.x_scale = dynamic ? static_cast<const float*>(codes.scale.const_data_ptr()) : x_scale;
  if (p.has_zero_point)
    o.x_zero_point = dynamic ? static_cast<const int32_t*>(codes.zero_point.const_data_ptr()) : x_zero_point;
  if (s.codes_out) {
    o.out_scale = reinterpret_cast<const float*>(scalars + 8);
    o.out_zero_point = reinterpret_cast<const int32_t*>(scalars + 12);
  }
  Tensor wide_residual;
  if (residual && padded_n) {
    wide_residual = torch::stable::new_empty(x, wide, residual->scalar_type());
    Tensor left = torch::stable::narrow(wide_residual, wide_residual.dim() - 1, 0, s.n);
    torch::stable::copy_(left, *residual);
    o.residual = wide_residual.const_data_ptr();
    p.residual = call.residual.type;
    p.ldr = at.n_pad;
  } else if (residual) {
    o.residual = call.residual.data;
    p.residual = call.residual.type;
    p.ldr = call.residual.ld;
  }
  o.out = out.mutable_data_ptr();
  Epilogue e;
  e.activation = s.activation;
  e.clamp_min = s.clamp_min;
  e.clamp_max = s.clamp_max;
  e.out_qmin = s.out_qmin;
  e.out_qmax = s.out_qmax;
  run(p, o, e, x, on);
  if (!padded_n) return out;
  return torch::stable::clone(torch::stable::narrow(out, out.dim() - 1, 0, s.n));
}

}  // namespace
}  // namespace pyquant::bind

STABLE_TORCH_LIBRARY_IMPL(pyquant, CUDA, m) {
  namespace b = pyquant::bind;
  m.impl("quantize", TORCH_BOX(&b::quantize));
  m.impl("quantize_dynamic", TORCH_BOX(&b::quantize_dynamic));
  m.impl("dequantize", TORCH_BOX(&b::dequantize));
  m.impl("gemm_s8s8", TORCH_BOX(&b::gemm_s8s8));
  m.impl("gemm_s8s4", TORCH_BOX(&b::gemm_s8s4));
  m.impl("gemm_s4s4", TORCH_BOX(&b::gemm_s4s4));
  m.impl("qlinear", TORCH_BOX(&b::qlinear));
}
