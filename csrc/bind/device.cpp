// The CUDA flavour of device.h.
#include "bind/device.h"

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <stdexcept>

namespace pyquant::bind {

int32_t device_index(const Tensor& x) { return x.get_device_index(); }

// Found at run time: the function lives in libtorch_cuda.so only, which a CPU build of torch does not have.
void* current_stream(int32_t device) {
  using Function = int32_t (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  if (!function) throw std::runtime_error("pyquant: the installed PyTorch has no CUDA support");
  void* stream = nullptr;
  if (function(device, &stream) != 0) throw std::runtime_error("pyquant: no current CUDA stream");
  return stream;
}

Tensor empty(const Tensor& like, const Shape& shape, ScalarType type) {
  try {
    return torch::stable::new_empty(like, shape, type);
  } catch (const std::exception&) {
    int64_t bytes = type == ScalarType::Long ? 8 : bits_of(dtype_of_scalar(type)) / 8;
    for (const int64_t extent : shape) bytes *= extent;
    out_of_memory(bytes, device_of(like));
  }
}

// The out= forms, because autocast leaves those alone.
Tensor framework_linear(const Tensor& x, const Tensor& w, const MaybeTensor& bias) {
  using torch::stable::detail::from;
  Tensor out = empty(x, {x.size(0), w.size(0)}, x.scalar_type());
  std::array<StableIValue, 4> stack{from(x), from(w), from(bias), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor framework_product_f32(const Tensor& x, const Tensor& w) {
  using torch::stable::detail::from;
  Tensor out = empty(x, {x.size(0), w.size(0)}, ScalarType::Float);
  const Tensor transposed = torch::stable::transpose(w, 0, 1);
  std::array<StableIValue, 4> stack{from(x), from(transposed), from(ScalarType::Float), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "dtype_out", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor framework_rows(const Tensor& x, const Tensor& rows) {
  using torch::stable::detail::from;
  Tensor out = empty(x, {rows.size(0), x.size(1)}, x.scalar_type());
  std::array<StableIValue, 4> stack{from(x), from(int64_t{0}), from(rows), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::index_select", "out", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

Tensor compact(const Tensor& tensor) {
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::exception&) {
    out_of_memory(tensor.numel() * static_cast<int64_t>(tensor.element_size()), device_of(tensor));
  }
}

}  // namespace pyquant::bind
