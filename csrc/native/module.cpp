// pyquant._native: the kernel table, selection and raw-pointer launches for tests, the simulator and the tuner.
// Pointers travel as integers; nothing here allocates device memory or knows torch.
#include "core/build_facts.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "native/parts.h"
#include "plan/row.h"

namespace pyquant::native {
namespace {

py::dict build_info() {
  py::dict d;
  d["cuda"] = cuda::is_built();
  d["why_no_cuda"] = build_why_no_cuda();
  d["architectures"] = build_architectures();
  d["nvcc"] = build_nvcc();
  d["cuda_runtime"] = cuda::runtime_version();
  d["minimum_driver"] = cuda::minimum_driver(cuda::runtime_version());
  d["cutlass"] = cuda::cutlass_version();
  d["kernels"] = row_count();
  int compiled = 0;
  for (int i = 0; i < row_count(); ++i) compiled += rows()[i].compiled;
  d["kernels_compiled"] = compiled;
  d["compiler"] = __VERSION__;
  return d;
}

}  // namespace
}  // namespace pyquant::native

PYBIND11_MODULE(_native, m) {
  using namespace pyquant;
  using namespace pyquant::native;
  m.doc() = "Kernel table, selection and raw launches. Pointers are integers; launches are asynchronous.";
  m.def("build_info", &build_info);
  m.def("cpu_isa", &cpu::isa_report);
  m.def("device_count", &cuda::device_count);
  m.def("driver_cuda_version", &cuda::driver_cuda_version);
  m.def("why_no_device", &cuda::why_no_device);  // "" where there is a device
  m.def("device_info", [](int32_t device) {
    const DeviceInfo d = cuda::device_info(device);
    return py::dict(py::arg("sm") = d.sm, py::arg("sm_count") = d.sm_count, py::arg("shared_bytes") = d.shared_bytes,
                    py::arg("l2_bytes") = d.l2_bytes, py::arg("dram_gbps") = d.dram_gbps,
                    py::arg("clock_mhz") = d.clock_mhz, py::arg("name") = cuda::device_name(device));
  });
  add_plan(m);
  add_gemm(m);
  add_quantise(m);
  add_formulas(m);
}
