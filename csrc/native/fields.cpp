#include "native/fields.h"

#include "plan/tuned.h"

namespace pyquant::native {
namespace {

// The value that a list of names gives `name`. what: for the error.
template <class T, size_t kCount>
T named(const char* const (&names)[kCount], const std::string& name, const char* what) {
  for (size_t i = 0; i < kCount; ++i)
    if (name == names[i]) return static_cast<T>(i);
  throw std::invalid_argument(std::string("unknown ") + what + " '" + name + "'");
}

ImageRows image_of(const py::dict& dict) {
  Fields f(dict);
  ImageRows image;
  image.channels = f.get<int64_t>("channels", 0);
  image.taps = f.get<int64_t>("taps", 1);
  image.out_height = f.get<int64_t>("out_height", 1);
  image.out_width = f.get<int64_t>("out_width", 1);
  image.image_step = f.get<int64_t>("image_step", 0);
  const auto pair = [&](const char* key, int64_t (&to)[2]) {
    const auto values = f.get<std::vector<int64_t>>(key, {0, 0});
    if (values.size() != 2)
      throw std::invalid_argument(std::string(key) + ": two numbers, got " + std::to_string(values.size()));
    to[0] = values[0], to[1] = values[1];
  };
  pair("window_step", image.window_step);
  pair("tap_step", image.tap_step);
  f.done("image");
  return image;
}

}  // namespace

DType dtype_of(const std::string& name) {
  for (const DType type : kTypes)
    if (name == name_of(type)) return type;
  throw std::invalid_argument("unknown element type '" + name + "'");
}

Activation activation_of(const std::string& name) { return named<Activation>(kActivationNames, name, "activation"); }

Granularity granularity_of(const std::string& name) {
  static constexpr const char* kNames[] = {"tensor", "rows", "groups"};
  return named<Granularity>(kNames, name, "granularity");
}

Entry entry_of(const std::string& name) { return named<Entry>(kEntryNames, name, "entry"); }

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
  p.w_layout = named<WeightLayout>(kLayouts, f.get<std::string>("w_layout", "natural"), "weight layout");
  p.ldx = f.get<int64_t>("ldx", p.x_packed ? whole_bytes(p.x, p.k) : p.k);
  p.ldw = f.get<int64_t>("ldw", whole_bytes(p.w, p.k));
  p.ldo = f.get<int64_t>("ldo", whole_bytes(p.out, p.n));
  p.ldr = f.get<int64_t>("ldr", p.n);
  p.group_size = f.get<int64_t>("group_size", 0);
  p.step_size = f.get<int64_t>("step_size", 0);
  if (dict.contains("image")) p.image = image_of(f.get<py::dict>("image", {}));
  p.experts = f.get<int64_t>("experts", 0);
  p.chooses_rows = f.get<bool>("chooses_rows", false);
  p.exact_weights = f.get<bool>("exact_weights", false);
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
  o.w_step = pointer<const uint8_t>(at("w_step"));
  o.w_scale = pointer<const float>(at("w_scale"));
  o.w_sum = pointer<const int32_t>(at("w_sum"));
  o.w_zero_point = pointer<const int32_t>(at("w_zero_point"));
  o.bias = pointer<const float>(at("bias"));
  o.expert_ends = pointer<const int32_t>(at("expert_ends"));
  f.get<std::vector<int64_t>>("expert_shifts", {});  // a list of the caller's: gemm.cpp
  o.x_rows = pointer<const int64_t>(at("x_rows"));
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

GateOperands gate_of(const py::dict& dict) {
  Fields f(dict);
  GateOperands g;
  g.up = pointer<const void>(f.get<uintptr_t>("up", 0));
  g.ldu = f.get<int64_t>("ldu", 0);
  g.activation = activation_of(f.get<std::string>("activation", "silu"));
  g.clamp_min = f.get<float>("clamp_min", 0.f);
  g.clamp_max = f.get<float>("clamp_max", 0.f);
  f.done("gate");
  return g;
}

DeviceInfo device_of(const py::dict& dict) {
  Fields f(dict);
  DeviceInfo d;
  d.sm = f.get<int32_t>("sm", 0);
  d.sm_count = f.get<int32_t>("sm_count", 0);
  d.shared_bytes = f.get<int64_t>("shared_bytes", 0);
  d.l2_bytes = f.get<int64_t>("l2_bytes", 0);
  d.dram_gbps = f.get<int64_t>("dram_gbps", 0);
  d.clock_mhz = f.get<int64_t>("clock_mhz", 0);
  const std::string name = f.get<std::string>("name", "");
  d.halves_float_sums = is_geforce(name.c_str());
  d.gpu = name.empty() ? 0 : gpu_id(name.c_str());
  f.done("device");
  return d;
}

const Row& row_of(const std::string& name) {
  const Row* row = find_row(name.c_str());
  if (row == nullptr) throw std::invalid_argument("no kernel is called '" + name + "'");
  return *row;
}

}  // namespace pyquant::native
