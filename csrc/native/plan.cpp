#include <chrono>

#include "native/parts.h"
#include "plan/chip.h"
#include "plan/choice.h"
#include "plan/cost.h"
#include "plan/layer.h"
#include "plan/route.h"
#include "plan/select.h"
#include "plan/swizzle.h"
#include "plan/tuned.h"

namespace pyquant::native {
namespace {

constexpr const char* kPackings[] = {"bytes", "nibbles", "either"};
constexpr const char* kEngines[] = {"byte_wise", "mma", "wgmma", "decode"};

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
    d["k_least"] = f.k_least;
    d["m_max"] = f.m_max;
    d["group_multiple"] = f.group_multiple;
    d["group_step"] = f.group_step;
    d["groups_only"] = f.groups_only;
    d["step_multiple"] = f.step_multiple;
    d["steps_only"] = f.steps_only;
    d["channel_multiple"] = f.channel_multiple;
    d["experts_only"] = f.experts_only;
    d["chooses_rows"] = f.chooses_rows;
    d["rounds_weights"] = f.rounds_weights;
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

// select() as a PickRow; the table of this build, or the whole.
template <bool kOnlyCompiled>
const Row* select_row(const GemmProblem& problem, bool has_residual, const DeviceInfo& device) {
  return select(problem, has_residual, device, kOnlyCompiled).row;
}

py::dict refusals_of(const Selection& selection) {
  py::dict d;
  for (const RowRefusal& r : selection.refusals) d[r.row->name] = text_of(r.refusal);
  return d;
}

}  // namespace

void add_plan(py::module_& m) {
  m.def("kernel_table", &kernel_table);
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
  m.def("chip", [](const py::dict& device) {
    const Chip c = chip_of(device_of(device));
    return py::dict(py::arg("clocks_per_us") = c.clocks_per_us, py::arg("mma_macs") = c.mma_macs,
                    py::arg("mma_float_macs") = c.mma_float_macs, py::arg("wgmma_macs") = c.wgmma_macs,
                    py::arg("framework_macs") = c.framework_macs, py::arg("dram_bytes_per_us") = c.dram_bytes_per_us,
                    py::arg("l2_bytes_per_us") = c.l2_bytes_per_us);
  });
  m.def("cost_us", [](const std::string& row, const py::dict& problem, const py::dict& device) {
    return cost_us(row_of(row), problem_of(problem), device_of(device));
  });
  // The same by what it is spent on; arithmetic, loads and memory overlap.
  m.def("cost_terms", [](const std::string& row, const py::dict& problem, const py::dict& device) {
    const CostTerms t = cost_terms(row_of(row), problem_of(problem), device_of(device));
    return py::dict(py::arg("launch") = t.launch, py::arg("latency") = t.latency, py::arg("stores") = t.stores,
                    py::arg("sums") = t.sums, py::arg("arithmetic") = t.arithmetic, py::arg("loads") = t.loads,
                    py::arg("memory") = t.memory);
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
  // What bindings carry out -> (form, name or None, its microseconds, {row: refusal}, whether those are measured)
  m.def(
      "route",
      [](const std::string& entry, const py::dict& problem, const py::dict& device, bool has_residual, bool int4_range,
         bool only_compiled) -> py::tuple {
        const DeviceInfo d = device_of(device);
        const Request request{entry_of(entry), problem_of(problem), has_residual, int4_range};
        const Route r = route(request, d, only_compiled ? select_row<true> : select_row<false>);
        const py::str form = kFormNames[static_cast<int32_t>(r.form)];
        if (r.form == Form::framework) return py::make_tuple(form, py::none(), 0.0, py::dict(), false);
        const Selection s = select(r.problem, has_residual, d, only_compiled);
        return py::make_tuple(form, s.row ? py::object(py::str(s.row->name)) : py::object(py::none()), s.cost_us,
                              refusals_of(s), s.is_measured);
      },
      py::arg("entry"), py::arg("problem"), py::arg("device"), py::arg("has_residual") = false,
      py::arg("int4_range") = false, py::arg("only_compiled") = true);
  // Whole layers -> (microseconds, whether the product was measured, name of the row or None: the framework's)
  const auto layer = [](const LayerTime& t) {
    return py::make_tuple(t.us, t.is_measured, t.row ? py::object(py::str(t.row->name)) : py::object(py::none()));
  };
  m.def(
      "layer_time",
      [layer](const std::string& entry, const py::dict& problem, const py::dict& device, bool has_residual,
              bool int4_range, bool only_compiled) {
        return layer(layer_time({entry_of(entry), problem_of(problem), has_residual, int4_range}, device_of(device),
                                only_compiled));
      },
      py::arg("entry"), py::arg("problem"), py::arg("device"), py::arg("has_residual") = false,
      py::arg("int4_range") = false, py::arg("only_compiled") = true);
  m.def("framework_time", [layer](int64_t m, int64_t n, int64_t k, const std::string& type, const py::dict& device) {
    return layer(framework_time(m, n, k, dtype_of(type), device_of(device)));
  });
  m.def("m_bucket", &m_bucket);
  m.def("tile_swizzle", [](int64_t rows, int64_t columns, int64_t tile_rows, int64_t tile_columns, int64_t at_once) {
    return tile_swizzle({rows, columns, tile_rows, tile_columns, at_once});
  });
  m.def("set_tuned", &set_tuned);  // see plan/tuned.h; -> what was left out and why
  m.def("tuned_remarks", &tuned_remarks);
  // -> (row or "torch", measured microseconds), None without a measurement
  m.def(
      "tuned",
      [](const py::dict& problem, const py::dict& device, bool has_residual) -> py::object {
        const Tuned* tuned = find_tuned(problem_of(problem), has_residual, device_of(device));
        if (tuned == nullptr) return py::none();
        return py::make_tuple(tuned->row ? tuned->row->name : "torch", tuned->us);
      },
      py::arg("problem"), py::arg("device"), py::arg("has_residual") = false);
  m.def("k_bound", [](const py::dict& problem) { return k_bound(problem_of(problem)); });
}

}  // namespace pyquant::native
