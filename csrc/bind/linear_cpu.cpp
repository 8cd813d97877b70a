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

Tensor grouped_linear_cpu(const Tensor& x, std::vector<Tensor> packed, std::vector<int64_t> rows,
                          std::vector<int64_t> spec, MaybeTensor x_scale, MaybeTensor x_zero_point,
                          std::optional<ScalarType> out_dtype) {
  if (packed.empty() || packed.size() != rows.size())
    refuse("packed", std::to_string(packed.size()) + " buffers",
           "one for each of the " + std::to_string(rows.size()) + " numbers of rows, at least one");
  min_dim("x", x, 2);
  int64_t total = 0;
  for (const int64_t count : rows) {
    if (count < 0) refuse("rows", std::to_string(count), "numbers from 0");
    total += count;
  }
  if (x.dim() != 2 || total != x.size(0)) refuse("x", describe(x), std::to_string(total) + " rows, the sum of rows");
  std::vector<const void*> buffers;
  LinearCall call;
  for (const Tensor& one : packed) {  // every buffer is checked; what is said of x is the same each time
    call = linear_call(x, one, std::nullopt, spec, out_dtype, x_scale, x_zero_point);
    buffers.push_back(one.const_data_ptr());
  }
  const LinearSpec& s = call.spec;
  Cpu::check_layout(s);
  if (s.codes_out) refuse("spec", "a layer that gives codes", "one that gives floats");
  if (is_packed(call.x.type)) refuse("x", describe(x), "codes of one byte each");
  const Cpu on(x);
  for (const Tensor& one : packed) on.check_input(call, one, count_of(x_zero_point));
  Tensor out = on.empty(call.out_shape, call.out_type);
  if (out.numel() != 0)
    cpu::grouped_linear(s, buffers.data(), rows.data(), static_cast<int64_t>(rows.size()), call.x.data, call.x.type,
                        call.x.ld, out.mutable_data_ptr(), call.out, call.x_scale, call.x_zero_point);
  return out;
}

}  // namespace pyquant::bind
