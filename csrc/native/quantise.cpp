#include <optional>

#include "core/blocked128.h"
#include "cuda/cuda.h"
#include "native/parts.h"

namespace pyquant::native {
namespace {

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

}  // namespace

void add_quantise(py::module_& m) {
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
  // gate: {up, ldu, activation, clamp_min, clamp_max}.
  m.def(
      "activation_mul_quantize",
      [](const py::dict& x, const py::dict& gate, const py::dict& out, int32_t device, uintptr_t stream) {
        const Quantiser q(out);
        cuda::activation_mul_quantize(floats_of(x), gate_of(gate), q.range, q.params, q.out,
                                      {device, pointer<void>(stream)});
      },
      py::arg("x"), py::arg("gate"), py::arg("out"), py::arg("device") = 0, py::arg("stream") = 0);
  m.def(
      "hadamard_quantize",
      [](const py::dict& x, int64_t block, const py::dict& out, std::optional<double> scale, int32_t device,
         uintptr_t stream) {
        const Quantiser q(out);
        cuda::hadamard_quantize(floats_of(x), hadamard_of(block, scale), q.range, q.params, q.out,
                                {device, pointer<void>(stream)});
      },
      py::arg("x"), py::arg("block"), py::arg("out"), py::arg("scale") = py::none(), py::arg("device") = 0,
      py::arg("stream") = 0);
  m.def(
      "hadamard_transform",
      [](const py::dict& x, int64_t block, uintptr_t out, std::optional<double> scale, int32_t device,
         uintptr_t stream) {
        cuda::hadamard_transform(floats_of(x), hadamard_of(block, scale), pointer<void>(out),
                                 {device, pointer<void>(stream)});
      },
      py::arg("x"), py::arg("block"), py::arg("out"), py::arg("scale") = py::none(), py::arg("device") = 0,
      py::arg("stream") = 0);
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

}  // namespace pyquant::native
