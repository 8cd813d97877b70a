// The fused convolution on the CPU: csrc/cpu/conv.cpp behind the checks of all backends.
#include "bind/conv_cpu.h"

#include "bind/backend_cpu.h"
#include "bind/conv_call.h"
#include "bind/cpu_tensor.h"

namespace pyquant::bind {

Tensor qconv2d_cpu(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
                   std::vector<int64_t> window, std::optional<ScalarType> out_dtype, MaybeTensor x_scale,
                   MaybeTensor x_zero_point) {
  ConvCall call = conv_call(x, packed, residual, spec, window, out_dtype, x_scale, x_zero_point);
  const LinearSpec& s = call.spec;
  Cpu::check_layout(s);
  LinearCall as_linear;  // what looks at zero points
  as_linear.spec = s;
  as_linear.x.type = call.operands.x_type;
  as_linear.x_zero_point = call.operands.x_zero_point;
  Cpu(x).check_input(as_linear, packed, count_of(x_zero_point));
  const Shape& y = call.out_shape;
  const bool last = call.operands.channels_last;
  Tensor out = last ? empty_cpu({y[0], y[2], y[3], y[1]}, call.out_type) : empty_cpu(y, call.out_type);
  if (out.numel() != 0) {
    call.operands.out = out.mutable_data_ptr();
    cpu::conv(s, PackedMemory(packed).data(), call.operands);
  }
  return last ? channels_first(out) : out;
}

}  // namespace pyquant::bind
