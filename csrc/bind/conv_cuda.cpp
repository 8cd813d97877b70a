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

constexpr int64_t kMostRows = kMaxSize - 1025;  // kernels round up to a tile

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

// Places in an image are counted in 32 bits, and so are rows.
void check_sizes(const ConvOperands& o, int64_t rows) {
  const int64_t height = o.window.room(0, o.height), width = o.window.room(1, o.width);
  if (1.0 * height * width * o.channels >= 1.0 * kMaxSize)  // the product may be beyond 64 bits
    refuse("x",
           "images of " + std::to_string(o.channels) + " x " + std::to_string(height) + " x " + std::to_string(width) +
               " numbers with their padding",
           "less than " + std::to_string(kMaxSize) + " on CUDA");
  if (rows > kMostRows)
    refuse("x", std::to_string(rows) + " pixels of results", "at most " + std::to_string(kMostRows) + " on CUDA");
}

// One call: what it multiplies and by which kernel, and what it needs besides its result.
class Convolution {
 public:
  Convolution(const ConvCall& call, const Tensor& packed, void* out, const On& on)
      : call_(call),
        on_(on),
        buffer_(call.spec, packed),
        rows_(call.out_shape[2] * call.out_shape[3]),
        image_(rows_of(images().window, images(), call.out_shape)) {
    const Window& w = images().window;
    LinearCall linear = as_linear(call, call.out_shape[0] * rows_);
    // Present or absent is all that the problem asks of them.
    const bool has_zero_points = images().x_scale ? images().x_zero_point != nullptr : !call.spec.x_symmetric;
    linear.x_scale = is_dynamic() ? buffer_.x_scale() : nullptr;
    linear.x_zero_point = is_dynamic() && has_zero_points ? buffer_.x_zero_point() : nullptr;
    set_operands(linear, buffer_, &problem_, &operands_);
    operands_.out = out;
    epilogue_ = set_inputs(linear, buffer_, &problem_, &operands_);
    if (!w.is_pointwise()) problem_.image = image_;
    // Codes that lie as the kernels read them stay where they are.
    const bool is_padded = (w.padding[0] | w.padding[1] | w.padding[2] | w.padding[3]) != 0;
    is_ready_ = images().x_type == DType::s8 && images().channels_last && !is_padded && !is_dynamic();
    if (!is_ready_) operands_.x = nullptr;  // new memory, on a boundary of 256 bytes
    route_ = in_groups() ? Route{Form::given, nullptr, problem_}
                         : route_of(w.is_pointwise() ? Entry::linear : Entry::conv, problem_, operands_, on);
  }

  void run(const Tensor& like) {
    allocate(like);
    if (!is_ready_) {
      lay_out();
      operands_.x = memory_.at<int8_t>(codes_);
      operands_.counters_are_zero = true;
    }
    if (is_dynamic()) {
      operands_.x_scale = memory_.at<float>(scale_);
      operands_.x_zero_point = problem_.has_zero_point ? memory_.at<int32_t>(zero_point_) : nullptr;
    }
    if (rewrites()) {
      auto* patches = memory_.at<int8_t>(patches_);
      cuda::gather_patches(static_cast<const int8_t*>(operands_.x), image_, problem_.m, call_.spec.k, patches,
                           route_.problem.ldx, on_.context);
      operands_.x = patches;
    }
    if (in_groups()) {  // one kernel for all of them
      align(&problem_, operands_);
      return cuda::grouped_conv(problem_, images().window.groups, operands_, epilogue_, on_.context);
    }
    cuda::gemm(*route_.row, route_.problem, operands_, epilogue_, on_.context);
  }

 private:
  const ConvOperands& images() const { return call_.operands; }
  bool is_dynamic() const { return call_.spec.input == InputMode::dynamic_per_token; }
  bool in_groups() const { return images().window.groups > 1; }
  bool rewrites() const { return route_.form != Form::given; }  // bytes (one pixel a window) or patches

