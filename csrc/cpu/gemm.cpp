// Integer GEMM on plain row-major operands: the engine of layer.h with weights packed on the way.
#include "cpu/layer.h"

#include "core/epilogue_math.h"

namespace pyquant::cpu {

void gemm(const GemmProblem& p, const GemmOperands& o, const Epilogue& epilogue) {
  Layer layer;
  layer.m = p.m;
  layer.n = p.n;
  layer.extent = extent_of(p.k, p.group_size, p.w);
  layer.rows.x = o.x;
  layer.rows.type = p.x == DType::u8 ? DType::u8 : DType::s8;  // s4 codes travel one per byte
  layer.rows.ld = p.ldx;
  layer.rows.zero_point = o.x_zero_point;
  layer.rows.zero_point_step = p.per_token_zero_point ? 1 : 0;
  layer.plain = true;
  layer.plain_weights = {o.w, p.w, columns_of(p.w, p.ldw)};
  layer.plain_scale = o.w_scale;
  layer.plain_bias = o.bias;
  // One scale for the whole input is a single product with each channel's; otherwise it is a step of its own.
  if (o.x_scale && !p.per_token_scale && !layer.extent.grouped) {
    layer.plain_scale_factor = *o.x_scale;
  } else {
    layer.rows.scale = o.x_scale;
    layer.rows.scale_step = p.per_token_scale ? 1 : 0;
  }
  layer.tile.activation = epilogue.activation;
  layer.tile.clamp_min = epilogue.clamp_min;
  layer.tile.clamp_max = epilogue.clamp_max;
  layer.tile.residual = o.residual;
  layer.tile.residual_type = p.residual;
  layer.tile.ldr = p.ldr;
  layer.tile.out = o.out;
  layer.tile.out_type = p.out;
  layer.tile.ldo = p.ldo;
  if (p.out == DType::s8) {
    layer.tile.out_recip = scale_recip(o.out_scale ? *o.out_scale : 1.f);
    layer.tile.out_zero_point = o.out_zero_point ? *o.out_zero_point : 0;
    layer.tile.out_qmin = epilogue.out_qmin;
    layer.tile.out_qmax = epilogue.out_qmax;
  }
  run(layer);
}

}  // namespace pyquant::cpu
