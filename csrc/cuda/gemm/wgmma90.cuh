// wgmma of s8 weights from registers and s8 activations for 48, 80 and 112 tokens, in the shape in which CUTLASS keeps
// its own. CUTLASS has them too, behind a switch that brings in every shape and makes a file take five times as long to
// compile.
#pragma once
#include <cute/atom/mma_traits_sm90_gmma.hpp>

namespace pyquant::cuda {

#define PYQUANT_EIGHT_D(T)                                                                                          \
  uint32_t &d##T##0, uint32_t &d##T##1, uint32_t &d##T##2, uint32_t &d##T##3, uint32_t &d##T##4, uint32_t &d##T##5, \
      uint32_t &d##T##6, uint32_t &d##T##7
#define PYQUANT_EIGHT_R(T) \
  "+r"(d##T##0), "+r"(d##T##1), "+r"(d##T##2), "+r"(d##T##3), "+r"(d##T##4), "+r"(d##T##5), "+r"(d##T##6), "+r"(d##T##7)

// Written out: the text of an instruction and the numbers of its operands are literals, which no template makes.
struct Wgmma64x48 {
  using DRegisters = void;
  using ARegisters = uint32_t[4];
  using BRegisters = uint64_t[1];
  using CRegisters = uint32_t[24];

  CUTE_HOST_DEVICE static void fma(const uint32_t& a0, const uint32_t& a1, const uint32_t& a2, const uint32_t& a3,
                                   const uint64_t& b, PYQUANT_EIGHT_D(0), PYQUANT_EIGHT_D(1), PYQUANT_EIGHT_D(2),
                                   cute::GMMA::ScaleOut scale = cute::GMMA::ScaleOut::One) {
#if defined(CUTE_ARCH_MMA_SM90A_ENABLED)
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %29, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k32.s32.s8.s8 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23}, {%24, %25, %26, %27}, %28, adds;\n"
        "}\n"
        : PYQUANT_EIGHT_R(0), PYQUANT_EIGHT_R(1), PYQUANT_EIGHT_R(2)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int32_t>(scale)));
#endif
  }
};

struct Wgmma64x80 {
  using DRegisters = void;
  using ARegisters = uint32_t[4];
  using BRegisters = uint64_t[1];
  using CRegisters = uint32_t[40];

  CUTE_HOST_DEVICE static void fma(const uint32_t& a0, const uint32_t& a1, const uint32_t& a2, const uint32_t& a3,
                                   const uint64_t& b, PYQUANT_EIGHT_D(0), PYQUANT_EIGHT_D(1), PYQUANT_EIGHT_D(2),
                                   PYQUANT_EIGHT_D(3), PYQUANT_EIGHT_D(4),
                                   cute::GMMA::ScaleOut scale = cute::GMMA::ScaleOut::One) {
#if defined(CUTE_ARCH_MMA_SM90A_ENABLED)
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %45, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n80k32.s32.s8.s8 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}, "
        "{%40, %41, %42, %43}, %44, adds;\n"
        "}\n"
        : PYQUANT_EIGHT_R(0), PYQUANT_EIGHT_R(1), PYQUANT_EIGHT_R(2), PYQUANT_EIGHT_R(3), PYQUANT_EIGHT_R(4)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int32_t>(scale)));
#endif
  }
};

struct Wgmma64x112 {
  using DRegisters = void;
  using ARegisters = uint32_t[4];
  using BRegisters = uint64_t[1];
  using CRegisters = uint32_t[56];

  CUTE_HOST_DEVICE static void fma(const uint32_t& a0, const uint32_t& a1, const uint32_t& a2, const uint32_t& a3,
                                   const uint64_t& b, PYQUANT_EIGHT_D(0), PYQUANT_EIGHT_D(1), PYQUANT_EIGHT_D(2),
                                   PYQUANT_EIGHT_D(3), PYQUANT_EIGHT_D(4), PYQUANT_EIGHT_D(5), PYQUANT_EIGHT_D(6),
                                   cute::GMMA::ScaleOut scale = cute::GMMA::ScaleOut::One) {
#if defined(CUTE_ARCH_MMA_SM90A_ENABLED)
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %61, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n112k32.s32.s8.s8 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
        "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
        "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55}, {%56, %57, %58, %59}, %60, adds;\n"
        "}\n"
        : PYQUANT_EIGHT_R(0), PYQUANT_EIGHT_R(1), PYQUANT_EIGHT_R(2), PYQUANT_EIGHT_R(3), PYQUANT_EIGHT_R(4),
          PYQUANT_EIGHT_R(5), PYQUANT_EIGHT_R(6)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(static_cast<int32_t>(scale)));
#endif
  }
};

#undef PYQUANT_EIGHT_D
#undef PYQUANT_EIGHT_R

template <int Tokens>
struct WgmmaTraits {
  using ValTypeD = int32_t;
  using ValTypeA = int8_t;
  using ValTypeB = int8_t;
  using ValTypeC = int32_t;
  using FrgTypeB = cute::GMMA::smem_desc<cute::GMMA::Major::K>;
  using Shape_MNK = cute::Shape<cute::_64, cute::Int<Tokens>, cute::_32>;
  using ThrID = cute::Layout<cute::_128>;
  using ALayout = cute::GMMA::ALayout_64x32;
  using BLayout = cute::GMMA::ABLayout<Tokens, 32>;
  using CLayout = cute::GMMA::CLayout_64xN<Tokens>;

  cute::GMMA::ScaleOut accumulate_ = cute::GMMA::ScaleOut::One;
};

// The widest instruction that tiles so many tokens.
template <int Tokens, int Depth>
CUTE_HOST_DEVICE constexpr auto wgmma_of() {
  if constexpr (Tokens % 80 == 0)
    return Wgmma64x80{};
  else if constexpr (Tokens == 48)
    return Wgmma64x48{};
  else if constexpr (Tokens == 112)
    return Wgmma64x112{};
  else
    return cute::GMMA::rs_op_selector<int8_t, int8_t, int32_t,
                                      cute::Shape<cute::_64, cute::Int<Tokens>, cute::Int<Depth>>, cute::GMMA::Major::K,
                                      cute::GMMA::Major::K>();
}

}  // namespace pyquant::cuda

template <>
struct cute::MMA_Traits<pyquant::cuda::Wgmma64x48> : pyquant::cuda::WgmmaTraits<48> {};
template <>
struct cute::MMA_Traits<pyquant::cuda::Wgmma64x80> : pyquant::cuda::WgmmaTraits<80> {};
template <>
struct cute::MMA_Traits<pyquant::cuda::Wgmma64x112> : pyquant::cuda::WgmmaTraits<112> {};
