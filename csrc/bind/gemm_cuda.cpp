#include "bind/gemm_cuda.h"

#include <limits>
#include <mutex>
#include <stdexcept>

#include "core/blocked128.h"
#include "plan/accept.h"
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

const Row* choose_int4(const Tensor& like, const On& on, std::vector<Tensor>* keep, GemmProblem* p, GemmOperands* o) {
  constexpr int64_t kStep = 32;  // codes of 16 packed bytes
  const Row* as_they_lie = choose(p, *o, on);
  GemmProblem other = *p;
  GemmOperands to_come = *o;
  other.x_packed = !p->x_packed;
  other.ldx = (p->k + kStep - 1) / kStep * kStep;
  to_come.x = nullptr;
  if (other.x_packed && (other.ldx != p->k || p->ldx != p->k)) return as_they_lie;  // would be a copy of a copy
  const Row* row = choose(&other, to_come, on);
  if (!(cost_us(row, other, on) + kPassUs < cost_us(as_they_lie, *p, on))) return as_they_lie;
  Tensor codes = empty(like, {p->m, other.x_packed ? other.ldx / 2 : other.ldx},
                       other.x_packed ? ScalarType::Byte : ScalarType::Char);
  if (other.x_packed)
    cuda::pack_int4(static_cast<const int8_t*>(o->x), p->m, p->k, static_cast<uint8_t*>(codes.mutable_data_ptr()),
                    on.context);
  else
    cuda::arrange_codes(o->x, DType::s4, p->m, p->k, p->ldx, static_cast<int8_t*>(codes.mutable_data_ptr()), other.ldx,
                        nullptr, nullptr, on.context);
  keep->push_back(codes);
  o->x = codes.const_data_ptr();
  *p = other;
  return row;
}

const Row* named(const std::string& name, const Tensor& like, const On& on, std::vector<Tensor>* keep, GemmProblem* p,
                 GemmOperands* o) {
  const Row* row = find_row(name.c_str());
  if (!row) refuse("kernel", "'" + name + "'", "a name of the kernel table, as ops.kernels() lists them");
  const bool reads_plain = (row->facts().w_layouts & layout_bit(WeightLayout::natural)) != 0;
  if (!reads_plain && p->w == DType::s4 && p->k > 0) {
    Tensor blocked = empty(like, {blocked128_bytes(p->n, p->k)}, ScalarType::Byte);
    cuda::pack_blocked128(static_cast<const uint8_t*>(o->w), p->n, p->k, p->ldw,
                          static_cast<uint8_t*>(blocked.mutable_data_ptr()), on.context);
    keep->push_back(blocked);
    o->w = blocked.const_data_ptr();
    p->w_layout = WeightLayout::blocked128;
    p->ldw = (p->k + 127) / 128 * 128;
  }
  align(p, *o);
  const Refusal refusal = accept(*row, *p, o->residual != nullptr, device_info(on));
  const std::string why = refusal.ok() ? "has no machine code in this build" : text_of(refusal);
  if (!refusal.ok() || !row->compiled)
    throw std::runtime_error("pyquant: no kernel of that name takes the problem\n" + name + ": " + why);
  return row;
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
