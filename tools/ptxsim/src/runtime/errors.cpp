// Errors: the last one of a thread, the sticky one, names.
#include "runtime/state.h"

namespace ptxsim {

std::string g_lastReport;
cudaError_t g_sticky = cudaSuccess;
thread_local cudaError_t t_err = cudaSuccess;

void setReport(const std::string& s) {
  g_lastReport = s;
  fprintf(stderr, "ptxsim: %s\n", s.c_str());
  fflush(stderr);
}

API cudaError_t cudaGetLastError() {
  cudaError_t e = g_sticky != cudaSuccess ? g_sticky : t_err;
  t_err = cudaSuccess;
  return e;
}
API cudaError_t cudaPeekAtLastError() { return g_sticky != cudaSuccess ? g_sticky : t_err; }
static const struct {
  cudaError_t e;
  const char *n, *s;
} kErr[] = {{cudaSuccess, "cudaSuccess", "no error"},
            {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
            {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
            {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
            {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
            {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice",
             "no kernel image is available for execution on the device"},
            {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
            {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
            {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
            {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
            {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
            {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
            {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
            {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
            {cudaErrorMissingConfiguration, "cudaErrorMissingConfiguration", "missing configuration"},
            {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"}};
API const char* cudaGetErrorName(cudaError_t e) {
  for (auto& k : kErr)
    if (k.e == e) return k.n;
  return "cudaErrorUnknown";
}
API const char* cudaGetErrorString(cudaError_t e) {
  for (auto& k : kErr)
    if (k.e == e) return k.s;
  return "unknown error";
}

}  // namespace ptxsim
