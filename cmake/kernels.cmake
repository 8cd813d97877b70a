# The kernel table: one line an instance, the only place that lists them. From it come
#   generated/kernels.inc    every row, compiled or not (the table is data: plan/ and the tests read it without nvcc)
#   generated/launchers.inc  which rows have machine code in this build
#   generated/cuda/*.cu      the instances, rewritten only when they change, PYQUANT_INSTANCES_PER_FILE to a file
#
#   pyquant_family(<family> <header> <architectures> <C++ type>)
#     A word of PYQUANT_FAMILIES (csrc/plan/family.h), csrc/cuda/gemm/<header>.cuh, and the template that makes an
#     instance, in which @TILE@ and @SHAPE@ stand for numbers separated by commas, @SCHEDULE@ and @STAGES@ for a word.
#     architectures: 80 (mma.sync: machine code for sm_80 and sm_90, PTX beyond), 80only, or 90a (wgmma).
#   pyquant_kernel(<family> <tile MxNxK> <shape> <schedule> <stages> <set>)
#     tile: tokens x channels x codes of one block. shape: warp MxNxK (mma.sync: multistage, splitk), else cluster MxN.
#     set: smoke  built also with PYQUANT_KERNELS=smoke;  full;  bench  built with full, never selected, only measured.
#
# PYQUANT_KERNELS: full; smoke; sample (smoke and a row of every second family, others for every PYQUANT_SAMPLE); or a
# regular expression over the names of rows. A row costs 10 to 25 CPU seconds (mma.sync) or 20 to 35 (wgmma).
macro(pyquant_kernel_table)
  pyquant_family(sm80_s8s8 sm80 80
                 "GemmSm80<Sm80S8S8, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_s8s8 16x64x128    16x64x64  multistage  4 full)
  pyquant_kernel(sm80_s8s8 32x64x128    16x64x64  multistage  4 full)
  pyquant_kernel(sm80_s8s8 48x64x128    48x64x64  multistage  4 full)
  pyquant_kernel(sm80_s8s8 64x64x64     32x32x64  multistage  5 full)
  pyquant_kernel(sm80_s8s8 80x64x128    80x32x128 multistage  4 full)
  pyquant_kernel(sm80_s8s8 64x128x64    32x64x64  multistage  5 full)
  pyquant_kernel(sm80_s8s8 128x128x64   64x64x64  multistage  5 smoke)
  pyquant_kernel(sm80_s8s8 128x256x64   64x64x64  multistage  3 full)
  pyquant_kernel(sm80_s8s8 256x128x64   64x64x64  multistage  3 full)
  pyquant_kernel(sm80_s8s8 256x128x128  64x64x128 multistage  3 full)
  pyquant_kernel(sm80_s8s8 32x64x128    16x64x64  splitk      4 smoke)
  pyquant_kernel(sm80_s8s8 64x64x128    32x32x128 splitk      4 full)

  pyquant_family(sm80_u8s8 sm80 80
                 "GemmSm80<Sm80U8S8, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_u8s8 16x64x128    16x64x64  multistage  4 full)
  pyquant_kernel(sm80_u8s8 48x64x128    48x64x64  multistage  4 full)
  pyquant_kernel(sm80_u8s8 64x64x64     32x32x64  multistage  5 full)
  pyquant_kernel(sm80_u8s8 128x128x64   64x64x64  multistage  5 full)

  pyquant_family(sm80_s8s4 sm80 80
                 "GemmSm80<Sm80S8S4, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_s8s4 16x64x128    16x64x64  multistage  4 full)
  pyquant_kernel(sm80_s8s4 32x64x128    16x64x64  multistage  4 full)
  pyquant_kernel(sm80_s8s4 48x64x128    48x64x64  multistage  4 full)
  pyquant_kernel(sm80_s8s4 80x64x128    80x64x64  multistage  4 full)
  pyquant_kernel(sm80_s8s4 64x128x128   32x64x128 multistage  4 full)
  pyquant_kernel(sm80_s8s4 128x128x128  64x64x128 multistage  3 smoke)
  pyquant_kernel(sm80_s8s4 32x64x128    16x64x64  splitk      4 full)
  pyquant_kernel(sm80_s8s4 64x64x128    32x32x128 splitk      4 full)

  pyquant_family(sm80_s8s4_groups sm80_w4_groups 80 "GemmSm80W4Groups<@TILE@, @SHAPE@, @STAGES@>")
  pyquant_kernel(sm80_s8s4_groups 32x64x128   16x32x32 multistage 5 full)
  pyquant_kernel(sm80_s8s4_groups 48x64x128   16x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_groups 64x64x128   32x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_groups 80x64x128   16x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_groups 80x128x128  80x32x32 multistage 3 full)
  pyquant_kernel(sm80_s8s4_groups 128x128x128 64x32x32 multistage 4 smoke)

  pyquant_family(sm80_s4s4 sm80 80only
                 "GemmSm80<Sm80S4S4, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_s4s4 16x64x256    16x64x128 multistage  4 full)
  pyquant_kernel(sm80_s4s4 48x64x256    48x64x128 multistage  4 full)
  pyquant_kernel(sm80_s4s4 64x128x256   32x64x256 multistage  4 full)
  pyquant_kernel(sm80_s4s4 128x128x256  64x64x256 multistage  3 smoke)
  pyquant_kernel(sm80_s4s4 128x256x256  128x32x256 multistage  3 full)

  pyquant_family(sm80_f16 sm80 80
                 "GemmSm80<Sm80F16, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_f16 16x64x64     16x64x32  multistage  4 full)
  pyquant_kernel(sm80_f16 48x64x64     48x64x32  multistage  4 full)
  pyquant_kernel(sm80_f16 64x128x64    32x64x64  multistage  3 full)
  pyquant_kernel(sm80_f16 128x128x32   64x64x32  multistage  4 smoke)
  pyquant_kernel(sm80_f16 128x256x32   64x64x32  multistage  3 full)

  pyquant_family(sm80_bf16 sm80 80
                 "GemmSm80<Sm80Bf16, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_bf16 16x64x64     16x64x32  multistage  4 full)
  pyquant_kernel(sm80_bf16 48x64x64     48x64x32  multistage  4 full)
  pyquant_kernel(sm80_bf16 64x128x64    32x64x64  multistage  3 full)
  pyquant_kernel(sm80_bf16 128x128x32   64x64x32  multistage  4 full)
  pyquant_kernel(sm80_bf16 128x256x32   64x64x32  multistage  3 full)

  pyquant_family(sm90_s8s8 sm90 90a "GemmSm90<Sm90S8S8, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_s8s8 8x128x128   1x1      swapped_streamk  0 full)
  pyquant_kernel(sm90_s8s8 16x64x256   1x1      swapped_pingpong 0 full)
  pyquant_kernel(sm90_s8s8 16x128x128  1x1      swapped_streamk  0 full)
  pyquant_kernel(sm90_s8s8 32x128x128  1x1      swapped_streamk  0 smoke)
  pyquant_kernel(sm90_s8s8 64x128x128  1x1      swapped_streamk  0 full)
  pyquant_kernel(sm90_s8s8 96x128x128  1x1      swapped_streamk  0 full)
  pyquant_kernel(sm90_s8s8 192x128x128 1x1      swapped_streamk  0 full)
  pyquant_kernel(sm90_s8s8 64x128x128  1x1      pingpong    0 smoke)
  pyquant_kernel(sm90_s8s8 64x256x128  1x1      pingpong    0 full)
  pyquant_kernel(sm90_s8s8 128x128x128 2x1      pingpong    0 full)
  pyquant_kernel(sm90_s8s8 128x128x128 1x1      streamk     0 full)
  pyquant_kernel(sm90_s8s8 128x256x128 2x1      cooperative 0 full)
  pyquant_kernel(sm90_s8s8 256x128x128 2x1      cooperative 0 full)
  # The tiles that vLLM publishes for int8 on Hopper, to be measured beside ours (128x128x128 pingpong is one of them).
  pyquant_kernel(sm90_s8s8 64x64x256   1x8      plain       0 bench)
  pyquant_kernel(sm90_s8s8 64x64x256   1x1      plain       0 bench)
  pyquant_kernel(sm90_s8s8 64x128x256  1x4      plain       0 bench)
  pyquant_kernel(sm90_s8s8 64x128x128  2x1      pingpong    0 bench)

  pyquant_family(sm90_f16 sm90 90a "GemmSm90<Sm90F16, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_f16 32x128x64    1x1      swapped_streamk  0 smoke)
  pyquant_kernel(sm90_f16 192x128x64   1x1      swapped_streamk  0 full)
  pyquant_kernel(sm90_f16 64x128x64    1x1      pingpong    0 full)
  pyquant_kernel(sm90_f16 128x128x64   1x1      streamk     0 full)
  pyquant_kernel(sm90_f16 128x256x64   2x1      cooperative 0 full)

  pyquant_family(sm90_bf16 sm90 90a "GemmSm90<Sm90BF16, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_bf16 32x128x64   1x1      swapped_streamk  0 full)
  pyquant_kernel(sm90_bf16 192x128x64  1x1      swapped_streamk  0 full)
  pyquant_kernel(sm90_bf16 64x128x64   1x1      pingpong    0 full)
  pyquant_kernel(sm90_bf16 128x128x64  1x1      streamk     0 full)
  pyquant_kernel(sm90_bf16 128x256x64  2x1      cooperative 0 full)

  pyquant_family(sm90_s8s4 sm90_w4 90a "GemmSm90W4<@TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_s8s4 32x128x128  1x1 swapped_streamk     0 smoke)
  pyquant_kernel(sm90_s8s4 64x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4 128x128x128 1x1 swapped_cooperative 0 full)

  pyquant_family(sm90_s8s4_blocked sm90_w4_blocked 90a "GemmSm90W4Blocked<@TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_s8s4_blocked 16x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 32x128x128  1x1 swapped_streamk     0 smoke)
  pyquant_kernel(sm90_s8s4_blocked 64x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 96x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 128x128x128 1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_blocked 192x128x128 1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 256x128x128 1x1 swapped_cooperative 0 full)

  pyquant_family(sm90_s8s4_groups sm90_w4_groups 90a "GemmSm90W4Groups<@TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_s8s4_groups 32x128x128  1x1 swapped_cooperative 0 smoke)
  pyquant_kernel(sm90_s8s4_groups 64x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_groups 96x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_groups 128x128x128 1x1 swapped_cooperative 0 full)

  # Clusters stand first: of rows that cost the same the first is taken.
  pyquant_family(sm90_decode_s8s8 decode 90a "GemmDecode<@TILE@, @STAGES@, true, DecodeS8S8>")
  pyquant_kernel(sm90_decode_s8s8 16x32x64   1x1 decode 3 full)

  pyquant_family(sm90_decode_s8s4 decode 90a "GemmDecode<@TILE@, @STAGES@, true, DecodeS8S4>")
  pyquant_kernel(sm90_decode_s8s4 16x32x128  1x1 decode 3 smoke)

  pyquant_family(sm90_decode_s8s4_blocked decode 90a "GemmDecode<@TILE@, @STAGES@, true, DecodeS8S4Blocked>")
  pyquant_kernel(sm90_decode_s8s4_blocked 16x32x128 1x1 decode 3 full)

  pyquant_family(sm90_decode_w8a16 decode 90a
                 "GemmDecode<@TILE@, @STAGES@, true, DecodeW8A16<__half>, DecodeW8A16<__nv_bfloat16>>")
  pyquant_kernel(sm90_decode_w8a16 16x32x64  1x1 decode 3 full)

  pyquant_family(sm90_decode_w4a16 decode 90a
                 "GemmDecode<@TILE@, @STAGES@, true, DecodeW4A16<__half>, DecodeW4A16<__nv_bfloat16>>")
  pyquant_kernel(sm90_decode_w4a16 16x32x128 1x1 decode 3 full)

  pyquant_family(decode_s8s8 decode 80 "GemmDecode<@TILE@, @STAGES@, false, DecodeS8S8>")
  pyquant_kernel(decode_s8s8 16x32x64    1x1 decode 3 smoke)

  pyquant_family(decode_s8s4 decode 80 "GemmDecode<@TILE@, @STAGES@, false, DecodeS8S4>")
  pyquant_kernel(decode_s8s4 16x32x128   1x1 decode 3 full)

  pyquant_family(decode_w8a16 decode 80
                 "GemmDecode<@TILE@, @STAGES@, false, DecodeW8A16<__half>, DecodeW8A16<__nv_bfloat16>>")
  pyquant_kernel(decode_w8a16 16x32x64   1x1 decode 3 full)

  pyquant_family(decode_w4a16 decode 80
                 "GemmDecode<@TILE@, @STAGES@, false, DecodeW4A16<__half>, DecodeW4A16<__nv_bfloat16>>")
  pyquant_kernel(decode_w4a16 16x32x128  1x1 decode 3 full)
endmacro()

set(PYQUANT_INSTANCES_PER_FILE 3)
set(PYQUANT_WARP_SCHEDULES multistage splitk)  # whose shape is a warp's; others have a cluster, which is in the name
set(PYQUANT_PLAN_SOURCES csrc/core/reason.cpp csrc/plan/accept.cpp csrc/plan/chip.cpp csrc/plan/choice.cpp
    csrc/plan/cost.cpp csrc/plan/select.cpp csrc/plan/tuned.cpp)
set(PYQUANT_SAMPLE "" CACHE STRING "which rows PYQUANT_KERNELS=sample adds: any word")
option(PYQUANT_EMBED_PTX "keep PTX, uncompressed, beside the machine code, so that a PTX simulator can run the kernels" OFF)

function(pyquant_family family header archs type)
  set_property(GLOBAL APPEND PROPERTY PYQUANT_FAMILIES ${family})
  set_property(GLOBAL PROPERTY PYQUANT_HEADER_${family} ${header})
  set_property(GLOBAL PROPERTY PYQUANT_ARCHS_${family} ${archs})
  set_property(GLOBAL PROPERTY PYQUANT_TYPE_${family} "${type}")
endfunction()

function(pyquant_kernel family tile shape schedule stages set)
  set(name gemm_${family}_${tile})
  if(NOT schedule IN_LIST PYQUANT_WARP_SCHEDULES)
    string(APPEND name _c${shape}_${schedule})
  elseif(NOT schedule STREQUAL "multistage")
    string(APPEND name _${schedule})
  endif()
  set_property(GLOBAL APPEND PROPERTY PYQUANT_ROWS_${family} "${name} ${tile} ${shape} ${schedule} ${stages} ${set}")
endfunction()

# The row that PYQUANT_KERNELS=sample adds to a family's smoke rows ("" for the families left out): fixed by the word.
function(pyquant_sampled_row family result)
  set(best "")
  set(chosen "")
  string(MD5 coin "${PYQUANT_SAMPLE}${family}")
  get_property(rows GLOBAL PROPERTY PYQUANT_ROWS_${family})
  if(coin MATCHES "^[0-7]")
    foreach(row ${rows})
      string(REGEX MATCH "^[^ ]+" name "${row}")
      string(MD5 hash "${PYQUANT_SAMPLE}${name}")
      if(best STREQUAL "" OR hash STRLESS best)
        set(best ${hash})
        set(chosen ${name})
      endif()
    endforeach()
  endif()
  set(${result} "${chosen}" PARENT_SCOPE)
endfunction()

# Appends one row to the generated tables.
function(pyquant_table_row name family tile cluster stages schedule selectable compiled)
  set(launcher PYQUANT_NO_LAUNCHER)
  if(compiled)
    set(launcher PYQUANT_LAUNCHER)
    set(compiled 1)
  else()
    set(compiled 0)
  endif()
  set_property(GLOBAL APPEND_STRING PROPERTY PYQUANT_KERNELS_INC
    "PYQUANT_KERNEL(${name}, ${family}, ${tile}, ${cluster}, ${stages}, ${schedule}, ${selectable}, ${compiled})\n")
  set_property(GLOBAL APPEND_STRING PROPERTY PYQUANT_LAUNCHERS_INC "${launcher}(${name})\n")
endfunction()

# The rows of a family: into the tables, and the compiled ones into PYQUANT_INSTANCES_<family>.
function(pyquant_family_rows family)
  get_property(rows GLOBAL PROPERTY PYQUANT_ROWS_${family})
  get_property(archs GLOBAL PROPERTY PYQUANT_ARCHS_${family})
  get_property(type GLOBAL PROPERTY PYQUANT_TYPE_${family})
  string(REPLACE "only" "" arch ${archs})
  pyquant_sampled_row(${family} sampled)
  foreach(row ${rows})
    string(REPLACE " " ";" row "${row}")
    list(GET row 0 name)
    list(GET row 1 tile)
    list(GET row 2 shape)
    list(GET row 3 schedule)
    list(GET row 4 stages)
    list(GET row 5 set)
    string(REPLACE "x" ", " tile ${tile})
    string(REPLACE "x" ", " shape ${shape})
    set(cluster "1, 1")
    if(NOT schedule IN_LIST PYQUANT_WARP_SCHEDULES)
      set(cluster "${shape}")
    endif()
    set(selectable 1)
    if(set STREQUAL "bench")
      set(selectable 0)
    endif()
    set(compiled 0)
    if(PYQUANT_HAVE_CUDA AND arch IN_LIST PYQUANT_CUDA_ARCHS)
      if(PYQUANT_KERNELS STREQUAL "full" OR (set STREQUAL "smoke" AND PYQUANT_KERNELS MATCHES "^(smoke|sample)$")
         OR (PYQUANT_KERNELS STREQUAL "sample" AND name STREQUAL sampled)
         OR (NOT PYQUANT_KERNELS MATCHES "^(full|smoke|sample)$" AND name MATCHES "${PYQUANT_KERNELS}"))
        set(compiled 1)
      endif()
    endif()
    pyquant_table_row(${name} ${family} "${tile}" "${cluster}" ${stages} ${schedule} ${selectable} ${compiled})
    if(compiled)
      string(REPLACE "@TILE@" "${tile}" instance "${type}")
      string(REPLACE "@SHAPE@" "${shape}" instance "${instance}")
      string(REPLACE "@SCHEDULE@" "${schedule}" instance "${instance}")
      string(REPLACE "@STAGES@" "${stages}" instance "${instance}")
      set_property(GLOBAL APPEND PROPERTY PYQUANT_INSTANCES_${family}
        "using ${name}_type = ${instance}$<SEMICOLON>\nextern const Launcher ${name}$<SEMICOLON>\nconst Launcher ${name}{&${name}_type::run, &${name}_type::workspace_bytes}$<SEMICOLON>")
    endif()
  endforeach()
endfunction()

# An object library of CUDA sources. GENCODE: what nvcc makes of them.
function(pyquant_cuda_objects target gencode)
  add_library(${target} OBJECT ${ARGN})
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF JOB_POOL_COMPILE cuda CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(${target} PRIVATE csrc ${CMAKE_BINARY_DIR}/generated)
  target_include_directories(${target} SYSTEM PRIVATE ${PYQUANT_CUTLASS_INCLUDE})
  target_compile_definitions(${target} PRIVATE NDEBUG)
  target_compile_options(${target} PRIVATE -O3 --expt-relaxed-constexpr -fmad=false "SHELL:${gencode}")
  if(PYQUANT_EMBED_PTX)
    target_compile_options(${target} PRIVATE -no-compress)
  else()
    target_compile_options(${target} PRIVATE --compress-mode=size)
  endif()
endfunction()

# Writes the instances of a family into files and makes object libraries of them; appends their names to OBJECTS.
function(pyquant_instances family gencode)
  get_property(instances GLOBAL PROPERTY PYQUANT_INSTANCES_${family})
  get_property(header GLOBAL PROPERTY PYQUANT_HEADER_${family})
  set(objects ${OBJECTS})
  list(LENGTH instances count)
  set(number 0)
  set(start 0)
  while(start LESS count)
    list(SUBLIST instances ${start} ${PYQUANT_INSTANCES_PER_FILE} chunk)
    math(EXPR start "${start} + ${PYQUANT_INSTANCES_PER_FILE}")
    string(REPLACE ";" "\n" body "${chunk}")
    string(REPLACE "$<SEMICOLON>" ";" body "${body}")
    set(source ${CMAKE_BINARY_DIR}/generated/cuda/${family}_${number}.cu)
    file(CONFIGURE OUTPUT ${source} @ONLY CONTENT
      "#include \"cuda/gemm/${header}.cuh\"\n\nnamespace pyquant::cuda {\n${body}\n}  // namespace pyquant::cuda\n")
    pyquant_cuda_objects(pyquant_cuda_${family}_${number} "${gencode}" ${source})
    if(gencode MATCHES "90a")  # CUTLASS's kernels wait for their predecessor (launch90.cuh)
      target_compile_definitions(pyquant_cuda_${family}_${number} PRIVATE CUTLASS_ENABLE_GDC_FOR_SM90)
    endif()
    list(APPEND objects pyquant_cuda_${family}_${number})
    math(EXPR number "${number} + 1")
  endwhile()
  set(OBJECTS ${objects} PARENT_SCOPE)
endfunction()

# What nvcc makes of a family's sources.
function(pyquant_gencode archs result)
  if(archs STREQUAL "90a")
    set(code "-gencode arch=compute_90a,code=sm_90a")
    if(PYQUANT_EMBED_PTX)
      set(code "-gencode arch=compute_90a,code=[sm_90a,compute_90a]")
    endif()
  elseif(archs STREQUAL "80only")  # instructions that later chips only emulate
    set(code "-gencode arch=compute_80,code=[sm_80,compute_80]")
  elseif("80" IN_LIST PYQUANT_CUDA_ARCHS)  # also sm_86 and sm_89; PTX for chips to come
    set(code "-gencode arch=compute_80,code=[sm_80,sm_90,compute_80]")
  else()
    set(code "-gencode arch=compute_90,code=[sm_90,compute_90]")
  endif()
  set(${result} "${code}" PARENT_SCOPE)
endfunction()

# Names of the object libraries that make up the CUDA backend (without CUDA: the stub that says so).
function(pyquant_cuda_kernels result)
  pyquant_table_row(gemm_simt_any simt "64, 64, 32" "1, 1" 1 simt 1 ${PYQUANT_HAVE_CUDA})  # csrc/cuda/gemm/simt.cu
  pyquant_kernel_table()
  get_property(families GLOBAL PROPERTY PYQUANT_FAMILIES)
  foreach(family ${families})
    pyquant_family_rows(${family})
  endforeach()
  foreach(table KERNELS_INC LAUNCHERS_INC)
    get_property(text GLOBAL PROPERTY PYQUANT_${table})
    string(TOLOWER ${table} file)
    string(REPLACE "_inc" ".inc" file ${file})
    file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/${file} CONTENT "${text}" @ONLY)
  endforeach()
  if(NOT PYQUANT_HAVE_CUDA)
    add_library(pyquant_cuda_stub OBJECT csrc/cuda/cuda_stub.cpp)
    target_include_directories(pyquant_cuda_stub PRIVATE csrc)
    set(${result} pyquant_cuda_stub PARENT_SCOPE)
    return()
  endif()

  # One instance file peaks at 6 GB.
  cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)
  cmake_host_system_information(RESULT jobs QUERY NUMBER_OF_LOGICAL_CORES)
  math(EXPR pool "${memory} / 6000")
  if(pool GREATER jobs)
    set(pool ${jobs})
  elseif(pool LESS 1)
    set(pool 1)
  endif()
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS cuda=${pool})

  set(OBJECTS pyquant_cuda_common)
  pyquant_gencode(80 common)
  pyquant_cuda_objects(pyquant_cuda_common "${common}" csrc/cuda/codes.cu csrc/cuda/device.cu csrc/cuda/pack.cu
                       csrc/cuda/gemm/float_epilogue.cu csrc/cuda/gemm/simt.cu)
  # Kernels that overlap their predecessor (csrc/cuda/overlap.cuh) are compiled for sm_90 by themselves: code made from
  # compute_80 would lack the wait. The PTX is of both, so that chips to come take the one with the wait.
  set(overlapping "-gencode arch=compute_90,code=[sm_90,compute_90]")
  if("80" IN_LIST PYQUANT_CUDA_ARCHS)
    string(PREPEND overlapping "-gencode arch=compute_80,code=[sm_80,compute_80] ")
  endif()
  pyquant_cuda_objects(pyquant_cuda_quantize "${overlapping}" csrc/cuda/quantize/dequantize.cu
                       csrc/cuda/quantize/fused.cu csrc/cuda/quantize/given.cu csrc/cuda/quantize/groups.cu
                       csrc/cuda/quantize/per_token.cu)
  list(APPEND OBJECTS pyquant_cuda_quantize)
  set_target_properties(pyquant_cuda_common pyquant_cuda_quantize PROPERTIES CUDA_VISIBILITY_PRESET default)  # interface
  foreach(family ${families})
    get_property(archs GLOBAL PROPERTY PYQUANT_ARCHS_${family})
    pyquant_gencode(${archs} gencode)
    pyquant_instances(${family} "${gencode}")
  endforeach()
  set(${result} ${OBJECTS} PARENT_SCOPE)
endfunction()
