// Dicts and integers of Python as the structs of the core: what every part of _native reads its arguments with.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/gate.h"
#include "core/device.h"
#include "core/problem.h"
#include "plan/route.h"
#include "plan/row.h"

namespace pyquant::native {

namespace py = pybind11;

constexpr const char* kLayouts[] = {"natural", "blocked128"};  // by value

DType dtype_of(const std::string& name);
Activation activation_of(const std::string& name);
Granularity granularity_of(const std::string& name);
Entry entry_of(const std::string& name);

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Reads keys of a dict and remembers them, so that a misspelt one is an error and not a silent default.
class Fields {
 public:
  explicit Fields(const py::dict& dict) : dict_(dict) {}
  template <class T>
  T get(const char* key, T otherwise) {
    if (dict_.contains(key)) return ++used_, dict_[key].template cast<T>();
    return otherwise;
  }
  void done(const char* what) const {
    if (used_ != dict_.size())
      throw std::invalid_argument(std::string(what) + ": " + std::to_string(dict_.size() - used_) +
                                  " unknown keys in " + py::str(dict_).cast<std::string>());
  }

 private:
  const py::dict& dict_;
  size_t used_ = 0;
};

GemmProblem problem_of(const py::dict& dict);
GemmOperands operands_of(const py::dict& dict);
Epilogue epilogue_of(const py::dict& dict);
NormOperands norm_of(const py::dict& dict);
GateOperands gate_of(const py::dict& dict);
DeviceInfo device_of(const py::dict& dict);
const Row& row_of(const std::string& name);

}  // namespace pyquant::native
