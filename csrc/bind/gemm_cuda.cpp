#include "bind/gemm_cuda.h"

#include <limits>
#include <mutex>
#include <stdexcept>

#include "plan/choice.h"
#include "plan/cost.h"
#include "plan/select.h"

namespace pyquant::bind {
namespace {

const DeviceInfo& info_of(int32_t device) {
  constexpr int32_t kDevices = 64;
  static DeviceInfo known[kDevices];
  static std::once_flag asked[kDevices];
  if (device < 0 || device >= kDevices) throw std::runtime_error("pyquant: device index " + std::to_string(device));
  std::call_once(asked[device], [&] { known[device] = cuda::device_info(device); });
  return known[device];
}

int32_t alignment(const void* pointer, int64_t row_bytes) {
  const uint64_t bits = reinterpret_cast<uint64_t>(pointer) | static_cast<uint64_t>(row_bytes) | 16;
  return static_cast<int32_t>(bits & (~bits + 1));
}

}  // namespace

const DeviceInfo& device_info(const On& on) { return info_of(on.context.device); }

void align(GemmProblem* p, const GemmOperands& o) {
  p->x_align = alignment(o.x, p->ldx * bits_of(p->x == DType::s4 && !p->x_packed ? DType::s8 : p->x) / 8);
  p->w_align = alignment(o.w, p->ldw * bits_of(p->w) / 8);
  p->out_align = alignment(o.out, p->ldo * bits_of(p->out) / 8);
  p->residual_align = o.residual ? alignment(o.residual, p->ldr * bits_of(p->residual) / 8) : 16;
}

const Row* choose(GemmProblem* p, const GemmOperands& o, const On& on) {
  align(p, o);
  return pyquant::choose(*p, o.residual != nullptr, device_info(on));
}

double cost_us(const Row* row, const GemmProblem& p, const On& on) {
  return row ? pyquant::cost_us(*row, p, device_info(on)) : std::numeric_limits<double>::infinity();
}

void run(const Row* row, const GemmProblem& problem, GemmOperands operands, const Epilogue& epilogue,
         const Tensor& like, const On& on) {
  if (!row)
    throw std::runtime_error("pyquant: no kernel takes this problem on this device\n" +
                             text_of(select(problem, operands.residual != nullptr, device_info(on))));
  Tensor workspace;  // the allocator keeps its memory until the stream has passed the launch
  if (const int64_t bytes = cuda::workspace_bytes(*row, problem, on.context); bytes > 0) {
    workspace = empty(like, {bytes}, ScalarType::Byte);
    operands.workspace = workspace.mutable_data_ptr();
  }
  cuda::gemm(*row, problem, operands, epilogue, on.context);
}

}  // namespace pyquant::bind
