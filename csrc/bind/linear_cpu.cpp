// The fused quantised Linear on the CPU: packing of its weights, and the call.
#include "bind/linear_cpu.h"

#include <torch/csrc/stable/ops.h>

#include "bind/backend_cpu.h"

namespace pyquant::bind {

void Cpu::check_layout(const LinearSpec& s) {
  if (s.layout != Layout::cpu_blocked) refuse("spec", "a layout of CUDA", "layout 'cpu_blocked' on the CPU");
}

Tensor pack_linear_cpu(const Tensor& w, const Tensor& w_scale, MaybeTensor bias, MaybeTensor x_scale,
                       MaybeTensor x_zero_point, MaybeTensor out_scale, MaybeTensor out_zero_point,
                       std::vector<int64_t> spec) {
  const LinearSpec s = linear_spec(spec);
  Cpu::check_layout(s);
  pack_check(s, w, w_scale, bias, x_scale, x_zero_point, out_scale, out_zero_point);
  std::vector<Tensor> keep;
  LinearWeights weights;
  weights.codes = dense(w, keep);
  weights.w_scale = static_cast<const float*>(dense(w_scale, keep));
  weights.bias = static_cast<const float*>(dense(bias, keep));
  weights.x_scale = static_cast<const float*>(dense(x_scale, keep));
  weights.x_zero_point = static_cast<const int32_t*>(dense(x_zero_point, keep));
  weights.out_scale = static_cast<const float*>(dense(out_scale, keep));
  weights.out_zero_point = static_cast<const int32_t*>(dense(out_zero_point, keep));
  pack_zero_points(s, weights);
  Tensor packed = empty_cpu({static_cast<int64_t>(packed_bytes(s))}, ScalarType::Byte);
  cpu::pack_linear(s, weights, packed.mutable_data_ptr());
  return packed;
}

Tensor unpack_linear_cpu(const Tensor& packed, std::vector<int64_t> spec) {
  const LinearSpec s = linear_spec(spec);
  Cpu::check_layout(s);
  dtype_in("packed", packed, {ScalarType::Byte});
  shape_is("packed", packed, {static_cast<int64_t>(packed_bytes(s))});
  Tensor codes = empty_cpu({s.n, columns_of(s.w->type, s.k)}, memory_of(s.w->type));
  const Tensor plain = torch::stable::contiguous(packed);
  cpu::unpack_linear(s, plain.const_data_ptr(), codes.mutable_data_ptr());
  return codes;
}

void Cpu::check_input(const LinearCall& call, const Tensor& packed, int64_t count) const {
  const LinearSpec& s = call.spec;
  if (s.input == InputMode::static_per_tensor) {
    const CodeType* const code = find_code_type(call.x.type);
    const bool is_unsigned = code && !code->is_signed();
    const int32_t zero = cpu::input_zero_point(packed.const_data_ptr());
    zero_points("x_zero_point", &zero, 1, is_unsigned || s.x_symmetric ? 0 : s.x_qmin,
                is_unsigned     ? code->qmax
                : s.x_symmetric ? 0
                                : s.x_qmax);
  }
  zero_points("x_zero_point", call.x_zero_point, count, s.x_qmin, s.x_qmax);
}

Tensor Cpu::widened(const Tensor& x, int64_t rows, int64_t columns) const {
  const Tensor dense_rows = torch::stable::contiguous(x);
  Tensor codes = empty({rows, columns}, ScalarType::Char);
  unpack_int4(static_cast<const uint8_t*>(dense_rows.const_data_ptr()), rows, columns,
              static_cast<int8_t*>(codes.mutable_data_ptr()));
  return codes;
}

void Cpu::linear(const LinearCall& call, const Tensor& x, const Tensor& packed, void* out) const {
  const LinearSpec& s = call.spec;
  Matrix m = call.x;
  if (is_packed(m.type)) {
    m.keep = widened(x, m.rows, s.k);
    m.data = m.keep.const_data_ptr();
    m.type = DType::s8;
    m.ld = s.k;
  }
  const auto run = [&](void* y, DType type) {
    cpu::linear(s, packed.const_data_ptr(), m.data, m.type, m.rows, m.ld, call.residual.data, call.residual.type,
                call.residual.ld, y, type, call.x_scale, call.x_zero_point);
  };
  if (!is_packed(call.out)) return run(out, call.out);
  Tensor codes = empty({m.rows, s.n}, ScalarType::Char);
  run(codes.mutable_data_ptr(), DType::s8);
  pack_int4(static_cast<const int8_t*>(codes.const_data_ptr()), m.rows, s.n, static_cast<uint8_t*>(out));
}

}  // namespace pyquant::bind
