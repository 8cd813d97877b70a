#include "bind/rows_buffer.h"

namespace pyquant::bind {

void set_operands(const LinearCall& call, const RowsBuffer& b, GemmProblem* p, GemmOperands* o) {
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
  p->group_size = s.two_level ? 0 : s.group_size;
  p->step_size = s.two_level ? s.group_size : 0;
  o->x = call.x.data;
  o->w = b.base;
  if (s.two_level && s.layout == Layout::rows) o->w_step = b.section<uint8_t>(b.at.w_step);
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

Epilogue set_inputs(const LinearCall& call, const RowsBuffer& buffer, GemmProblem* p, GemmOperands* o) {
  const LinearSpec& s = call.spec;
  const bool dynamic = s.input == InputMode::dynamic_per_token;
  p->per_token_scale = p->per_token_zero_point = dynamic;
  p->has_zero_point = !dynamic || (call.x_scale ? call.x_zero_point != nullptr : !s.x_symmetric);
  o->x_scale = dynamic ? call.x_scale : buffer.x_scale();
  o->x_zero_point = dynamic ? call.x_zero_point : buffer.x_zero_point();
  Epilogue e;
  e.activation = s.activation;
  e.clamp_min = s.clamp_min;
  e.clamp_max = s.clamp_max;
  e.out_qmin = s.out_qmin;
  e.out_qmax = s.out_qmax;
  return e;
}

}  // namespace pyquant::bind
