// The fused quantised Linear on CUDA: activations to codes (or codes as they come), then one GEMM that writes the
// result with the caller's own row length. The buffer `packed` is plain padded rows (core/rows_layout.h).
#include "bind/backend_cuda.h"
#include "bind/gemm_cuda.h"
#include "core/rows_layout.h"

namespace pyquant::bind {
namespace {

// The sections of a packed buffer.
struct Buffer {
  RowsLayout at;
  const char* base;
  Buffer(const LinearSpec& s, const Tensor& packed)
      : at(rows_layout(s)), base(static_cast<const char*>(packed.const_data_ptr())) {}
  template <class T>
  const T* section(int64_t offset) const {
    return reinterpret_cast<const T*>(base + offset);
  }
  const float* x_scale() const { return section<float>(at.scalars); }
  const int32_t* x_zero_point() const { return section<int32_t>(at.scalars + 4); }
  const float* out_scale() const { return section<float>(at.scalars + 8); }
  const int32_t* out_zero_point() const { return section<int32_t>(at.scalars + 12); }
};

// The problem as the caller has it.
void set_operands(const LinearCall& call, const Buffer& b, GemmProblem* p, GemmOperands* o) {
  const LinearSpec& s = call.spec;
  p->m = call.x.rows;
  p->n = s.n;
  p->k = s.k;
  p->x = call.x.type;
  p->x_packed = is_packed(call.x.type);
  p->ldx = call.x.ld;
  p->w = s.w->type;
  p->out = call.out;
  p->w_layout = s.layout == Layout::rows_blocked128 ? WeightLayout::blocked128 : WeightLayout::natural;
  p->ldw = b.at.k_pad;
  p->ldo = whole_bytes(call.out, s.n);
  p->group_size = s.group_size;
  o->x = call.x.data;
  o->w = b.base;
  o->w_scale = b.section<float>(b.at.w_scale);
  o->w_sum = b.section<int32_t>(b.at.w_sum);
  o->bias = s.has_bias ? b.section<float>(b.at.bias) : nullptr;
  if (s.codes_out) {
    o->out_scale = b.out_scale();
    o->out_zero_point = b.out_zero_point();
  }
  if (call.residual.data) {
    o->residual = call.residual.data;
    p->residual = call.residual.type;
    p->ldr = call.residual.ld;
  }
}

// Padded rows of signed bytes from floats: codes, and with dynamic inputs a scale and a zero point a row, all owned by
// `keep`.
const int8_t* quantise_rows(const Tensor& x, const LinearCall& call, const Buffer& b, const On& on,
                            std::vector<Tensor>* keep, bool has_zero_point, GemmOperands* o) {
  const LinearSpec& s = call.spec;
  const Matrix& m = call.x;
  Tensor codes = empty(x, {m.rows, b.at.k_pad}, ScalarType::Char);
  auto* q = static_cast<int8_t*>(codes.mutable_data_ptr());
  keep->push_back(codes);
  const cuda::FloatMatrix rows{m.data, m.type, m.rows, m.cols, m.ld};
  const cuda::CodeRange range{s.x_qmin, s.x_qmax, s.x_symmetric};
  const cuda::QuantizeOut out{q, b.at.k_pad};
  if (s.input == InputMode::static_per_tensor) {
    cuda::quantize(rows, Granularity::tensor, 0, b.x_scale(), b.x_zero_point(), range, out, on.context);
    return q;
  }
  Tensor scale = empty(x, {m.rows}, ScalarType::Float), zero_point = empty(x, {m.rows}, ScalarType::Int);
  o->x_scale = static_cast<const float*>(scale.const_data_ptr());
  if (has_zero_point) o->x_zero_point = static_cast<const int32_t*>(zero_point.const_data_ptr());
  cuda::quantize_dynamic(
      rows, Granularity::rows, 0, range,
      {static_cast<float*>(scale.mutable_data_ptr()), static_cast<int32_t*>(zero_point.mutable_data_ptr())}, out,
      nullptr, on.context);
  keep->insert(keep->end(), {scale, zero_point});
  return q;
}

// The same from codes; uint8 codes become signed with their zero point.
const int8_t* arrange_rows(const Tensor& x, const LinearCall& call, const Buffer& b, const On& on,
                           std::vector<Tensor>* keep, GemmOperands* o) {
  const Matrix& m = call.x;
  Tensor codes = empty(x, {m.rows, b.at.k_pad}, ScalarType::Char), zero_point = empty(x, {1}, ScalarType::Int);
  auto* q = static_cast<int8_t*>(codes.mutable_data_ptr());
  auto* shifted = m.type == DType::u8 ? static_cast<int32_t*>(zero_point.mutable_data_ptr()) : nullptr;
  cuda::arrange_codes(m.data, m.type, m.rows, call.spec.k, m.ld, q, b.at.k_pad, b.x_zero_point(), shifted, on.context);
  if (shifted) o->x_zero_point = shifted;
  keep->insert(keep->end(), {codes, zero_point});
  return q;
}

// The activations in the form that the route requires.
void prepare(const Route& route, const Tensor& x, const LinearCall& call, const Buffer& b, const On& on,
             std::vector<Tensor>* keep, GemmOperands* o) {
  if (route.form == Form::given) return;
  const bool are_floats = is_float(call.x.type);
  const int8_t* q = are_floats ? quantise_rows(x, call, b, on, keep, route.problem.has_zero_point, o)
                               : arrange_rows(x, call, b, on, keep, o);
  o->x = q;
  if (route.form == Form::nibbles) o->x = pack_rows(x, q, call.x.rows, b.at.k_pad, on, keep);
}

}  // namespace

void Cuda::check_layout(const LinearSpec& s) {
  if (s.layout == Layout::cpu_blocked)
    refuse("spec", "layout 'cpu_blocked'", "layout 'rows' or 'rows_blocked128' on CUDA");
}

void Cuda::linear(const LinearCall& call, const Tensor& x, const Tensor& packed, void* out) const {
  const LinearSpec& s = call.spec;
  const Buffer buffer(s, packed);
  GemmProblem p;
  GemmOperands o;
  std::vector<Tensor> keep;
  set_operands(call, buffer, &p, &o);
  o.out = out;
  const bool dynamic = s.input == InputMode::dynamic_per_token;
  p.per_token_scale = p.per_token_zero_point = dynamic;
  p.has_zero_point = !dynamic || (call.x_scale ? call.x_zero_point != nullptr : !s.x_symmetric);
  o.x_scale = dynamic ? call.x_scale : buffer.x_scale();
  o.x_zero_point = dynamic ? call.x_zero_point : buffer.x_zero_point();
  Epilogue e;
  e.activation = s.activation;
  e.clamp_min = s.clamp_min;
  e.clamp_max = s.clamp_max;
  e.out_qmin = s.out_qmin;
  e.out_qmax = s.out_qmax;
  const Route route = route_of(Entry::linear, p, o, on, packed_type(s.x_qmin, s.x_qmax) != nullptr);
  prepare(route, x, call, buffer, on, &keep, &o);
  run(route.row, route.problem, o, e, x, on);
}

}  // namespace pyquant::bind
