// The fused convolution on CUDA: codes of whole images, padded (cuda/images.h), then one product whose kernel reads its
// rows through the window; or rows of patches for a kernel of matrices, where the plan says so. A window of one pixel
// needs neither. Groups of channels have one kernel of their own, whatever they are.
#include "bind/conv_cuda.h"

#include "bind/backend_cuda.h"
#include "bind/conv_call.h"
#include "bind/gemm_cuda.h"
#include "bind/rows_buffer.h"
#include "cuda/images.h"

namespace pyquant::bind {
namespace {

cuda::Images images_of(const ConvOperands& o) {
  return {o.x, o.x_type, o.batch, o.channels, o.height, o.width, o.channels_last};
}

// Where the window finds the codes of padded images.
ImageRows rows_of(const Window& w, const ConvOperands& o, const Shape& out_shape) {
  ImageRows rows;
  rows.channels = o.channels / w.groups;
  rows.taps = w.kernel[1];
  rows.out_height = out_shape[2];
  rows.out_width = out_shape[3];
  const int64_t line = w.room(1, o.width) * o.channels;
  rows.image_step = w.room(0, o.height) * line;
  const int64_t steps[2] = {line, o.channels};
  for (int axis = 0; axis < 2; ++axis) {
    rows.window_step[axis] = w.stride[axis] * steps[axis];
    rows.tap_step[axis] = w.dilation[axis] * steps[axis];
  }
  return rows;
}

// The convolution as a Linear of codes, whose scales a row are those of the images.
LinearCall as_linear(const ConvCall& call, int64_t rows) {
  const ConvOperands& o = call.operands;
  LinearCall linear;
  linear.spec = call.spec;
  linear.x.data = o.x;
  linear.x.type = DType::s8;
  linear.x.rows = rows;
  linear.x.cols = call.spec.k;
  linear.x.ld = o.channels;
  linear.residual.data = o.residual;
  linear.residual.type = o.residual_type;
  linear.residual.ld = call.spec.n;
  linear.out = o.out_type;
  return linear;
}

// What a call needs besides its result.
struct Parts {
  Scratch memory;
  int64_t codes = 0, ranges = 0, scale = 0, zero_point = 0, patches = 0, at_workspace = 0;
  cuda::Workspace workspace;
  cuda::Zeros counters() const {
    return workspace.counter_bytes > 0 ? workspace.zeros(memory.at<void>(at_workspace)) : cuda::Zeros{};
  }
};

// Codes of the images, and the step of each of its rows.
void lay_out_images(const ConvCall& call, const RowsBuffer& buffer, int64_t rows, bool has_zero_point,
                    const Parts& parts, const On& on) {
  const LinearSpec& s = call.spec;
  const ConvOperands& o = call.operands;
  const cuda::CodeRange range{s.x_qmin, s.x_qmax, s.x_symmetric};
  cuda::ImagesOut out;
  out.q = parts.memory.at<int8_t>(parts.codes);
  for (int i = 0; i < 4; ++i) out.padding[i] = o.window.padding[i];
  out.zeros = parts.counters();
  if (s.input == InputMode::static_per_tensor)
    return cuda::quantize_images(images_of(o), buffer.x_scale(), buffer.x_zero_point(), true, range, out, on.context);
  out.row_scale = parts.memory.at<float>(parts.scale);
  out.row_zero_point = has_zero_point ? parts.memory.at<int32_t>(parts.zero_point) : nullptr;
  out.rows = rows;
  if (o.x_scale) return cuda::quantize_images(images_of(o), o.x_scale, o.x_zero_point, false, range, out, on.context);
  cuda::quantize_images_dynamic(images_of(o), range, out, parts.memory.at<void>(parts.ranges), on.context);
}

}  // namespace

Tensor qconv2d_cuda(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
                    std::vector<int64_t> window, std::optional<ScalarType> out_dtype, MaybeTensor x_scale,
                    MaybeTensor x_zero_point) {
  const On on(x);
  ConvCall call = conv_call(x, packed, residual, spec, window, out_dtype, x_scale, x_zero_point);
  const LinearSpec& s = call.spec;
  ConvOperands& images = call.operands;
  const Window& w = images.window;
  Cuda::check_layout(s);
  if (w.groups > 1 && s.layout != Layout::rows)
    refuse("spec", "layout 'rows_blocked128' and " + std::to_string(w.groups) + " groups", "layout 'rows' with groups");
  const Shape& y = call.out_shape;
  const int64_t rows = y[2] * y[3], m = y[0] * rows;
  const bool is_either = !images.channels_last && (s.n <= 1 || rows <= 1 || m == 0);  // the same memory in both formats
  Tensor out = is_either ? empty(x, y, call.out_type) : empty(x, {y[0], y[2], y[3], y[1]}, call.out_type);
  const auto finished = [&] {
    if (is_either) return out;
    return images.channels_last ? channels_first(out) : compact(channels_first(out));
  };
  if (out.numel() == 0) return finished();

  const RowsBuffer buffer(s, packed);
  const bool dynamic = s.input == InputMode::dynamic_per_token;
  LinearCall linear = as_linear(call, m);
  // Present or absent is all that the problem asks of them.
  linear.x_scale = dynamic ? buffer.x_scale() : nullptr;
  const bool has_zero_points = images.x_scale ? images.x_zero_point != nullptr : !s.x_symmetric;
  linear.x_zero_point = dynamic && has_zero_points ? buffer.x_zero_point() : nullptr;

  GemmProblem p;
  GemmOperands o;
  set_operands(linear, buffer, &p, &o);
  o.out = out.mutable_data_ptr();
  const Epilogue e = set_inputs(linear, buffer, &p, &o);
  // Codes that lie as the kernels read them stay where they are.
  const bool is_padded = (w.padding[0] | w.padding[1] | w.padding[2] | w.padding[3]) != 0;
  const bool is_ready = images.x_type == DType::s8 && images.channels_last && !is_padded && !dynamic;
  const ImageRows image = rows_of(w, images, y);
  if (!w.is_pointwise()) p.image = image;
  const int64_t codes = y[0] * w.room(0, images.height) * w.room(1, images.width) * images.channels;
  if (!is_ready) o.x = nullptr;         // new memory, on a boundary of 256 bytes
  const bool in_groups = w.groups > 1;  // one kernel for all of them
  const Route route =
      in_groups ? Route{Form::given, nullptr, p} : route_of(w.is_pointwise() ? Entry::linear : Entry::conv, p, o, on);

  Parts parts;
  if (!is_ready) parts.codes = parts.memory.add(codes);
  if (dynamic && !images.x_scale) parts.ranges = parts.memory.add(cuda::images_workspace_bytes(images_of(images)));
  if (dynamic) parts.scale = parts.memory.add(4 * m);
  if (dynamic && p.has_zero_point) parts.zero_point = parts.memory.add(4 * m);
  const bool rewrites = route.form != Form::given;  // bytes (one pixel a window) or patches
  if (rewrites) parts.patches = parts.memory.add(m * route.problem.ldx);
  if (!in_groups) parts.workspace = workspace_of(route.row, route.problem, o, on);
  parts.at_workspace = parts.memory.add(parts.workspace.bytes);
  parts.memory.make(x);

  if (parts.workspace.bytes > 0) o.workspace = parts.memory.at<void>(parts.at_workspace);
  o.x = is_ready ? images.x : parts.memory.at<int8_t>(parts.codes);
  if (!is_ready) {
    lay_out_images(call, buffer, rows, p.has_zero_point, parts, on);
    o.counters_are_zero = true;
  }
  if (dynamic) {
    o.x_scale = parts.memory.at<float>(parts.scale);
    o.x_zero_point = p.has_zero_point ? parts.memory.at<int32_t>(parts.zero_point) : nullptr;
  }
  if (rewrites) {
    auto* patches = parts.memory.at<int8_t>(parts.patches);
    cuda::gather_patches(static_cast<const int8_t*>(o.x), image, m, s.k, patches, route.problem.ldx, on.context);
    o.x = patches;
  }
  align(&p, o);
  if (in_groups)
    cuda::grouped_conv(p, w.groups, o, e, on.context);
  else
    cuda::gemm(*route.row, route.problem, o, e, on.context);
  return finished();
}

}  // namespace pyquant::bind
