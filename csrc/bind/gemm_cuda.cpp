#include "bind/gemm_cuda.h"

#include <mutex>
#include <stdexcept>

#include "core/blocked128.h"
#include "plan/accept.h"
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
  p->x_align = alignment(o.x, p->ldx * stored_bits(p->x, p->x_packed) / 8);
  p->w_align = alignment(o.w, p->ldw * bits_of(p->w) / 8);
  p->out_align = alignment(o.out, p->ldo * bits_of(p->out) / 8);
  p->residual_align = o.residual ? alignment(o.residual, p->ldr * bits_of(p->residual) / 8) : 16;
}

Route route_of(Entry entry, GemmProblem problem, const GemmOperands& o, const On& on, bool int4_range) {
  align(&problem, o);
  return route({entry, problem, o.residual != nullptr, int4_range}, device_info(on));
}

const uint8_t* pack_rows(const Tensor& like, const void* codes, int64_t rows, int64_t columns, const On& on,
                         std::vector<Tensor>* keep) {
  Tensor packed = empty(like, {rows, columns / 2}, ScalarType::Byte);
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  cuda::pack_int4(static_cast<const int8_t*>(codes), rows, columns, to, on.context);
  keep->push_back(packed);
  return to;
}

void repack(const Route& route, const Tensor& like, const GemmProblem& p, const On& on, std::vector<Tensor>* keep,
            GemmOperands* o) {
  if (route.form == Form::nibbles) o->x = pack_rows(like, o->x, p.m, p.k, on, keep);
  if (route.form != Form::bytes) return;
  Tensor codes = empty(like, {p.m, route.problem.ldx}, ScalarType::Char);
  auto* to = static_cast<int8_t*>(codes.mutable_data_ptr());
  cuda::arrange_codes(o->x, p.x, p.m, p.k, p.ldx, to, route.problem.ldx, nullptr, nullptr, {}, on.context);
  keep->push_back(codes);
  o->x = to;
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

cuda::Workspace workspace_of(const Row* row, const GemmProblem& problem, const GemmOperands& operands, const On& on) {
  if (!row)
    throw std::runtime_error("pyquant: no kernel takes this problem on this device\n" +
                             text_of(select(problem, operands.residual != nullptr, device_info(on))));
  return cuda::workspace(*row, problem, on.context);
}

void run(const Row* row, const GemmProblem& problem, GemmOperands operands, const Epilogue& epilogue,
         const Tensor& like, const On& on) {
  Scratch scratch;
  const int64_t bytes = workspace_of(row, problem, operands, on).bytes;
  scratch.add(bytes);
  scratch.make(like);
  if (bytes > 0) operands.workspace = scratch.at<void>(0);
  cuda::gemm(*row, problem, operands, epilogue, on.context);
}

}  // namespace pyquant::bind
