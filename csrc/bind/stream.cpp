#include "bind/stream.h"

#include <dlfcn.h>

#include <stdexcept>

namespace pyquant::bind {

void* current_cuda_stream(int32_t device) {
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

}  // namespace pyquant::bind
