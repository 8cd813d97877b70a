# The CPU engine. Each instruction set is one file with its own flags; nothing else may use more than the base ones.
set(PYQUANT_CPU_SOURCES
    csrc/cpu/blocks.cpp
    csrc/cpu/ceilings.cpp
    csrc/cpu/dispatch.cpp
    csrc/cpu/fake_quantize.cpp
    csrc/cpu/float_epilogue.cpp
    csrc/cpu/fused_quantize.cpp
    csrc/cpu/gemm.cpp
    csrc/cpu/histogram.cpp
    csrc/cpu/isa_scalar.cpp
    csrc/cpu/layer.cpp
    csrc/cpu/linear.cpp
    csrc/cpu/pack.cpp
    csrc/cpu/quantize.cpp
    csrc/cpu/self_test.cpp
    csrc/cpu/threads.cpp)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND PYQUANT_CPU_SOURCES csrc/cpu/isa_avx2.cpp csrc/cpu/isa_avx512_vnni.cpp csrc/cpu/isa_amx_int8.cpp)
  # g++ 12 takes the deliberately undefined operands inside its own intrinsics for mistakes (GCC bug 105593).
  set(PYQUANT_AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mprfchw -mprefer-vector-width=512
      -Wno-uninitialized -Wno-maybe-uninitialized)
  set_source_files_properties(csrc/cpu/isa_avx2.cpp PROPERTIES COMPILE_OPTIONS "-mavx2;-mfma;-mf16c;-mprfchw")
  set_source_files_properties(csrc/cpu/isa_avx512_vnni.cpp PROPERTIES COMPILE_OPTIONS "${PYQUANT_AVX512}")
  # The few rows that AMX leaves over run in isa_avx512_vnni.cpp, so no vector code is compiled here.
  set_source_files_properties(csrc/cpu/isa_amx_int8.cpp PROPERTIES COMPILE_OPTIONS "-mamx-tile;-mamx-int8")
endif()
