// C face of the CPU engine for ctypes (test_cpu_engine.py): plain integers in place of the structs.
#include <cstring>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/weight_only.h"

using namespace pyquant;

namespace {

int threads = 1;
thread_local bool in_worker = false;

// As many real threads as asked for, each with one contiguous part: what a pool does. Like torch's, it answers 1 to a
// worker that asks how many threads there are.
void spawn(int64_t begin, int64_t end, int64_t, cpu::Body body, void* context) {
  const int64_t parts = end - begin < threads ? end - begin : threads;
  std::vector<std::thread> pool;
  for (int64_t p = 0; p < parts; ++p)
    pool.emplace_back([=] {
      in_worker = true;
      body(context, begin + (end - begin) * p / parts, begin + (end - begin) * (p + 1) / parts);
    });
  for (auto& t : pool) t.join();
}

int count() { return in_worker ? 1 : threads; }

// The fields of a LinearSpec in the order in which cpu_engine.py hands them over.
enum SpecField {
  kSpecN,
  kSpecK,
  kSpecWBits,
  kSpecGroupSize,
  kSpecInput,
  kSpecXQmin,
  kSpecXQmax,
  kSpecXSymmetric,
  kSpecActivation,
  kSpecClampMin,
  kSpecClampMax,
  kSpecHasBias,
  kSpecCodesOut,
  kSpecOutQmin,
  kSpecOutQmax,
  kSpecLayout,
  kSpecFields
};

LinearSpec spec_of(const int64_t* v) {
  LinearSpec s;
  s.n = v[kSpecN];
  s.k = v[kSpecK];
  s.w = weight_type(v[kSpecWBits]);
  s.group_size = v[kSpecGroupSize];
  s.input = static_cast<InputMode>(v[kSpecInput]);
  s.x_qmin = static_cast<int32_t>(v[kSpecXQmin]);
  s.x_qmax = static_cast<int32_t>(v[kSpecXQmax]);
  s.x_symmetric = v[kSpecXSymmetric] != 0;
  s.activation = static_cast<Activation>(v[kSpecActivation]);
  const auto bits = [](int64_t b) {
    float f;
    const auto u = static_cast<uint32_t>(b);
    std::memcpy(&f, &u, 4);
    return f;
  };
  s.clamp_min = bits(v[kSpecClampMin]);
  s.clamp_max = bits(v[kSpecClampMax]);
  s.has_bias = v[kSpecHasBias] != 0;
  s.codes_out = v[kSpecCodesOut] != 0;
  s.out_qmin = static_cast<int32_t>(v[kSpecOutQmin]);
  s.out_qmax = static_cast<int32_t>(v[kSpecOutQmax]);
  return s;
}

}  // namespace

