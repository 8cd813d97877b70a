#include "core/build_facts.h"

#include "build_facts.inc"

namespace pyquant {

const char* build_architectures() { return PYQUANT_BUILD_ARCHITECTURES; }
const char* build_nvcc() { return PYQUANT_BUILD_NVCC; }
const char* build_why_no_cuda() { return PYQUANT_BUILD_WHY_NO_CUDA; }

}  // namespace pyquant
