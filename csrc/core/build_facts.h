// What was decided when this library was built (CMakeLists.txt), for `pyquant doctor` and for error texts.
#pragma once

namespace pyquant {

const char* build_architectures();  // "80;90a": the architectures with machine code; "" without CUDA
const char* build_nvcc();           // "13.0.88", or "" without CUDA
const char* build_why_no_cuda();    // why there are no CUDA kernels; "" where there are

}  // namespace pyquant
