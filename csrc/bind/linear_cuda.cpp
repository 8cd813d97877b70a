// The fused quantised Linear on CUDA: activations to codes (or codes as they come), then one GEMM that writes the
// result with the caller's own row length. The buffer `packed` is plain padded rows (core/rows_layout.h). Layers of one
// spec on rows of their own are the same two launches, whatever their number.
#include "bind/linear_cuda.h"

#include "bind/backend_cuda.h"
#include "bind/gemm_cuda.h"
#include "bind/rows_buffer.h"
#include "cuda/expert_rows.h"
#include "plan/accept.h"

namespace pyquant::bind {
namespace {

// Rows of many layers. chosen: which rows of x are meant, in their order; null: all.
struct Rows {
  const int64_t* chosen = nullptr;
  int64_t count = 0;
  int64_t layers = 0;  // 0: one layer
};

// What a call needs besides its result: padded rows of codes, with dynamic inputs a scale and perhaps a zero point a
// row (of uint8 codes: one shifted zero point), the codes two a byte, and the row's workspace.
struct Parts {
  Scratch memory;
  int64_t codes = 0, scale = 0, zero_point = 0, nibbles = 0, at_workspace = 0;
  cuda::Workspace workspace;

  Parts(const Route& route, const LinearCall& call, const RowsBuffer& b, const GemmOperands& o, const On& on,
        const Tensor& like) {
    const int64_t rows = route.problem.m;
    const bool dynamic = is_float(call.x.type) && call.spec.input == InputMode::dynamic_per_token;
    if (route.form != Form::given) {
      codes = memory.add(rows * b.at.k_pad);
      if (dynamic) scale = memory.add(4 * rows);
      if (dynamic ? route.problem.has_zero_point : call.x.type == DType::u8) zero_point = memory.add(4 * rows);
    }
    if (route.form == Form::nibbles) nibbles = memory.add(rows * b.at.k_pad / 2);
    workspace = workspace_of(route.row, route.problem, o, on);
    at_workspace = memory.add(workspace.bytes);
    memory.make(like);
  }
  cuda::Zeros counters() const {
    return workspace.counter_bytes > 0 ? workspace.zeros(memory.at<void>(at_workspace)) : cuda::Zeros{};
  }
};

void quantise_rows(const LinearCall& call, const Rows& of, const RowsBuffer& b, const On& on, const Parts& parts,
                   bool has_zero_point, GemmOperands* o) {
  const LinearSpec& s = call.spec;
  const Matrix& m = call.x;
  const cuda::FloatMatrix rows{m.data, m.type, m.rows, m.cols, m.ld};
  const cuda::CodeRange range{s.x_qmin, s.x_qmax, s.x_symmetric};
  const cuda::QuantizeOut out{parts.memory.at<int8_t>(parts.codes), b.at.k_pad, false, nullptr, parts.counters()};
  if (s.input == InputMode::static_per_tensor && of.layers > 0)
    return cuda::quantize_expert_rows(
        rows, {b.x_scale(), b.x_zero_point(), o->expert_ends, o->expert_shifts, of.layers, of.chosen}, of.count, range,
        out, on.context);
  if (s.input == InputMode::static_per_tensor)
    return cuda::quantize(rows, Granularity::tensor, 0, b.x_scale(), b.x_zero_point(), range, out, on.context);
  auto* scale = parts.memory.at<float>(parts.scale);
  auto* zero_point = has_zero_point ? parts.memory.at<int32_t>(parts.zero_point) : nullptr;
  if (of.chosen)
    cuda::quantize_chosen_rows(rows, of.chosen, of.count, range, {scale, zero_point}, out, on.context);
  else
    cuda::quantize_dynamic(rows, Granularity::rows, 0, range, {scale, zero_point}, out, nullptr, on.context);
  o->x_scale = scale;
  o->x_zero_point = zero_point;
}

// The same from codes; uint8 codes become signed with their zero point.
void arrange_rows(const LinearCall& call, const RowsBuffer& b, const On& on, const Parts& parts, GemmOperands* o) {
  const Matrix& m = call.x;
  auto* shifted = m.type == DType::u8 ? parts.memory.at<int32_t>(parts.zero_point) : nullptr;
  cuda::arrange_codes(m.data, m.type, m.rows, call.spec.k, m.ld, parts.memory.at<int8_t>(parts.codes), b.at.k_pad,
                      b.x_zero_point(), shifted, parts.counters(), on.context);
  if (shifted) o->x_zero_point = shifted;
}

// The activations in the form that the route requires.
void prepare(const Route& route, const LinearCall& call, const Rows& of, const RowsBuffer& b, const On& on,
             const Parts& parts, GemmOperands* o) {
  if (parts.workspace.bytes > 0) o->workspace = parts.memory.at<void>(parts.at_workspace);
  if (route.form == Form::given) return;
  o->counters_are_zero = true;  // whichever kernel writes the codes clears them
  if (is_float(call.x.type))
    quantise_rows(call, of, b, on, parts, route.problem.has_zero_point, o);
  else
    arrange_rows(call, b, on, parts, o);
  o->x = parts.memory.at<int8_t>(parts.codes);
  if (route.form != Form::nibbles) return;
  auto* nibbles = parts.memory.at<uint8_t>(parts.nibbles);
  cuda::pack_int4(static_cast<const int8_t*>(o->x), call.x.rows, b.at.k_pad, nibbles, on.context);
  o->x = nibbles;
}

// Bytes from the first buffer to each. All lie alike to the 16 bytes that kernels copy at a time.
std::vector<int64_t> shifts_of(const std::vector<Tensor>& packed) {
  std::vector<int64_t> shifts;
  const auto first = reinterpret_cast<intptr_t>(packed[0].const_data_ptr());
  for (const Tensor& one : packed) {
    shifts.push_back(reinterpret_cast<intptr_t>(one.const_data_ptr()) - first);
    if (shifts.back() % 16 != 0)
      refuse("packed", "buffers " + std::to_string(shifts.back()) + " bytes apart", "multiples of 16 bytes apart");
  }
  return shifts;
}

// The row of that name in place of the route's.
void take_named(const std::string& name, const On& on, Route* route) {
  const Row* row = find_row(name.c_str());
  if (!row) refuse("kernel", "'" + name + "'", "a name of the kernel table, as ops.kernels() lists them");
  const Refusal refusal = accept(*row, route->problem, false, device_info(on));
  if (!refusal.ok() || !row->compiled)
    throw std::runtime_error("pyquant: no kernel of that name takes the problem\n" + name + ": " +
                             (refusal.ok() ? "has no machine code in this build" : text_of(refusal)));
  route->row = row;
}

}  // namespace

Tensor grouped_linear_cuda(const Tensor& x, std::vector<Tensor> packed, const Tensor& ends, std::vector<int64_t> spec,
                           MaybeTensor rows, MaybeTensor x_scale, MaybeTensor x_zero_point,
                           std::optional<ScalarType> out_dtype, Text kernel) {
  const GroupedCall g = grouped_call(x, packed, ends, spec, rows, out_dtype, x_scale, x_zero_point);
  const LinearCall& call = g.call;
  const LinearSpec& s = call.spec;
  Cuda::check_layout(s);
  if (call.x.type == DType::u8) refuse("x", describe(x), "floats or int8 codes on CUDA");
  const On on(x);
  Tensor out = empty(x, call.out_shape, call.out_type);
  if (out.numel() == 0) return out;
  const RowsBuffer buffer(s, packed[0]);
  const std::vector<int64_t> shifts = shifts_of(packed);
  GemmProblem p;
  GemmOperands o;
  set_operands(call, buffer, &p, &o);
  p.m = g.count;
  p.experts = static_cast<int64_t>(packed.size());
  o.expert_ends = g.ends;
  o.expert_shifts = shifts.data();
  o.out = out.mutable_data_ptr();
  const Epilogue e = set_inputs(call, buffer, &p, &o);
  Route route = route_of(Entry::linear, p, o, on);
  if (!kernel.empty()) take_named(kernel, on, &route);
  const Parts parts(route, call, buffer, o, on, x);
  prepare(route, call, {g.rows, g.count, p.experts}, buffer, on, parts, &o);
  cuda::gemm(*route.row, route.problem, o, e, on.context);
  return out;
}

void Cuda::check_layout(const LinearSpec& s) {
  if (s.layout == Layout::cpu_blocked)
    refuse("spec", "layout 'cpu_blocked'", "layout 'rows' or 'rows_blocked128' on CUDA");
}

void Cuda::linear(const LinearCall& call, const Tensor& x, const Tensor& packed, void* out) const {
  const LinearSpec& s = call.spec;
  if (call.x.type == DType::s32) refuse("x", describe(x), "floats or codes on CUDA");
  if (call.out == DType::s32) refuse("out_dtype", "int32", "a result of the whole layer on CUDA; gemm gives int32");
  const RowsBuffer buffer(s, packed);
  GemmProblem p;
  GemmOperands o;
  set_operands(call, buffer, &p, &o);
  o.out = out;
  const Epilogue e = set_inputs(call, buffer, &p, &o);
  const Route route = route_of(Entry::linear, p, o, on, packed_type(s.x_qmin, s.x_qmax) != nullptr);
  const Parts parts(route, call, buffer, o, on, x);
  prepare(route, call, {}, buffer, on, parts, &o);
  cuda::gemm(*route.row, route.problem, o, e, on.context);
}

}  // namespace pyquant::bind
