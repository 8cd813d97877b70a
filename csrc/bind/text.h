// A string argument of an op. torch 2.10 to 2.13 convert std::string arguments through a heap copy that they never free
// (stableivalue_conversions.h, ToImpl<std::string>): 48 bytes a call. This type takes the same handle and frees it.
#pragma once
#include <torch/csrc/stable/library.h>

#include <string>

namespace pyquant::bind {

struct Text : std::string {
  using std::string::string;
};

}  // namespace pyquant::bind

template <>
struct torch::stable::detail::ToImpl<pyquant::bind::Text> {
  static pyquant::bind::Text call(StableIValue value, [[maybe_unused]] uint64_t extension_build_version,
                                  [[maybe_unused]] bool is_internal) {
    const StringHandle handle = torch::stable::detail::to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    const pyquant::bind::Text text(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
