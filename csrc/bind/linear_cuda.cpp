// The fused quantised Linear on CUDA: activations to codes (or codes as they come), then one GEMM that writes the
// result with the caller's own row length. The buffer `packed` is plain padded rows (core/rows_layout.h).
#include "bind/linear_cuda.h"

#include "bind/gemm_cuda.h"
#include "core/rows_layout.h"
#include "plan/accept.h"

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

// Everything but the activations.
void set_weights(const LinearCall& call, const Buffer& b, GemmProblem* p, GemmOperands* o) {
  const LinearSpec& s = call.spec;
  p->m = call.x.rows;
  p->n = s.n;
  p->w = s.w_bits == 4 ? DType::s4 : DType::s8;
  p->out = call.out;
  p->w_layout = s.layout == Layout::rows_blocked128 ? WeightLayout::blocked128 : WeightLayout::natural;
  p->ldw = b.at.k_pad;
  p->ldo = call.out == DType::s4 ? (s.n + 1) / 2 * 2 : s.n;
  p->group_size = s.group_size;
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

// Rows of codes that every tensor-core row can read: signed bytes, k_pad to a row. Zero codes meet the padding's zero
// weights; group scales end at k, which their rows step through in whole groups.
void set_padded(const LinearSpec& s, const RowsLayout& at, const int8_t* q, GemmProblem* p, GemmOperands* o) {
  o->x = q;
  p->x = DType::s8;
  p->x_packed = false;
  p->ldx = at.k_pad;
  p->k = at.k_pad;
  if (s.group_size || p->k > k_bound(*p)) p->k = s.k;
}

// The choice for padded rows. Codes of 4 bits are also offered as such, a byte or a nibble each: some rows multiply
// them faster.
const Row* choose_padded(const Tensor& x, const LinearSpec& s, const RowsLayout& at, const int8_t* q, const On& on,
                         std::vector<Tensor>* keep, GemmProblem* p, GemmOperands* o) {
  set_padded(s, at, q, p, o);
  const Row* best = choose(p, *o, on);
  if (s.x_qmin < -8 || s.x_qmax > 7) return best;
  GemmProblem bytes = *p, nibbles = *p;
  bytes.x = nibbles.x = DType::s4;
  nibbles.x_packed = true;
  if (const Row* as_bytes = choose(&bytes, *o, on); cost_us(as_bytes, bytes, on) < cost_us(best, *p, on)) {
    best = as_bytes;
    *p = bytes;
  }
  GemmOperands packed = *o;
  packed.x = nullptr;  // memory to come, 16-byte aligned as at.k_pad / 2 is
  const Row* as_nibbles = choose(&nibbles, packed, on);
  if (cost_us(as_nibbles, nibbles, on) + kPassUs < cost_us(best, *p, on)) {
    Tensor codes = empty(x, {p->m, at.k_pad / 2}, ScalarType::Byte);
    auto* to = static_cast<uint8_t*>(codes.mutable_data_ptr());
    cuda::pack_int4(q, p->m, at.k_pad, to, on.context);
    keep->push_back(codes);
    best = as_nibbles;
    *p = nibbles;
    o->x = to;
  }
  return best;
}

// Quantises float rows; `keep` owns codes, scales and zero points.
const Row* quantise_rows(const Tensor& x, const LinearCall& call, const Buffer& b, const On& on,
                         std::vector<Tensor>* keep, GemmProblem* p, GemmOperands* o) {
  const LinearSpec& s = call.spec;
  const Matrix& m = call.x;
  Tensor codes = empty(x, {m.rows, b.at.k_pad}, ScalarType::Char);
  auto* q = static_cast<int8_t*>(codes.mutable_data_ptr());
  const cuda::FloatMatrix rows{m.data, m.type, m.rows, m.cols, m.ld};
  const cuda::CodeRange range{s.x_qmin, s.x_qmax, s.x_symmetric};
  const cuda::QuantizeOut out{q, b.at.k_pad};
  if (s.input == InputMode::dynamic_per_token) {
    Tensor scale = empty(x, {m.rows}, ScalarType::Float), zero_point = empty(x, {m.rows}, ScalarType::Int);
    o->x_scale = static_cast<const float*>(scale.const_data_ptr());
    if (p->has_zero_point) o->x_zero_point = static_cast<const int32_t*>(zero_point.const_data_ptr());
    cuda::quantize_dynamic(
        rows, Granularity::rows, 0, range,
        {static_cast<float*>(scale.mutable_data_ptr()), static_cast<int32_t*>(zero_point.mutable_data_ptr())}, out,
        nullptr, on.context);
    keep->insert(keep->end(), {scale, zero_point});
  } else {
    cuda::quantize(rows, Granularity::tensor, 0, b.x_scale(), b.x_zero_point(), range, out, on.context);
  }
  keep->push_back(codes);
  return choose_padded(x, s, b.at, q, on, keep, p, o);
}

// Codes as they come where a fast row takes them so; else arranged first, which costs one pass over x.
const Row* take_codes(const Tensor& x, const LinearCall& call, const Buffer& b, const On& on, std::vector<Tensor>* keep,
                      GemmProblem* p, GemmOperands* o) {
  const LinearSpec& s = call.spec;
  const Matrix& m = call.x;
  p->k = s.k;
  o->x = m.data;
  p->x = m.type;
  p->x_packed = m.type == DType::s4;
  p->ldx = m.ld;
  const Row* as_they_come = choose(p, *o, on);
  const auto is_fast = [](const Row* row) { return row && row->facts().engine != Engine::byte_wise; };
  GemmProblem arranged = *p;
  GemmOperands to_come = *o;
  set_padded(s, b.at, nullptr, &arranged, &to_come);
  if (is_fast(as_they_come) || (as_they_come && !is_fast(choose(&arranged, to_come, on)))) return as_they_come;
  Tensor codes = empty(x, {m.rows, b.at.k_pad}, ScalarType::Char);
  Tensor zero_point = empty(x, {1}, ScalarType::Int);
  auto* q = static_cast<int8_t*>(codes.mutable_data_ptr());
  auto* shifted = m.type == DType::u8 ? static_cast<int32_t*>(zero_point.mutable_data_ptr()) : nullptr;
  cuda::arrange_codes(m.data, m.type, m.rows, s.k, m.ld, q, b.at.k_pad, b.x_zero_point(), shifted, on.context);
  if (shifted) o->x_zero_point = shifted;
  keep->insert(keep->end(), {codes, zero_point});
  return choose_padded(x, s, b.at, q, on, keep, p, o);
}

}  // namespace

Tensor qlinear_cuda(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
                    std::optional<ScalarType> out_dtype, MaybeTensor x_scale, MaybeTensor x_zero_point) {
  const LinearCall call = linear_call(x, packed, residual, spec, out_dtype, x_scale, x_zero_point);
  const LinearSpec& s = call.spec;
  if (s.layout == Layout::cpu_blocked)
    refuse("spec", "layout 'cpu_blocked'", "layout 'rows' or 'rows_blocked128' on CUDA");
  const On on(x);
  Tensor out = empty(x, call.out_shape, call.out_type);
  if (out.numel() == 0) return out;
  const Buffer buffer(s, packed);
  GemmProblem p;
  GemmOperands o;
  std::vector<Tensor> keep;
  set_weights(call, buffer, &p, &o);
  o.out = out.mutable_data_ptr();
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
  const auto prepare = is_float(call.x.type) ? quantise_rows : take_codes;
  const Row* row = prepare(x, call, buffer, on, &keep, &p, &o);
  run(row, p, o, e, x, on);
  return out;
}

}  // namespace pyquant::bind
