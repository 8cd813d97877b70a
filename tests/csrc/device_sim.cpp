// The simulator's flavour of device.h. Every tensor that a kernel touches is a CPU tensor over memory of cudaMalloc, so
// that the simulator's checks (bounds, never-written values) see it as they see a GPU's.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "bind/device.h"

// The three functions of the CUDA runtime that this needs; its header belongs to csrc/cuda.
extern "C" {
int cudaMalloc(void** pointer, size_t bytes);
int cudaFree(void* pointer);
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind);
}

namespace pyquant::bind {
namespace {

constexpr int kHostToDevice = 1;
constexpr int kOutOfMemory = 2;

void ok(int status) {
  if (status != 0) throw std::runtime_error("simulated CUDA error " + std::to_string(status));
}

// What use_stream has told the thread.
thread_local void* stream = nullptr;
thread_local std::vector<void*>* kept = nullptr;

void release(void* base) {
  if (kept)
    kept->push_back(base);
  else
    cudaFree(base);
}

Tensor adopt(void* base, int64_t offset, const Shape& shape, const Shape& strides, ScalarType type) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(static_cast<char*>(base) + offset, shape, strides, cpu, type,
                                  [base](void*) { release(base); });
}

int64_t made = 0;  // tensors of `empty`

int64_t bytes_of(ScalarType type) { return type == ScalarType::Long ? 8 : bits_of(dtype_of_scalar(type)) / 8; }

void* allocate(int64_t bytes) {
  void* base = nullptr;
  const int status = cudaMalloc(&base, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  if (status == kOutOfMemory) out_of_memory(bytes, "cpu");
  ok(status);
  return base;
}

// A copy in device memory with the same strides and the same alignment of its first element.
Tensor to_device(const Tensor& x) {
  const Shape shape = shape_of(x);
  Shape strides;
  int64_t span = 1;
  for (int64_t i = 0; i < x.dim(); ++i) {
    strides.push_back(x.stride(i));
    span = x.size(i) == 0 ? 0 : span + (x.size(i) - 1) * x.stride(i);
    if (span == 0) break;
  }
  strides.resize(shape.size(), 1);
  const int64_t bytes = span * static_cast<int64_t>(x.element_size());
  const int64_t offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16);
  void* base = allocate(offset + bytes);
  if (bytes)
    ok(cudaMemcpy(static_cast<char*>(base) + offset, x.const_data_ptr(), static_cast<size_t>(bytes), kHostToDevice));
  return adopt(base, offset, shape, strides, x.scalar_type());
}

// How many tensors the bindings have made so far. like: any.
int64_t allocations(const Tensor&) { return made; }

// The thread's launches go to a stream from now on. keep: memory that tensors leave is not freed before the next call,
// as torch keeps that of a graph for the graph. like: any.
void use_stream(const Tensor&, int64_t handle, bool keep) {
  if (kept) {
    for (void* base : *kept) cudaFree(base);
    delete kept;
  }
  stream = reinterpret_cast<void*>(handle);
  kept = keep ? new std::vector<void*> : nullptr;
}

}  // namespace

int32_t device_index(const Tensor&) { return 0; }

void* current_stream(int32_t) { return stream; }

Tensor empty(const Tensor&, const Shape& shape, ScalarType type) {
  ++made;
  Shape strides(shape.size());
  int64_t count = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = count;
    count *= std::max<int64_t>(shape[i], 1);
  }
  return adopt(allocate(count * bytes_of(type)), 0, shape, strides, type);
}

Tensor framework_linear(const Tensor& x, const Tensor& w, const MaybeTensor& bias) {
  using torch::stable::detail::from;
  Tensor out = torch::stable::new_empty(x, {x.size(0), w.size(0)}, x.scalar_type());
  std::array<StableIValue, 4> stack{from(x), from(w), from(bias), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "out", stack.data(), TORCH_ABI_VERSION));
  return to_device(torch::stable::detail::to<Tensor>(stack[0]));
}

// The CPU has no product of another type than its operands'.
Tensor framework_product_f32(const Tensor& x, const Tensor& w) {
  return framework_linear(torch::stable::to(x, ScalarType::Float), torch::stable::to(w, ScalarType::Float),
                          std::nullopt);
}

Tensor framework_rows(const Tensor& x, const Tensor& rows) {
  using torch::stable::detail::from;
  Tensor out = torch::stable::new_empty(x, {rows.size(0), x.size(1)}, x.scalar_type());
  std::array<StableIValue, 4> stack{from(x), from(int64_t{0}), from(rows), from(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::index_select", "out", stack.data(), TORCH_ABI_VERSION));
  return to_device(torch::stable::detail::to<Tensor>(stack[0]));
}

Tensor compact(const Tensor& tensor) {
  try {
    return to_device(torch::stable::contiguous(tensor));
  } catch (const std::exception&) {
    out_of_memory(tensor.numel() * static_cast<int64_t>(tensor.element_size()), device_of(tensor));
  }
}

}  // namespace pyquant::bind

STABLE_TORCH_LIBRARY_IMPL(pyquant_sim, CPU, m) {
  m.impl("to_device", TORCH_BOX(&pyquant::bind::to_device));
  m.impl("allocations", TORCH_BOX(&pyquant::bind::allocations));
  m.impl("use_stream", TORCH_BOX(&pyquant::bind::use_stream));
}
