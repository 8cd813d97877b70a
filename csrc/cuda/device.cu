// Device properties, queried from the driver once; and the map from a row of the table to its launcher.
#include <array>
#include <mutex>

#include <cutlass/version.h>

#include "cuda/driver.h"
#include "cuda/gemm/call.h"
#include "cuda/launch.h"
#include "plan/row.h"

namespace pyquant::cuda {

#define PYQUANT_LAUNCHER(NAME) extern const Launcher NAME;
#define PYQUANT_NO_LAUNCHER(NAME)
#include "launchers.inc"
#undef PYQUANT_LAUNCHER
#undef PYQUANT_NO_LAUNCHER

namespace {

// In the order of the kernel table.
constexpr const Launcher* kLaunchers[] = {
#define PYQUANT_LAUNCHER(NAME) &NAME,
#define PYQUANT_NO_LAUNCHER(NAME) nullptr,
#include "launchers.inc"
};

const Launcher& launcher_of(const Row& row) {
  const Launcher* launcher = kLaunchers[&row - rows()];
  if (launcher == nullptr) throw std::runtime_error(std::string(row.name) + " is not compiled into this build");
  return *launcher;
}

std::string name_of_device(int device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties", device);
  return properties.name;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

DeviceInfo query(int device) {
  if (const std::string why = why_no_device(); !why.empty()) throw std::runtime_error("pyquant sees no GPU: " + why);
  const auto get = [&](cudaDeviceAttr attribute) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute", device);
    return value;
  };
  DeviceInfo info;
  info.sm = 10 * get(cudaDevAttrComputeCapabilityMajor) + get(cudaDevAttrComputeCapabilityMinor);
  info.sm_count = get(cudaDevAttrMultiProcessorCount);
  info.shared_bytes = get(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  info.l2_bytes = get(cudaDevAttrL2CacheSize);
  // Memory clock in kHz, two transfers a clock, bus width in bits.
  info.dram_gbps = int64_t{get(cudaDevAttrMemoryClockRate)} * get(cudaDevAttrGlobalMemoryBusWidth) * 2 / 8 / 1000000;
  info.clock_mhz = get(cudaDevAttrClockRate) / 1000;
  const std::string name = name_of_device(device);
  info.halves_float_sums = is_geforce(name.c_str());
  info.gpu = gpu_id(name.c_str());
  return info;
}

}  // namespace

bool is_built() { return true; }

const char* cutlass_version() {
  static const std::string text =
      std::to_string(CUTLASS_MAJOR) + "." + std::to_string(CUTLASS_MINOR) + "." + std::to_string(CUTLASS_PATCH);
  return text.c_str();
}

int runtime_version() { return CUDART_VERSION; }

int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;  // no driver is an answer, not an error
}

int driver_cuda_version() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

std::string why_no_device() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return "";
  const int served = driver_cuda_version();
  if (served == 0) return "no NVIDIA driver was found";
  if (status == cudaErrorInsufficientDriver)
    return "the NVIDIA driver serves CUDA " + version_text(served) + "; pyquant's CUDA runtime is " +
           version_text(CUDART_VERSION) + ", which needs driver " + std::to_string(minimum_driver(CUDART_VERSION)) +
           " or newer";
  if (status == cudaSuccess || status == cudaErrorNoDevice) return "the NVIDIA driver names no GPU";
  return std::string(cudaGetErrorString(status)) + " (" + cudaGetErrorName(status) + ")";
}

DeviceInfo device_info(int32_t device) {
  static std::mutex mutex;
  static std::array<DeviceInfo, 64> known{};
  if (device < 0 || device >= static_cast<int32_t>(known.size())) return query(device);
  const std::lock_guard<std::mutex> lock(mutex);
  DeviceInfo& info = known[static_cast<size_t>(device)];
  if (info.sm == 0) info = query(device);
  return info;
}

std::string device_name(int32_t device) { return name_of_device(device); }

Workspace workspace(const Row& row, const GemmProblem& problem, const Context& context) {
  const Launcher& launcher = launcher_of(row);
  if (problem.m == 0 || problem.n == 0 || problem.k == 0) return {};
  const DeviceInfo device = device_info(context.device);
  return launcher.workspace({row.name, problem, {}, {}, context, device});
}

void gemm(const Row& row, const GemmProblem& problem, const GemmOperands& operands, const Epilogue& epilogue,
          const Context& context) {
  const Launcher& launcher = launcher_of(row);
  if (problem.m == 0 || problem.n == 0) return;
  const DeviceInfo device = device_info(context.device);
  const GemmCall call{row.name, problem, operands, epilogue, context, device};
  // Tiles of depth 0 do not exist for TMA and cp.async; the byte-wise family is the epilogue of a zero accumulator.
  // Rows of experts find no k to load in theirs.
  if (problem.k == 0 && problem.experts == 0) return gemm_simt_any.run(call);
  if (operands.workspace && !operands.counters_are_zero)
    clear_counters(row.name, launcher.workspace(call).zeros(operands.workspace), context);
  launcher.run(call);
}

}  // namespace pyquant::cuda
