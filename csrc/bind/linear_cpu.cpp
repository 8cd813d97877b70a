// The fused quantised Linear on the CPU: packing of its weights, and the call.
#include "bind/linear_cpu.h"

#include <torch/csrc/stable/ops.h>

#include "bind/cpu_tensor.h"
#include "cpu/cpu.h"

namespace pyquant::bind {
namespace {

void own_layout(const LinearSpec& s) {
  if (s.layout != Layout::cpu_blocked) refuse("spec", "a layout of CUDA", "layout 'cpu_blocked' on the CPU");
}

}  // namespace

Tensor pack_linear_cpu(const Tensor& w, const Tensor& w_scale, MaybeTensor bias, MaybeTensor x_scale,
                       MaybeTensor x_zero_point, MaybeTensor out_scale, MaybeTensor out_zero_point,
                       std::vector<int64_t> spec) {
  const LinearSpec s = linear_spec(spec);
  own_layout(s);
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
  own_layout(s);
  dtype_in("packed", packed, {ScalarType::Byte});
  shape_is("packed", packed, {static_cast<int64_t>(packed_bytes(s))});
  const bool four = s.w_bits == 4;
  Tensor codes = empty_cpu({s.n, four ? (s.k + 1) / 2 : s.k}, four ? ScalarType::Byte : ScalarType::Char);
  const Tensor plain = torch::stable::contiguous(packed);
  cpu::unpack_linear(s, plain.const_data_ptr(), codes.mutable_data_ptr());
  return codes;
}

Tensor qlinear_cpu(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
                   std::optional<ScalarType> out_dtype, MaybeTensor x_scale, MaybeTensor x_zero_point) {
  const LinearCall call = linear_call(x, packed, residual, spec, out_dtype, x_scale, x_zero_point);
  own_layout(call.spec);
  const LinearSpec& s = call.spec;
  const bool is_unsigned = call.x.type == DType::u8;
  if (s.input == InputMode::static_per_tensor) {
    const int32_t zero = cpu::input_zero_point(packed.const_data_ptr());
    zero_points("x_zero_point", &zero, 1, is_unsigned || s.x_symmetric ? 0 : s.x_qmin,
                is_unsigned     ? 255
                : s.x_symmetric ? 0
                                : s.x_qmax);
  }
  zero_points("x_zero_point", call.x_zero_point, count_of(x_zero_point), s.x_qmin, s.x_qmax);
  Tensor out = empty_cpu(call.out_shape, call.out_type);
  if (out.numel() == 0) return out;
  Matrix m = call.x;
  if (m.type == DType::s4) {  // the kernels take a code a byte
    const Tensor dense_rows = torch::stable::contiguous(x);
    m.keep = empty_cpu({m.rows, s.k}, ScalarType::Char);
    cpu::unpack_int4(static_cast<const uint8_t*>(dense_rows.const_data_ptr()), m.rows, s.k,
                     static_cast<int8_t*>(m.keep.mutable_data_ptr()));
    m.data = m.keep.const_data_ptr();
    m.type = DType::s8;
    m.ld = s.k;
  }
  const bool out_packed = call.out == DType::s4;
  Tensor codes = out_packed ? empty_cpu({m.rows, s.n}, ScalarType::Char) : out;
  cpu::linear(s, packed.const_data_ptr(), m.data, m.type, m.rows, m.ld, call.residual.data, call.residual.type,
              call.residual.ld, codes.mutable_data_ptr(), out_packed ? DType::s8 : call.out, call.x_scale,
              call.x_zero_point);
  if (out_packed)
    cpu::pack_int4(static_cast<const int8_t*>(codes.const_data_ptr()), m.rows, s.n,
                   static_cast<uint8_t*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace pyquant::bind
