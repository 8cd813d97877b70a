// pyquant._native: the kernel table, selection and raw-pointer launches for tests, the simulator and the tuner.
// Pointers travel as integers; nothing here allocates device memory or knows torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <chrono>
#include <stdexcept>
#include <string>

#include "core/blocked128.h"
#include "core/build_facts.h"
#include "core/epilogue_math.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "cuda/driver.h"
#include "plan/choice.h"
#include "plan/cost.h"
#include "plan/float_route.h"
#include "plan/select.h"
#include "plan/tuned.h"

namespace py = pybind11;
using namespace pyquant;

namespace {

constexpr DType kTypes[] = {DType::s4, DType::s8, DType::u8, DType::s32, DType::f16, DType::bf16, DType::f32};
constexpr const char* kLayouts[] = {"natural", "blocked128"};
constexpr const char* kPackings[] = {"bytes", "nibbles", "either"};
constexpr const char* kEngines[] = {"byte_wise", "mma", "wgmma", "decode"};
constexpr const char* kActivations[] = {"none", "relu", "clamp", "gelu", "gelu_tanh", "silu"};

DType dtype_of(const std::string& name) {
  for (const DType type : kTypes)
    if (name == name_of(type)) return type;
  throw std::invalid_argument("unknown element type '" + name + "'");
}

Activation activation_of(const std::string& name) {
  for (int i = 0; i < 6; ++i)
    if (name == kActivations[i]) return static_cast<Activation>(i);
  throw std::invalid_argument("unknown activation '" + name + "'");
}

Granularity granularity_of(const std::string& name) {
  if (name == "tensor") return Granularity::tensor;
  if (name == "rows") return Granularity::rows;
  if (name == "groups") return Granularity::groups;
  throw std::invalid_argument("unknown granularity '" + name + "'");
}

WeightLayout layout_of(const std::string& name) {
  for (int i = 0; i < 2; ++i)
    if (name == kLayouts[i]) return static_cast<WeightLayout>(i);
  throw std::invalid_argument("unknown weight layout '" + name + "'");
}

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

GemmProblem problem_of(const py::dict& dict) {
  Fields f(dict);
  GemmProblem p;
  p.m = f.get<int64_t>("m", 0);
  p.n = f.get<int64_t>("n", 0);
  p.k = f.get<int64_t>("k", 0);
  p.x = dtype_of(f.get<std::string>("x", "s8"));
  p.w = dtype_of(f.get<std::string>("w", "s8"));
  p.out = dtype_of(f.get<std::string>("out", "f32"));
  p.x_packed = f.get<bool>("x_packed", false);
  p.w_layout = layout_of(f.get<std::string>("w_layout", "natural"));
  p.ldx = f.get<int64_t>("ldx", p.x_packed ? (p.k + 1) / 2 * 2 : p.k);
  p.ldw = f.get<int64_t>("ldw", p.w == DType::s4 ? (p.k + 1) / 2 * 2 : p.k);
  p.ldo = f.get<int64_t>("ldo", p.out == DType::s4 ? (p.n + 1) / 2 * 2 : p.n);
  p.ldr = f.get<int64_t>("ldr", p.n);
  p.group_size = f.get<int64_t>("group_size", 0);
  p.per_token_scale = f.get<bool>("per_token_scale", false);
  p.per_token_zero_point = f.get<bool>("per_token_zero_point", false);
  p.has_zero_point = f.get<bool>("has_zero_point", false);
  p.has_w_zero_point = f.get<bool>("has_w_zero_point", false);
  p.residual = dtype_of(f.get<std::string>("residual", "f32"));
  p.x_align = f.get<int32_t>("x_align", 16);
  p.w_align = f.get<int32_t>("w_align", 16);
  p.out_align = f.get<int32_t>("out_align", 16);
  p.residual_align = f.get<int32_t>("residual_align", 16);
  f.done("problem");
  return p;
}

GemmOperands operands_of(const py::dict& dict) {
  Fields f(dict);
  const auto at = [&](const char* key) { return f.get<uintptr_t>(key, 0); };
  GemmOperands o;
  o.x = pointer<const void>(at("x"));
  o.w = pointer<const void>(at("w"));
  o.x_scale = pointer<const float>(at("x_scale"));
  o.x_zero_point = pointer<const int32_t>(at("x_zero_point"));
  o.w_scale = pointer<const float>(at("w_scale"));
  o.w_sum = pointer<const int32_t>(at("w_sum"));
  o.w_zero_point = pointer<const int32_t>(at("w_zero_point"));
  o.bias = pointer<const float>(at("bias"));
  o.residual = pointer<const void>(at("residual"));
  o.out = pointer<void>(at("out"));
  o.out_scale = pointer<const float>(at("out_scale"));
  o.out_zero_point = pointer<const int32_t>(at("out_zero_point"));
  o.workspace = pointer<void>(at("workspace"));
  f.done("operands");
  return o;
}

Epilogue epilogue_of(const py::dict& dict) {
  Fields f(dict);
  Epilogue e;
  e.activation = activation_of(f.get<std::string>("activation", "none"));
  e.clamp_min = f.get<float>("clamp_min", 0.f);
  e.clamp_max = f.get<float>("clamp_max", 0.f);
  e.out_qmin = f.get<int32_t>("out_qmin", -127);
  e.out_qmax = f.get<int32_t>("out_qmax", 127);
  f.done("epilogue");
  return e;
}

cuda::FloatMatrix floats_of(const py::dict& dict) {
  Fields f(dict);
  cuda::FloatMatrix x;
  x.data = pointer<const void>(f.get<uintptr_t>("data", 0));
  x.type = dtype_of(f.get<std::string>("type", "f32"));
  x.rows = f.get<int64_t>("rows", 0);
  x.cols = f.get<int64_t>("cols", 0);
  x.ld = f.get<int64_t>("ld", x.cols);
  f.done("x");
  return x;
}

// Results and limits of a quantiser; of a static one scale and zero_point are operands.
struct Quantiser {
  cuda::QuantizeOut out;
  cuda::QuantizeParams params;
  cuda::CodeRange range;
  explicit Quantiser(const py::dict& dict) {
    Fields f(dict);
    out.q = pointer<void>(f.get<uintptr_t>("q", 0));
    out.ldq = f.get<int64_t>("ldq", 0);
    out.packed = f.get<bool>("packed", false);
    out.row_sum = pointer<int32_t>(f.get<uintptr_t>("row_sum", 0));
    params.scale = pointer<float>(f.get<uintptr_t>("scale", 0));
    params.zero_point = pointer<int32_t>(f.get<uintptr_t>("zero_point", 0));
    range.qmin = f.get<int32_t>("qmin", -127);
    range.qmax = f.get<int32_t>("qmax", 127);
    range.symmetric = f.get<bool>("symmetric", true);
    f.done("out");
  }
};

NormOperands norm_of(const py::dict& dict) {
  Fields f(dict);
  NormOperands n;
  n.subtract_mean = f.get<bool>("subtract_mean", false);
  n.weight = pointer<const void>(f.get<uintptr_t>("weight", 0));
  n.bias = pointer<const void>(f.get<uintptr_t>("bias", 0));
  n.weight_type = dtype_of(f.get<std::string>("weight_type", "f32"));
  n.bias_type = dtype_of(f.get<std::string>("bias_type", "f32"));
  n.eps = f.get<float>("eps", 0.f);
  n.residual = pointer<const void>(f.get<uintptr_t>("residual", 0));
  n.ldr = f.get<int64_t>("ldr", 0);
  n.sum = pointer<void>(f.get<uintptr_t>("sum", 0));
  f.done("norm");
  return n;
}

DeviceInfo device_of(const py::dict& dict) {
  Fields f(dict);
  DeviceInfo d;
  d.sm = f.get<int32_t>("sm", 0);
  d.sm_count = f.get<int32_t>("sm_count", 0);
  d.shared_bytes = f.get<int64_t>("shared_bytes", 0);
  d.l2_bytes = f.get<int64_t>("l2_bytes", 0);
  d.dram_gbps = f.get<int64_t>("dram_gbps", 0);
  const std::string name = f.get<std::string>("name", "");
  d.gpu = name.empty() ? 0 : gpu_id(name.c_str());
  f.done("device");
  return d;
}

const Row& row_of(const std::string& name) {
  const Row* row = find_row(name.c_str());
  if (row == nullptr) throw std::invalid_argument("no kernel is called '" + name + "'");
  return *row;
}

py::list types_of(uint32_t set) {
  py::list names;
  for (const DType type : kTypes)
    if (set & type_bit(type)) names.append(name_of(type));
  return names;
}

py::list kernel_table() {
  py::list table;
  for (int i = 0; i < row_count(); ++i) {
    const Row& r = rows()[i];
    const FamilyFacts& f = r.facts();
    py::dict d;
    d["name"] = r.name;
    d["family"] = f.name;
    d["engine"] = kEngines[static_cast<int32_t>(f.engine)];
    d["x"] = types_of(f.x);
    d["w"] = types_of(f.w);
    d["out"] = types_of(f.outs);
    d["x_packing"] = kPackings[static_cast<int32_t>(f.x_packing)];
    py::list layouts;
    for (int32_t layout = 0; layout < 2; ++layout)
      if (f.w_layouts & layout_bit(static_cast<WeightLayout>(layout))) layouts.append(kLayouts[layout]);
    d["w_layouts"] = layouts;
    d["x_align"] = f.x_align;
    d["w_align"] = f.w_align;
    d["out_align"] = f.out_align;
    d["k_multiple"] = f.k_multiple;
    d["m_max"] = f.m_max;
    d["group_multiple"] = f.group_multiple;
    d["groups_only"] = f.groups_only;
    d["zero_point"] = f.zero_point;
    d["w_zero_point"] = f.w_zero_point;
    d["acc_scale"] = f.acc_scale;
    d["tile"] = py::make_tuple(r.tile_m, r.tile_n, r.tile_k);
    d["cluster"] = py::make_tuple(r.cluster_m, r.cluster_n);
    d["schedule"] = r.schedule;
    d["stages"] = r.stages;
    d["sm_min"] = f.sm_min;
    d["sm_end"] = f.sm_end;
    d["selectable"] = r.selectable;
    d["compiled"] = r.compiled;
    table.append(d);
  }
  return table;
}

py::dict refusals_of(const Selection& selection) {
  py::dict d;
  for (const RowRefusal& r : selection.refusals) d[r.row->name] = text_of(r.refusal);
  return d;
}

// Applies a scalar formula of epilogue_math.h to float arrays; which: see the binding below.
void evaluate(const std::string& which, uintptr_t from, uintptr_t to, int64_t count, float a, float b,
              int32_t zero_point, int32_t qmin, int32_t qmax) {
  const float* x = pointer<const float>(from);
  float* y = pointer<float>(to);
  const auto each = [&](auto f) {
    for (int64_t i = 0; i < count; ++i) y[i] = f(x[i]);
  };
  if (which == "code_from_real")
    return each([&](float v) { return static_cast<float>(code_from_real(v, a, zero_point, qmin, qmax)); });
  if (which == "scale_from_amax") return each([&](float v) { return scale_from_amax(v, qmax); });
  if (which == "real_from_code")
    return each([&](float v) { return real_from_code(static_cast<int32_t>(v), a, zero_point); });
  if (which == "scale_recip") return each([](float v) { return scale_recip(v); });
  const Activation activation = activation_of(which);
  each([&](float v) { return activate(v, activation, a, b); });
}

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

PYBIND11_MODULE(_native, m) {
  m.doc() = "Kernel table, selection and raw launches. Pointers are integers; launches are asynchronous.";
  m.def("build_info", &build_info);
  m.def("cpu_isa", &cpu::isa_report);
  m.def("kernel_table", &kernel_table);
  m.def("device_count", &cuda::device_count);
  m.def("driver_cuda_version", &cuda::driver_cuda_version);
  m.def("why_no_device", &cuda::why_no_device);  // "" where there is a device
  m.def("device_info", [](int32_t device) {
    const DeviceInfo d = cuda::device_info(device);
    return py::dict(py::arg("sm") = d.sm, py::arg("sm_count") = d.sm_count, py::arg("shared_bytes") = d.shared_bytes,
                    py::arg("l2_bytes") = d.l2_bytes, py::arg("dram_gbps") = d.dram_gbps,
                    py::arg("name") = cuda::device_name(device));
  });
  // -> (name or None, microseconds, {row: refusal}); the microseconds are measured where a tuned table has them
  m.def(
      "select",
      [](const py::dict& problem, const py::dict& device, bool has_residual, bool only_compiled) {
        const Selection s = select(problem_of(problem), has_residual, device_of(device), only_compiled);
        return py::make_tuple(s.row ? py::object(py::str(s.row->name)) : py::object(py::none()), s.cost_us,
                              refusals_of(s));
      },
      py::arg("problem"), py::arg("device"), py::arg("has_residual") = false, py::arg("only_compiled") = true);
  // The model's choice while one size of the problem runs through values -> [(name or None, microseconds)].
  m.def(
      "sweep",
      [](const py::dict& problem, const py::dict& device, const std::string& size, const std::vector<int64_t>& values,
         bool only_compiled) {
        GemmProblem p = problem_of(problem);
        const DeviceInfo d = device_of(device);
        int64_t* const field = size == "m" ? &p.m : (size == "n" ? &p.n : (size == "k" ? &p.k : nullptr));
        if (field == nullptr) throw std::invalid_argument("size: '" + size + "'; allowed: m, n, k");
        py::list found;
        for (const int64_t value : values) {
          *field = value;
          const Cheapest best = cheapest(p, false, d, only_compiled);
          found.append(
              py::make_tuple(best.row ? py::object(py::str(best.row->name)) : py::object(py::none()), best.cost_us));
        }
        return found;
      },
      py::arg("problem"), py::arg("device"), py::arg("size"), py::arg("values"), py::arg("only_compiled") = false);
  m.def("refusal", [](const std::string& row, const py::dict& problem, const py::dict& device, bool has_residual) {
    const Refusal r = accept(row_of(row), problem_of(problem), has_residual, device_of(device));
    return py::make_tuple(r.ok(), r.wanted, r.got, text_of(r));
  });
  m.def("cost_us", [](const std::string& row, const py::dict& problem, const py::dict& device) {
    return cost_us(row_of(row), problem_of(problem), device_of(device));
  });
  m.def(
      "choose",
      [](const py::dict& problem, const py::dict& device, bool has_residual) -> py::object {
        const Row* row = choose(problem_of(problem), has_residual, device_of(device));
        return row ? py::object(py::str(row->name)) : py::object(py::none());
      },
      py::arg("problem"), py::arg("device"), py::arg("has_residual") = false);
  // Nanoseconds of one call of the remembered choice, on the average of `calls`.
  m.def("time_choose", [](const py::dict& problem, const py::dict& device, int64_t calls) {
    const GemmProblem p = problem_of(problem);
    const DeviceInfo d = device_of(device);
    const Row* volatile row = choose(p, false, d);
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) row = choose(p, false, d);
    (void)row;
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() /
           static_cast<double>(calls);
  });
  m.def("asks_own_rows", [](const py::dict& problem, const py::dict& device) {
    return asks_own_rows(problem_of(problem), device_of(device));
  });
  m.def("m_bucket", &m_bucket);
  m.def("set_tuned", &set_tuned);  // see plan/tuned.h; -> what was left out and why
  m.def("tuned_remarks", &tuned_remarks);
  // -> (row or "torch", measured microseconds), None without a measurement
  m.def("tuned", [](const py::dict& problem, const py::dict& device) -> py::object {
    const Tuned* tuned = find_tuned(problem_of(problem), device_of(device));
    if (tuned == nullptr) return py::none();
    return py::make_tuple(tuned->row ? tuned->row->name : "torch", tuned->us);
  });
  m.def("k_bound", [](const py::dict& problem) { return k_bound(problem_of(problem)); });
  m.def("evaluate", &evaluate, py::arg("which"), py::arg("x"), py::arg("y"), py::arg("count"), py::arg("a") = 0.f,
        py::arg("b") = 0.f, py::arg("zero_point") = 0, py::arg("qmin") = -127, py::arg("qmax") = 127);
  m.def(
      "workspace_bytes",
      [](const std::string& row, const py::dict& problem, int32_t device) {
        return cuda::workspace_bytes(row_of(row), problem_of(problem), {device, nullptr});
      },
      py::arg("row"), py::arg("problem"), py::arg("device") = 0);
  m.def(
      "gemm",
      [](const std::string& name, const py::dict& problem, const py::dict& operands, const py::dict& epilogue,
         int32_t device, uintptr_t stream) {
        const GemmProblem p = problem_of(problem);
        const GemmOperands o = operands_of(operands);
        const Row& row = row_of(name);
        const Refusal refusal = accept(row, p, o.residual != nullptr, cuda::device_info(device));
        if (!refusal.ok()) throw std::invalid_argument(name + ": " + text_of(refusal));
        const int64_t needed = cuda::workspace_bytes(row, p, {device, nullptr});
        if (needed > 0 && o.workspace == nullptr)
          throw std::invalid_argument(name + ": operand 'workspace' must hold " + std::to_string(needed) +
                                      " bytes, got none");
        cuda::gemm(row, p, o, epilogue_of(epilogue), {device, pointer<void>(stream)});
      },
      py::arg("row"), py::arg("problem"), py::arg("operands"), py::arg("epilogue"), py::arg("device") = 0,
      py::arg("stream") = 0);
  // x: {data, type, rows, cols, ld}; out: {q, ldq, packed, row_sum, scale, zero_point, qmin, qmax, symmetric}.
  m.def(
      "quantize",
      [](const py::dict& x, const std::string& granularity, int64_t group_size, const py::dict& out, int32_t device,
         uintptr_t stream) {
        const Quantiser q(out);
        cuda::quantize(floats_of(x), granularity_of(granularity), group_size, q.params.scale, q.params.zero_point,
                       q.range, q.out, {device, pointer<void>(stream)});
      },
      py::arg("x"), py::arg("granularity"), py::arg("group_size"), py::arg("out"), py::arg("device") = 0,
      py::arg("stream") = 0);
  m.def(
      "quantize_dynamic",
      [](const py::dict& x, const std::string& granularity, int64_t group_size, const py::dict& out,
         uintptr_t workspace, int32_t device, uintptr_t stream) {
        const Quantiser q(out);
        cuda::quantize_dynamic(floats_of(x), granularity_of(granularity), group_size, q.range, q.params, q.out,
                               pointer<void>(workspace), {device, pointer<void>(stream)});
      },
      py::arg("x"), py::arg("granularity"), py::arg("group_size"), py::arg("out"), py::arg("workspace") = 0,
      py::arg("device") = 0, py::arg("stream") = 0);
  m.attr("quantize_workspace_bytes") = cuda::kQuantizeWorkspaceBytes;
  // norm: the fields of NormOperands.
  m.def(
      "norm_quantize",
      [](const py::dict& x, const py::dict& norm, const py::dict& out, int32_t device, uintptr_t stream) {
        const Quantiser q(out);
        cuda::norm_quantize(floats_of(x), norm_of(norm), q.range, q.params, q.out, {device, pointer<void>(stream)});
      },
      py::arg("x"), py::arg("norm"), py::arg("out"), py::arg("device") = 0, py::arg("stream") = 0);
  m.def(
      "silu_mul_quantize",
      [](const py::dict& x, const py::dict& out, int32_t device, uintptr_t stream) {
        const Quantiser q(out);
        cuda::silu_mul_quantize(floats_of(x), q.range, q.params, q.out, {device, pointer<void>(stream)});
      },
      py::arg("x"), py::arg("out"), py::arg("device") = 0, py::arg("stream") = 0);
  m.def("dequantize", [](uintptr_t q, const std::string& type, int64_t rows, int64_t cols, int64_t ld,
                         const std::string& granularity, int64_t group_size, uintptr_t scale, uintptr_t zero_point,
                         uintptr_t out, const std::string& out_type, int32_t device, uintptr_t stream) {
    cuda::dequantize(pointer<const void>(q), dtype_of(type), rows, cols, ld, granularity_of(granularity), group_size,
                     pointer<const float>(scale), pointer<const int32_t>(zero_point), pointer<void>(out),
                     dtype_of(out_type), {device, pointer<void>(stream)});
  });
  m.def("pack_int4", [](uintptr_t q, int64_t rows, int64_t cols, uintptr_t packed, int32_t device, uintptr_t stream) {
    cuda::pack_int4(pointer<const int8_t>(q), rows, cols, pointer<uint8_t>(packed), {device, pointer<void>(stream)});
  });
  m.def("unpack_int4", [](uintptr_t packed, int64_t rows, int64_t cols, uintptr_t q, int32_t device, uintptr_t stream) {
    cuda::unpack_int4(pointer<const uint8_t>(packed), rows, cols, pointer<int8_t>(q), {device, pointer<void>(stream)});
  });
  m.def("blocked128_bytes", [](int64_t n, int64_t k) { return blocked128_bytes(n, k); });
  // Packed int4 weights [n, k], row stride ldw nibbles <-> blocked128, in host memory when device is None.
  m.def(
      "pack_blocked128",
      [](uintptr_t w, int64_t n, int64_t k, int64_t ldw, uintptr_t blocked, std::optional<int32_t> device,
         uintptr_t stream) {
        if (!device) return pack_blocked128(pointer<const uint8_t>(w), n, k, ldw, pointer<uint8_t>(blocked));
        cuda::pack_blocked128(pointer<const uint8_t>(w), n, k, ldw, pointer<uint8_t>(blocked),
                              {*device, pointer<void>(stream)});
      },
      py::arg("w"), py::arg("n"), py::arg("k"), py::arg("ldw"), py::arg("blocked"), py::arg("device") = 0,
      py::arg("stream") = 0);
  m.def(
      "unpack_blocked128",
      [](uintptr_t blocked, int64_t n, int64_t k, int64_t ldw, uintptr_t w, std::optional<int32_t> device,
         uintptr_t stream) {
        if (!device) return unpack_blocked128(pointer<const uint8_t>(blocked), n, k, ldw, pointer<uint8_t>(w));
        cuda::unpack_blocked128(pointer<const uint8_t>(blocked), n, k, ldw, pointer<uint8_t>(w),
                                {*device, pointer<void>(stream)});
      },
      py::arg("blocked"), py::arg("n"), py::arg("k"), py::arg("ldw"), py::arg("w"), py::arg("device") = 0,
      py::arg("stream") = 0);
  m.def("weight_sums", [](uintptr_t w, const std::string& type, int64_t n, int64_t k, int64_t ldw, int64_t group_size,
                          uintptr_t sums, int32_t device, uintptr_t stream) {
    cuda::weight_sums(pointer<const void>(w), dtype_of(type), n, k, ldw, group_size, pointer<int32_t>(sums),
                      {device, pointer<void>(stream)});
  });
}
