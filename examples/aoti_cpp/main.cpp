// Runs an AOTInductor package of a quantised model without Python.
//
//     pyquant_aoti LIBRARY PACKAGE COLUMNS INPUT.f32 OUTPUT...
//
// LIBRARY is pyquant/lib/libpyquant_torch.so: opening it defines the ops that the package calls. INPUT is a file of
// float32 numbers in rows of COLUMNS; every result of the model is written to its OUTPUT in the same form.
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

at::Tensor read(const std::string& path, int64_t columns) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  if (!file || columns < 1 || bytes.size() % (columns * sizeof(float)))
    throw std::runtime_error(path + " does not hold whole rows of " + std::to_string(columns) + " float32 numbers");
  const auto rows = static_cast<int64_t>(bytes.size() / (columns * sizeof(float)));
  return at::from_blob(const_cast<char*>(bytes.data()), {rows, columns}, at::kFloat).clone();
}

void write(const std::string& path, const at::Tensor& tensor) {
  const at::Tensor plain = tensor.to(at::kFloat).contiguous();
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes());
  if (!file.flush()) throw std::runtime_error(path + " cannot be written");
}

int run(const std::vector<std::string>& words) {
  if (words.size() < 5) throw std::runtime_error("usage: pyquant_aoti LIBRARY PACKAGE COLUMNS INPUT.f32 OUTPUT...");
  if (!dlopen(words[0].c_str(), RTLD_NOW)) throw std::runtime_error(dlerror());
  torch::inductor::AOTIModelPackageLoader model(words[1]);
  const std::vector<at::Tensor> results = model.run({read(words[3], std::stoll(words[2]))});
  if (results.size() != words.size() - 4)
    throw std::runtime_error("the model gives " + std::to_string(results.size()) + " results");
  for (size_t i = 0; i < results.size(); ++i) write(words[4 + i], results[i]);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pyquant_aoti: %s\n", error.what());
    return 1;
  }
}
