// The CUDA interface of a build without nvcc: it says so.
#include <stdexcept>

#include "core/build_facts.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "cuda/expert_rows.h"
#include "cuda/images.h"

namespace pyquant::cuda {

namespace {
std::string reason() { return std::string("built without CUDA kernels: ") + build_why_no_cuda(); }
[[noreturn]] void refuse() { throw std::runtime_error(reason()); }
}  // namespace

bool is_built() { return false; }
const char* cutlass_version() { return ""; }
int runtime_version() { return 0; }
int device_count() { return 0; }
int driver_cuda_version() { return 0; }
std::string why_no_device() { return reason(); }
DeviceInfo device_info(int32_t) { refuse(); }
std::string device_name(int32_t) { refuse(); }

Workspace workspace(const Row&, const GemmProblem&, const Context&) { refuse(); }
void gemm(const Row&, const GemmProblem&, const GemmOperands&, const Epilogue&, const Context&) { refuse(); }
void float_epilogue(const void*, DType, int64_t, const GemmProblem&, const GemmOperands&, const Epilogue&,
                    const Context&) {
  refuse();
}
void quantize(const FloatMatrix&, Granularity, int64_t, const float*, const int32_t*, const CodeRange&,
              const QuantizeOut&, const Context&) {
  refuse();
}
void quantize_dynamic(const FloatMatrix&, Granularity, int64_t, const CodeRange&, const QuantizeParams&,
                      const QuantizeOut&, void*, const Context&) {
  refuse();
}
void quantize_chosen_rows(const FloatMatrix&, const int64_t*, int64_t, const CodeRange&, const QuantizeParams&,
                          const QuantizeOut&, const Context&) {
  refuse();
}
void quantize_expert_rows(const FloatMatrix&, const ExpertSteps&, int64_t, const CodeRange&, const QuantizeOut&,
                          const Context&) {
  refuse();
}
void quantize_images(const Images&, const float*, const int32_t*, bool, const CodeRange&, const ImagesOut&,
                     const Context&) {
  refuse();
}
int64_t images_workspace_bytes(const Images&) { refuse(); }
void quantize_images_dynamic(const Images&, const CodeRange&, const ImagesOut&, void*, const Context&) { refuse(); }
void gather_patches(const int8_t*, const ImageRows&, int64_t, int64_t, int8_t*, int64_t, const Context&) { refuse(); }
void grouped_conv(const GemmProblem&, int64_t, const GemmOperands&, const Epilogue&, const Context&) { refuse(); }
void norm_quantize(const FloatMatrix&, const NormOperands&, const CodeRange&, const QuantizeParams&, const QuantizeOut&,
                   const Context&) {
  refuse();
}
void activation_mul_quantize(const FloatMatrix&, const GateOperands&, const CodeRange&, const QuantizeParams&,
                             const QuantizeOut&, const Context&) {
  refuse();
}
void hadamard_transform(const FloatMatrix&, const Hadamard&, void*, const Context&) { refuse(); }
void hadamard_quantize(const FloatMatrix&, const Hadamard&, const CodeRange&, const QuantizeParams&, const QuantizeOut&,
                       const Context&) {
  refuse();
}
void fake_quantize(const FloatMatrix&, Granularity, int64_t, const float*, const int32_t*, const CodeRange&, void*,
                   uint8_t*, const Context&) {
  refuse();
}
void fake_quantize_dynamic(const FloatMatrix&, Granularity, int64_t, const CodeRange&, const QuantizeParams&, void*,
                           void*, const Context&) {
  refuse();
}
void fake_quantize_backward(const void*, DType, int64_t, const uint8_t*, void*, const Context&) { refuse(); }
int64_t lsq_workspace_bytes(const FloatMatrix&, Granularity, int64_t) { refuse(); }
void fake_quantize_lsq_backward(const void*, const FloatMatrix&, Granularity, int64_t, const float*, const int32_t*,
                                const CodeRange&, void*, float*, void*, const Context&) {
  refuse();
}
void dequantize(const void*, DType, int64_t, int64_t, int64_t, Granularity, int64_t, const float*, const int32_t*,
                void*, DType, const Context&) {
  refuse();
}
void magnitude_histogram(const FloatMatrix&, int32_t, int64_t*, const Context&) { refuse(); }
void arrange_codes(const void*, DType, int64_t, int64_t, int64_t, int8_t*, int64_t, const int32_t*, int32_t*,
                   const Zeros&, const Context&) {
  refuse();
}
void pack_int4(const int8_t*, int64_t, int64_t, uint8_t*, const Context&) { refuse(); }
void unpack_int4(const uint8_t*, int64_t, int64_t, int8_t*, const Context&) { refuse(); }
void pack_blocked128(const uint8_t*, int64_t, int64_t, int64_t, uint8_t*, const Context&) { refuse(); }
void unpack_blocked128(const uint8_t*, int64_t, int64_t, int64_t, uint8_t*, const Context&) { refuse(); }
void weight_sums(const void*, DType, int64_t, int64_t, int64_t, int64_t, int32_t*, const Context&) { refuse(); }

}  // namespace pyquant::cuda
