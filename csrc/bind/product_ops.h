// The GEMMs of two tensors and the packing of int4 codes, once for all backends: check, allocate, call the backend.
#pragma once
#include <torch/csrc/stable/library.h>

#include "bind/boxed.h"
#include "bind/check.h"
#include "bind/text.h"

namespace pyquant::bind {

template <class Backend>
struct ProductOps {
  // more: what else a backend's gemm takes.
  template <class... More>
  static Tensor product(const GemmArgs& args, const More&... more) {
    GemmCall call = gemm_call(args);
    const Backend on(args.x);
    if (const CodeType* code = find_code_type(call.problem.x))
      on.check_zero_points("x_zero_point", call.operands.x_zero_point, count_of(args.x_zero_point), code->qmin,
                           code->qmax);
    on.check_zero_points("out_zero_point", call.operands.out_zero_point, 1, args.out_qmin, args.out_qmax);
    Tensor out = on.empty(call.out_shape, call.out_type);
    if (out.numel() == 0) return out;
    call.operands.out = out.mutable_data_ptr();
    on.gemm(call, args.x, more...);
    return out;
  }

#define PYQUANT_GEMM_OP(X, W)                                                                                        \
  static Tensor gemm_##X##W(const Tensor& x, const Tensor& w, MaybeTensor w_scale, MaybeTensor x_scale,              \
                            MaybeTensor x_zero_point, MaybeTensor bias, MaybeTensor residual, MaybeTensor out_scale, \
                            MaybeTensor out_zero_point, int64_t group_size, Text activation, double clamp_min,       \
                            double clamp_max, int64_t out_qmin, int64_t out_qmax,                                    \
                            std::optional<ScalarType> out_dtype) {                                                   \
    constexpr Product kProduct{DType::X, DType::W};                                                                  \
    return product({&kProduct, x, w, w_scale, x_scale, x_zero_point, bias, residual, out_scale, out_zero_point,      \
                    group_size, activation, clamp_min, clamp_max, out_qmin, out_qmax,                                \
                    out_dtype.value_or(ScalarType::Float)});                                                         \
  }
  PYQUANT_PRODUCTS(PYQUANT_GEMM_OP)
#undef PYQUANT_GEMM_OP

  static Tensor pack_int4(const Tensor& q) {
    dtype_in("q", q, {ScalarType::Char});
    min_dim("q", q, 1);
    Shape shape = shape_of(q);
    const int64_t k = shape.back();
    shape.back() = (k + 1) / 2;
    const Backend on(q);
    Tensor out = on.empty(shape, ScalarType::Byte);
    if (out.numel() == 0) return out;
    std::vector<Tensor> keep;
    on.pack_int4(static_cast<const int8_t*>(dense(q, keep)), q.numel() / k, k,
                 static_cast<uint8_t*>(out.mutable_data_ptr()));
    return out;
  }

  static Tensor unpack_int4(const Tensor& packed, int64_t k) {
    dtype_in("packed", packed, {ScalarType::Byte});
    min_dim("packed", packed, 1);
    Shape shape = shape_of(packed);
    shape.back() = unpacked_columns(shape.back(), k);
    const Backend on(packed);
    Tensor out = on.empty(shape, ScalarType::Char);
    if (out.numel() == 0) return out;
    std::vector<Tensor> keep;
    on.unpack_int4(static_cast<const uint8_t*>(dense(packed, keep)), out.numel() / k, k,
                   static_cast<int8_t*>(out.mutable_data_ptr()));
    return out;
  }

  static void add_gemms_to(torch::stable::detail::StableLibrary& m) {
#define PYQUANT_GEMM_OP(X, W) m.impl("gemm_" #X #W, PYQUANT_BOX(&ProductOps::gemm_##X##W));
    PYQUANT_PRODUCTS(PYQUANT_GEMM_OP)
#undef PYQUANT_GEMM_OP
  }
  static void add_packing_to(torch::stable::detail::StableLibrary& m) {
    m.impl("pack_int4", PYQUANT_BOX(&ProductOps::pack_int4));
    m.impl("unpack_int4", PYQUANT_BOX(&ProductOps::unpack_int4));
  }
};

}  // namespace pyquant::bind
