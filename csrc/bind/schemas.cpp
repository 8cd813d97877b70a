// Defines torch.ops.pyquant where this library is loaded, from the table of pyquant/ops/schema.py: a C++ program that
// links or opens it, an AOTInductor package in it say, needs no Python.
#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "bind/first_copy.h"
#include "core/dtype.h"
#include "schemas.inc"

// Of torch 2.12 and later; this library is built for 2.10. Older ones leave them null, and Python sets the tags.
extern "C" {
#define PYQUANT_TAG(NAME) __attribute__((weak)) int32_t torch_tag_##NAME();
PYQUANT_TAGS(PYQUANT_TAG)
#undef PYQUANT_TAG
__attribute__((weak)) AOTITorchError torch_library_def_with_tags(TorchLibraryHandle, const char*, const int32_t*,
                                                                 int32_t);
}

namespace pyquant::bind {
namespace {

std::vector<int32_t> tags() {
  std::vector<int32_t> known;
#define PYQUANT_TAG(NAME) \
  if (torch_tag_##NAME) known.push_back(torch_tag_##NAME());
  PYQUANT_TAGS(PYQUANT_TAG)
#undef PYQUANT_TAG
  return known;
}

// Not the macro STABLE_TORCH_LIBRARY: what it throws while a library is loaded ends the process. Where Python has
// defined the ops before, since it was told not to look for this library, torch refuses; the kernels then serve those
// definitions.
[[maybe_unused]]
const bool defined = [] {
  TorchLibraryHandle library = nullptr;  // lives as long as the process, as what it defines
  if (!is_first_copy("pyquant") || aoti_torch_library_init_fragment("pyquant", __FILE__, __LINE__, &library))
    return false;
  const std::vector<int32_t> of_graphs = tags();
  const auto define = [&](const std::string& schema, const std::vector<int32_t>& tags) {
    if (torch_library_def_with_tags && !tags.empty())
      return !torch_library_def_with_tags(library, schema.c_str(), tags.data(), static_cast<int32_t>(tags.size()));
    return !aoti_torch_library_def(library, schema.c_str());
  };
#define PYQUANT_SCHEMA(TEXT) \
  if (!define(TEXT, of_graphs)) return false;
#define PYQUANT_PRODUCT(X, W) PYQUANT_SCHEMA("gemm_" #X #W PYQUANT_PRODUCT_SCHEMA)
#define PYQUANT_NATIVE(TEXT) \
  if (!define(TEXT, {})) return false;
  PYQUANT_SCHEMAS(PYQUANT_SCHEMA)
  PYQUANT_PRODUCTS(PYQUANT_PRODUCT)
  PYQUANT_NATIVE_SCHEMAS(PYQUANT_NATIVE)
  return true;
}();

}  // namespace
}  // namespace pyquant::bind
