// The fused quantised Linear on the CPU: packing of its weights, and the call.
#include "bind/linear_cpu.h"

#include <torch/csrc/stable/ops.h>

#include <cstring>

#include "bind/backend_cpu.h"
#include "bind/grouped_cpu.h"
#include "bind/quantise_ops.h"

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
  // Accumulators hold the term of the static zero point, of whichever codes.
  if (s.input == InputMode::static_per_tensor && call.x.type != DType::s32) {
    const CodeType* const code = find_code_type(call.x.type);
    const bool is_unsigned = code && !code->is_signed();
    const int32_t zero = cpu::input_zero_point(PackedMemory(packed).data());
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
  const PackedMemory memory(packed);
  Matrix m = call.x;
  if (is_packed(m.type)) {
    m.keep = widened(x, m.rows, s.k);
    m.data = m.keep.const_data_ptr();
    m.type = DType::s8;
    m.ld = s.k;
  }
  const auto run = [&](void* y, DType type) {
    if (m.type == DType::s32)
      return cpu::finish_linear(s, memory.data(), static_cast<const int32_t*>(m.data), m.rows, m.ld, call.x_scale,
                                call.residual.data, call.residual.type, call.residual.ld, y, type);
    cpu::linear(s, memory.data(), m.data, m.type, m.rows, m.ld, call.residual.data, call.residual.type,
                call.residual.ld, y, type, call.x_scale, call.x_zero_point);
  };
  if (!is_packed(call.out)) return run(out, call.out);
  Tensor codes = empty({m.rows, s.n}, ScalarType::Char);
  run(codes.mutable_data_ptr(), DType::s8);
  pack_int4(static_cast<const int8_t*>(codes.const_data_ptr()), m.rows, s.n, static_cast<uint8_t*>(out));
}

namespace {

// The chosen rows of a matrix, dense.
Tensor chosen_rows(const Matrix& x, ScalarType type, const GroupedCall& g) {
  Tensor out = empty_cpu({g.count, x.cols}, type);
  const int64_t bytes = bits_of(x.type) / 8;
  if (out.numel() != 0) cpu::gather_rows(x.data, x.ld * bytes, x.cols * bytes, g.rows, g.count, out.mutable_data_ptr());
  return out;
}

// Puts the chosen rows in the place of x. With dynamic inputs as codes: a row that several layers get is quantised
// once.
void choose_rows(GroupedCall& g, const Tensor& x) {
  LinearCall& call = g.call;
  const LinearSpec& s = call.spec;
  Tensor chosen;
  if (s.input == InputMode::static_per_tensor) {
    chosen = chosen_rows(call.x, x.scalar_type(), g);
  } else {
    const auto [codes, scale, zero_point] =
        QuantiseOps<Cpu>::quantize_dynamic(x, "per_token", 0, s.x_symmetric, s.x_qmin, s.x_qmax);
    chosen = chosen_rows(matrix(codes), ScalarType::Char, g);
    const auto of_rows = [&](const Tensor& values, ScalarType type) {
      Tensor kept = empty_cpu({g.count}, type);
      if (g.count > 0) cpu::gather_rows(values.const_data_ptr(), 4, 4, g.rows, g.count, kept.mutable_data_ptr());
      call.keep.push_back(kept);
      return kept.const_data_ptr();
    };
    call.x_scale = static_cast<const float*>(of_rows(scale, ScalarType::Float));
    if (!s.x_symmetric) call.x_zero_point = static_cast<const int32_t*>(of_rows(zero_point, ScalarType::Int));
  }
  call.x = matrix(chosen);
}

}  // namespace

Tensor grouped_linear_cpu(const Tensor& x, std::vector<Tensor> packed, const Tensor& ends, std::vector<int64_t> spec,
                          MaybeTensor rows, MaybeTensor x_scale, MaybeTensor x_zero_point,
                          std::optional<ScalarType> out_dtype, Text kernel) {
  if (!std::string(kernel).empty()) refuse("kernel", "'" + std::string(kernel) + "'", "'' on the CPU");
  GroupedCall g = grouped_call(x, packed, ends, spec, rows, out_dtype, x_scale, x_zero_point);
  LinearCall& call = g.call;
  Cpu::check_layout(call.spec);
  const std::vector<int64_t> counts = counts_of(g, packed.size(), call.x.rows);
  const Cpu on(x);
  std::vector<PackedMemory> memory;
  std::vector<const void*> buffers;
  int64_t present = 0;
  for (size_t i = 0; i < packed.size(); ++i) {
    buffers.push_back(memory.emplace_back(packed[i]).data());
    if (counts[i] > 0) on.check_input(call, packed[i], count_of(x_zero_point));
    present += counts[i];
  }
  if (g.rows) choose_rows(g, x);
  Tensor out = on.empty(call.out_shape, call.out_type);
  if (out.numel() == 0) return out;
  const int64_t row_bytes = call.spec.n * bits_of(call.out) / 8;
  auto* data = static_cast<char*>(out.mutable_data_ptr());
  std::memset(data + present * row_bytes, 0, static_cast<size_t>((g.count - present) * row_bytes));
  if (present > 0)
    cpu::grouped_linear(call.spec, buffers.data(), counts.data(), static_cast<int64_t>(counts.size()), call.x.data,
                        call.x.type, call.x.ld, data, call.out, call.x_scale, call.x_zero_point);
  return out;
}

}  // namespace pyquant::bind