  void allocate(const Tensor& like) {
    const int64_t m = problem_.m;
    if (!is_ready_) codes_ = memory_.add(images().batch * image_.image_step);
    if (is_dynamic() && !images().x_scale) ranges_ = memory_.add(cuda::images_workspace_bytes(images_of(images())));
    if (is_dynamic()) scale_ = memory_.add(4 * m);
    if (is_dynamic() && problem_.has_zero_point) zero_point_ = memory_.add(4 * m);
    if (rewrites()) patches_ = memory_.add(m * route_.problem.ldx);
    if (!in_groups()) workspace_ = workspace_of(route_.row, route_.problem, operands_, on_);
    const int64_t at_workspace = memory_.add(workspace_.bytes);
    memory_.make(like);
    if (workspace_.bytes > 0) operands_.workspace = memory_.at<void>(at_workspace);
  }

  // Codes of the images, and the step of each of its rows.
  void lay_out() const {
    const LinearSpec& s = call_.spec;
    const ConvOperands& o = images();
    const cuda::CodeRange range{s.x_qmin, s.x_qmax, s.x_symmetric};
    cuda::ImagesOut out;
    out.q = memory_.at<int8_t>(codes_);
    for (int i = 0; i < 4; ++i) out.padding[i] = o.window.padding[i];
    if (workspace_.counter_bytes > 0) out.zeros = workspace_.zeros(operands_.workspace);
    if (!is_dynamic())
      return cuda::quantize_images(images_of(o), buffer_.x_scale(), buffer_.x_zero_point(), true, range, out,
                                   on_.context);
    out.row_scale = memory_.at<float>(scale_);
    out.row_zero_point = problem_.has_zero_point ? memory_.at<int32_t>(zero_point_) : nullptr;
    out.rows = rows_;
    if (o.x_scale)
      return cuda::quantize_images(images_of(o), o.x_scale, o.x_zero_point, false, range, out, on_.context);
    cuda::quantize_images_dynamic(images_of(o), range, out, memory_.at<void>(ranges_), on_.context);
  }

  const ConvCall& call_;
  const On& on_;
  const RowsBuffer buffer_;
  const int64_t rows_;  // of an image's result
  const ImageRows image_;
  GemmProblem problem_;
  GemmOperands operands_;
  Epilogue epilogue_;
  Route route_;
  bool is_ready_ = false;
  Scratch memory_;
  int64_t codes_ = 0, ranges_ = 0, scale_ = 0, zero_point_ = 0, patches_ = 0;
  cuda::Workspace workspace_;
};

}  // namespace

Tensor qconv2d_cuda(const Tensor& x, const Tensor& packed, MaybeTensor residual, std::vector<int64_t> spec,
                    std::vector<int64_t> window, std::optional<ScalarType> out_dtype, MaybeTensor x_scale,
                    MaybeTensor x_zero_point) {
  const On on(x);
  const ConvCall call = conv_call(x, packed, residual, spec, window, out_dtype, x_scale, x_zero_point);
  const int64_t groups = call.operands.window.groups;
  Cuda::check_layout(call.spec);
  if (groups > 1 && call.spec.layout != Layout::rows)
    refuse("spec", "layout 'rows_blocked128' and " + std::to_string(groups) + " groups", "layout 'rows' with groups");
  const Shape& y = call.out_shape;
  const int64_t rows = y[2] * y[3], m = y[0] * rows;
  const bool last = call.operands.channels_last;
  const bool is_either = !last && (y[1] <= 1 || rows <= 1 || m == 0);  // the same memory in both formats
  if (m * y[1] > 0) check_sizes(call.operands, m);
  Tensor out = is_either ? empty(x, y, call.out_type) : empty(x, {y[0], y[2], y[3], y[1]}, call.out_type);
  if (out.numel() != 0) Convolution(call, packed, out.mutable_data_ptr(), on).run(x);
  if (is_either) return out;
  return last ? channels_first(out) : compact(channels_first(out));
}

}  // namespace pyquant::bind
