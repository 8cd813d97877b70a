// What the CPU backend takes from torch: its thread pool and its allocator.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

#include "bind/cpu_tensor.h"
#include "cpu/cpu.h"

namespace pyquant::bind {
namespace {

// Lends torch's thread pool to the core, which knows no torch.
[[maybe_unused]]
const bool threads_lent = [] {
  cpu::set_parallel_for(
      [](int64_t begin, int64_t end, int64_t grain, cpu::Body body, void* context) {
        torch::stable::parallel_for(begin, end, grain, [&](int64_t b, int64_t e) { body(context, b, e); });
      },
      [] { return static_cast<int>(torch::stable::get_num_threads()); });
  return true;
}();

int32_t torch_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return aoti_torch_dtype_float32();
    case ScalarType::Half: return aoti_torch_dtype_float16();
    case ScalarType::BFloat16: return aoti_torch_dtype_bfloat16();
    case ScalarType::Char: return aoti_torch_dtype_int8();
    case ScalarType::Byte: return aoti_torch_dtype_uint8();
    case ScalarType::Long: return aoti_torch_dtype_int64();
    case ScalarType::Int: return aoti_torch_dtype_int32();
    case ScalarType::Double: return aoti_torch_dtype_float64();
    default: throw std::logic_error("no op makes tensors of this type");
  }
}

}  // namespace

Tensor empty_cpu(const Shape& shape, ScalarType type) {
  std::array<int64_t, 16> strides;
  if (shape.size() > strides.size()) refuse("x", std::to_string(shape.size()) + " dimensions", "at most 16 dimensions");
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
  AtenTensorHandle handle = nullptr;
  const AOTITorchError failed =
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(), torch_dtype(type),
                               aoti_torch_device_type_cpu(), 0, &handle);
  if (failed) out_of_memory(step * (type == ScalarType::Long ? 8 : bits_of(dtype_of_scalar(type)) / 8), "cpu");
  return Tensor(handle);
}

}  // namespace pyquant::bind