extern "C" {

#define FACE __attribute__((visibility("default")))

FACE int t_use_isa(int isa) { return cpu::use_isa(static_cast<cpu::Isa>(isa)); }
FACE int t_isa() { return static_cast<int>(cpu::isa()); }
FACE int t_self_test(int isa) { return cpu::self_test(cpu::kernels_of(static_cast<cpu::Isa>(isa))); }
FACE void t_report(char* text, int64_t size) {
  std::string report;
  try {
    report = cpu::isa_report();
  } catch (const std::invalid_argument& refused) {
    report = refused.what();
  }
  std::strncpy(text, report.c_str(), static_cast<size_t>(size));
}
FACE void t_threads(int n) {
  threads = n;
  cpu::set_parallel_for(n > 1 ? spawn : nullptr, n > 1 ? count : nullptr);
}

FACE void t_quantize(const void* x, int x_type, int64_t rows, int64_t cols, int64_t ld, int granularity, int64_t group,
                     const float* scale, const int32_t* zero_point, int qmin, int qmax, int8_t* q) {
  cpu::quantize(x, static_cast<DType>(x_type), rows, cols, ld, static_cast<Granularity>(granularity), group, scale,
                zero_point, qmin, qmax, q);
}
FACE void t_quantize_dynamic(const void* x, int x_type, int64_t rows, int64_t cols, int64_t ld, int granularity,
                             int64_t group, int symmetric, int qmin, int qmax, int8_t* q, float* scale,
                             int32_t* zero_point) {
  cpu::quantize_dynamic(x, static_cast<DType>(x_type), rows, cols, ld, static_cast<Granularity>(granularity), group,
                        symmetric != 0, qmin, qmax, q, scale, zero_point);
}
FACE void t_dequantize(const void* q, int q_type, int64_t rows, int64_t cols, int64_t ld, int granularity,
                       int64_t group, const float* scale, const int32_t* zero_point, void* out, int out_type) {
  cpu::dequantize(q, static_cast<DType>(q_type), rows, cols, ld, static_cast<Granularity>(granularity), group, scale,
                  zero_point, out, static_cast<DType>(out_type));
}
FACE void t_pack_int4(const int8_t* q, int64_t rows, int64_t cols, uint8_t* packed) {
  cpu::pack_int4(q, rows, cols, packed);
}
FACE void t_unpack_int4(const uint8_t* packed, int64_t rows, int64_t cols, int8_t* q) {
  cpu::unpack_int4(packed, rows, cols, q);
}
FACE void t_weight_sums(const void* w, int w_type, int64_t n, int64_t k, int64_t ldw, int64_t group, int32_t* sums) {
  cpu::weight_sums(w, static_cast<DType>(w_type), n, k, ldw, group, sums);
}

// sizes: m n k x w out ldx ldw ldo ldr group per_token_scale per_token_zero residual_type activation out_qmin out_qmax;
// pointers in the order of GemmOperands.
FACE void t_gemm(const int64_t* s, const void* const* p, float clamp_min, float clamp_max) {
  GemmProblem g;
  g.m = s[0];
  g.n = s[1];
  g.k = s[2];
  g.x = static_cast<DType>(s[3]);
  g.w = static_cast<DType>(s[4]);
  g.out = static_cast<DType>(s[5]);
  g.ldx = s[6];
  g.ldw = s[7];
  g.ldo = s[8];
  g.ldr = s[9];
  g.group_size = s[10];
  g.per_token_scale = s[11] != 0;
  g.per_token_zero_point = s[12] != 0;
  g.residual = static_cast<DType>(s[13]);
  GemmOperands o;
  o.x = p[0];
  o.w = p[1];
  o.x_scale = static_cast<const float*>(p[2]);
  o.x_zero_point = static_cast<const int32_t*>(p[3]);
  g.has_zero_point = o.x_zero_point != nullptr;
  o.w_scale = static_cast<const float*>(p[4]);
  o.w_sum = static_cast<const int32_t*>(p[5]);
  o.bias = static_cast<const float*>(p[6]);
  o.residual = p[7];
  o.out = const_cast<void*>(p[8]);
  o.out_scale = static_cast<const float*>(p[9]);
  o.out_zero_point = static_cast<const int32_t*>(p[10]);
  Epilogue e;
  e.activation = static_cast<Activation>(s[14]);
  e.clamp_min = clamp_min;
  e.clamp_max = clamp_max;
  e.out_qmin = static_cast<int32_t>(s[15]);
  e.out_qmax = static_cast<int32_t>(s[16]);
  cpu::gemm(g, o, e);
}

FACE int64_t t_packed_bytes(const int64_t* spec) { return static_cast<int64_t>(cpu::packed_bytes(spec_of(spec))); }
FACE void t_pack_linear(const int64_t* spec, const void* codes, const float* w_scale, const float* bias,
                        const float* x_scale, const int32_t* x_zero_point, const float* out_scale,
                        const int32_t* out_zero_point, void* packed) {
  cpu::pack_linear(spec_of(spec), {codes, w_scale, bias, x_scale, x_zero_point, out_scale, out_zero_point}, packed);
}
FACE void t_unpack_linear(const int64_t* spec, const void* packed, void* codes) {
  cpu::unpack_linear(spec_of(spec), packed, codes);
}
FACE void t_linear(const int64_t* spec, const void* packed, const void* x, int x_type, int64_t m, int64_t ldx,
                   const void* residual, int residual_type, int64_t ldr, void* out, int out_type) {
  cpu::linear(spec_of(spec), packed, x, static_cast<DType>(x_type), m, ldx, residual, static_cast<DType>(residual_type),
              ldr, out, static_cast<DType>(out_type));
}
// sizes: batch, channels, height, width, whether channels are last, x type, out type.
FACE void t_conv(const int64_t* spec, const void* packed, const int64_t* window, const int64_t* sizes, const void* x,
                 const float* x_scale, const int32_t* x_zero_point, void* out) {
  pyquant::ConvOperands o;
  o.window = window_from_wire(window);
  o.batch = sizes[0];
  o.channels = sizes[1];
  o.height = sizes[2];
  o.width = sizes[3];
  o.channels_last = sizes[4] != 0;
  o.x = x;
  o.x_type = static_cast<DType>(sizes[5]);
  o.x_scale = x_scale;
  o.x_zero_point = x_zero_point;
  o.out = out;
  o.out_type = static_cast<DType>(sizes[6]);
  cpu::conv(spec_of(spec), packed, o);
}
cpu::FloatEpilogue float_epilogue_of(const int64_t* sizes, const float* bias, const float* clamp, const void* residual,
                                     void* out) {
  cpu::FloatEpilogue e;
  e.n = sizes[0];
  e.bias = bias;
  e.activation = static_cast<Activation>(sizes[1]);
  e.clamp_min = clamp[0];
  e.clamp_max = clamp[1];
  e.residual = residual;
  e.residual_type = static_cast<DType>(sizes[2]);
  e.ldr = sizes[3];
  e.out = out;
  e.out_type = static_cast<DType>(sizes[4]);
  return e;
}

// sizes: n, activation, residual type, ldr, out type.
FACE void t_float_epilogue(const int64_t* sizes, int64_t m, const float* acc, const float* bias, const float* clamp,
                           const void* residual, void* out) {
  cpu::float_epilogue(float_epilogue_of(sizes, bias, clamp, residual, out), acc, m);
}
// sizes: as above, then k, type of the codes, bytes of a channel, group size, m, type of x, ldx.
FACE void t_weight_only(const int64_t* sizes, const void* codes, const float* scale, const int32_t* zero_point,
                        const void* x, const float* bias, const float* clamp, const void* residual, void* out) {
  cpu::IntegerWeights w;
  w.codes = codes;
  w.n = sizes[0];
  w.k = sizes[5];
  w.type = static_cast<DType>(sizes[6]);
  w.row_bytes = sizes[7];
  w.group_size = sizes[8];
  w.scale = scale;
  w.zero_point = zero_point;
  const int64_t m = sizes[9], ldx = sizes[11];
  const auto type = static_cast<DType>(sizes[10]);
  const cpu::RowsForm form = cpu::form_of(w, type, m);
  const int64_t columns = cpu::columns_in(form, w);
  std::vector<uint32_t> rows(static_cast<size_t>(m * columns), 0x7fc07fc0u);  // NaN, in both types
  cpu::LayerRows given{form, rows.data(), columns, m};
  if (form == cpu::RowsForm::pairs && w.k % 2 == 0)
    given = {form, x, ldx, m};
  else
    cpu::prepare_rows(form, w, x, type, m, ldx, rows.data());
  cpu::weight_only({w, given, float_epilogue_of(sizes, bias, clamp, residual, out)});
}

}  // extern "C"
