# The kernel table: one line an instance, the only place that lists them. From it come
#   generated/kernels.inc    every row, compiled or not (the table is data: plan/ and the tests read it without nvcc)
#   generated/launchers.inc  which rows have machine code in this build
#   generated/cuda/*.cu      the instances by architecture, rewritten only when they change, PYQUANT_INSTANCES_PER_FILE each
#
#   pyquant_family(<family> <header> <architectures> <C++ type>)
#     A word of PYQUANT_FAMILIES (csrc/plan/family.h), csrc/cuda/gemm/<header>.cuh, and the template that makes an
#     instance, in which @TILE@ and @SHAPE@ stand for numbers separated by commas, @SCHEDULE@ and @STAGES@ for a word.
#     architectures: 80 (mma.sync: every chip from sm_80 on), 80only (sm_80 to sm_89), or 90a (wgmma).
#   pyquant_kernel(<family> <tile MxNxK> <shape> <schedule> <stages> <set>)
#     tile: tokens x channels x codes of one block. shape: warp MxNxK (mma.sync: multistage, splitk), else cluster MxN.
#     set: smoke  built also with PYQUANT_KERNELS=smoke;  full;  bench  built with full, never selected, only measured.
#
# PYQUANT_KERNELS: full; smoke; none (only the byte-wise one); sample (smoke and a row of three families in sixteen, others for every PYQUANT_SAMPLE); or a
# regular expression over the names of rows. A row costs 4 to 13 CPU seconds (mma.sync) or 9 to 30 (wgmma).
# PYQUANT_ARCHS (cmake/architectures.cmake) says for which chips; a row that none of them can run is not compiled.
macro(pyquant_kernel_table)
  pyquant_family(sm80_s8s8 sm80 80
                 "GemmSm80<Sm80S8S8, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_s8s8 16x64x128   16x64x64  multistage 4 full)
  pyquant_kernel(sm80_s8s8 32x64x128   16x64x64  splitk     4 smoke)
  pyquant_kernel(sm80_s8s8 48x64x128   48x64x64  splitk     4 full)
  pyquant_kernel(sm80_s8s8 48x128x64   48x64x64  splitk     4 full)
  pyquant_kernel(sm80_s8s8 64x64x64    32x32x64  multistage 5 full)
  pyquant_kernel(sm80_s8s8 64x64x128   32x32x128 splitk     4 full)
  pyquant_kernel(sm80_s8s8 64x128x64   32x64x64  splitk     5 full)
  pyquant_kernel(sm80_s8s8 80x64x128   80x32x128 splitk     4 full)
  pyquant_kernel(sm80_s8s8 80x128x128  80x32x128 splitk     3 full)
  pyquant_kernel(sm80_s8s8 96x128x64   48x64x64  splitk     4 full)
  pyquant_kernel(sm80_s8s8 128x128x64  64x64x64  splitk     5 smoke)
  pyquant_kernel(sm80_s8s8 128x256x64  64x64x64  multistage 3 full)
  pyquant_kernel(sm80_s8s8 160x128x64  80x64x64  multistage 4 full)
  pyquant_kernel(sm80_s8s8 256x128x64  64x64x64  multistage 3 full)
  pyquant_kernel(sm80_s8s8 256x128x128 64x64x128 multistage 3 full)

  pyquant_family(sm80_u8s8 sm80 80
                 "GemmSm80<Sm80U8S8, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_u8s8 16x64x128  16x64x64  splitk     4 full)
  pyquant_kernel(sm80_u8s8 48x64x128  48x64x64  splitk     4 full)
  pyquant_kernel(sm80_u8s8 48x128x64  48x64x64  splitk     4 full)
  pyquant_kernel(sm80_u8s8 64x64x64   32x32x64  multistage 5 full)
  pyquant_kernel(sm80_u8s8 64x128x64  32x64x64  splitk     4 full)
  pyquant_kernel(sm80_u8s8 80x64x128  80x32x128 splitk     4 full)
  pyquant_kernel(sm80_u8s8 80x128x128 80x32x128 splitk     3 full)
  pyquant_kernel(sm80_u8s8 96x64x64   48x32x64  splitk     5 full)
  pyquant_kernel(sm80_u8s8 96x128x64  48x64x64  splitk     4 full)
  pyquant_kernel(sm80_u8s8 128x128x64 64x64x64  splitk     5 full)
  pyquant_kernel(sm80_u8s8 160x128x64 80x64x64  multistage 4 full)

  pyquant_family(sm80_s8s4 sm80 80
                 "GemmSm80<Sm80S8S4, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_s8s4 16x64x128   16x64x64  splitk     4 full)
  pyquant_kernel(sm80_s8s4 32x64x128   16x64x64  splitk     4 full)
  pyquant_kernel(sm80_s8s4 48x64x128   48x64x64  splitk     5 full)
  pyquant_kernel(sm80_s8s4 48x128x128  48x64x128 splitk     4 full)
  pyquant_kernel(sm80_s8s4 64x64x128   32x32x128 splitk     4 full)
  pyquant_kernel(sm80_s8s4 64x128x128  32x64x128 splitk     4 full)
  pyquant_kernel(sm80_s8s4 80x64x128   80x32x128 splitk     4 full)
  pyquant_kernel(sm80_s8s4 80x128x128  80x32x128 splitk     4 full)
  pyquant_kernel(sm80_s8s4 96x128x128  96x32x128 splitk     4 full)
  pyquant_kernel(sm80_s8s4 112x128x128 112x32x128 splitk     4 full)
  pyquant_kernel(sm80_s8s4 128x128x128 64x64x128 splitk     3 smoke)
  pyquant_kernel(sm80_s8s4 160x128x128 80x32x128 splitk     3 full)

  pyquant_family(sm80_s8s4_blocked sm80_w4_blocked 80 "GemmSm80W4Blocked<@TILE@, @SHAPE@, @STAGES@>")
  pyquant_kernel(sm80_s8s4_blocked 16x64x128   16x32x128  splitk 5 full)
  pyquant_kernel(sm80_s8s4_blocked 32x64x128   32x32x128  splitk 5 full)
  pyquant_kernel(sm80_s8s4_blocked 32x128x128  32x32x128  splitk 4 full)
  pyquant_kernel(sm80_s8s4_blocked 48x64x128   48x32x128  splitk 5 full)
  pyquant_kernel(sm80_s8s4_blocked 48x128x128  48x32x128  splitk 4 full)
  pyquant_kernel(sm80_s8s4_blocked 64x64x128   32x32x128  splitk 4 full)
  pyquant_kernel(sm80_s8s4_blocked 64x128x128  64x32x128  splitk 4 smoke)
  pyquant_kernel(sm80_s8s4_blocked 80x64x128   80x32x128  splitk 4 full)
  pyquant_kernel(sm80_s8s4_blocked 80x128x128  80x32x128  splitk 4 full)
  pyquant_kernel(sm80_s8s4_blocked 96x128x128  96x32x128  splitk 4 full)
  pyquant_kernel(sm80_s8s4_blocked 112x128x128 112x32x128 splitk 4 full)
  pyquant_kernel(sm80_s8s4_blocked 128x128x128 64x64x128  splitk 3 smoke)
  pyquant_kernel(sm80_s8s4_blocked 160x128x128 80x32x128  splitk 3 full)

  pyquant_family(sm80_s8s4_groups sm80_w4_groups 80 "GemmSm80W4Groups<@TILE@, @SHAPE@, @STAGES@>")
  pyquant_kernel(sm80_s8s4_groups 16x64x128   16x32x32 multistage 6 full)
  pyquant_kernel(sm80_s8s4_groups 32x64x128   16x32x32 multistage 6 full)
  pyquant_kernel(sm80_s8s4_groups 48x64x128   16x32x32 multistage 5 full)
  pyquant_kernel(sm80_s8s4_groups 48x128x128  48x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_groups 64x64x128   32x32x32 multistage 6 full)
  pyquant_kernel(sm80_s8s4_groups 64x128x128  32x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_groups 80x64x128   16x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_groups 80x128x128  80x32x32 multistage 3 full)
  pyquant_kernel(sm80_s8s4_groups 96x64x128   32x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_groups 112x64x128  16x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_groups 128x128x128 64x32x32 multistage 4 smoke)

  pyquant_family(sm80_s8s4_steps sm80_w4_steps 80 "GemmSm80W4Steps<@TILE@, @SHAPE@, @STAGES@>")
  pyquant_kernel(sm80_s8s4_steps 16x64x128   16x32x32 multistage 6 full)
  pyquant_kernel(sm80_s8s4_steps 32x64x128   16x32x32 multistage 6 full)
  pyquant_kernel(sm80_s8s4_steps 48x64x128   16x32x32 multistage 5 full)
  pyquant_kernel(sm80_s8s4_steps 48x128x128  48x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_steps 64x64x128   32x32x32 multistage 6 full)
  pyquant_kernel(sm80_s8s4_steps 64x128x128  32x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_steps 80x64x128   16x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_steps 80x128x128  80x32x32 multistage 3 full)
  pyquant_kernel(sm80_s8s4_steps 96x64x128   32x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_steps 112x64x128  16x32x32 multistage 4 full)
  pyquant_kernel(sm80_s8s4_steps 128x128x128 64x32x32 multistage 4 smoke)

  pyquant_family(sm80_s4s4 sm80 80only
                 "GemmSm80<Sm80S4S4, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_s4s4 16x64x256   16x64x128  splitk     4 full)
  pyquant_kernel(sm80_s4s4 48x64x256   48x64x128  splitk     4 full)
  pyquant_kernel(sm80_s4s4 48x128x256  48x64x256  multistage 4 full)
  pyquant_kernel(sm80_s4s4 64x128x256  32x64x256  multistage 4 full)
  pyquant_kernel(sm80_s4s4 80x128x256  80x32x256  splitk     3 full)
  pyquant_kernel(sm80_s4s4 128x128x256 64x64x256  splitk     3 smoke)
  pyquant_kernel(sm80_s4s4 128x256x256 128x32x256 multistage 3 full)
  pyquant_kernel(sm80_s4s4 160x128x256 80x32x256  multistage 3 full)

  pyquant_family(sm80_s8s8_experts sm80_experts 80
                 "GemmSm80Experts<Sm80S8S8, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_s8s8_experts 16x64x128   16x64x64 multistage 4 full)
  pyquant_kernel(sm80_s8s8_experts 64x128x64   32x64x64 multistage 5 smoke)
  pyquant_kernel(sm80_s8s8_experts 128x128x64  64x64x64 multistage 5 full)

  pyquant_family(sm80_s8s4_experts sm80_experts 80
                 "GemmSm80Experts<Sm80S8S4, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_s8s4_experts 16x64x128   16x64x64  multistage 4 smoke)
  pyquant_kernel(sm80_s8s4_experts 64x128x128  32x64x128 multistage 4 full)
  pyquant_kernel(sm80_s8s4_experts 128x128x128 64x64x128 multistage 3 full)

  pyquant_family(sm80_s8s4_blocked_experts sm80_w4_blocked_experts 80
                 "GemmSm80W4BlockedExperts<@TILE@, @SHAPE@, @STAGES@>")
  pyquant_kernel(sm80_s8s4_blocked_experts 16x64x128   16x32x128 multistage 5 smoke)
  pyquant_kernel(sm80_s8s4_blocked_experts 64x128x128  64x32x128 multistage 4 full)
  pyquant_kernel(sm80_s8s4_blocked_experts 128x128x128 64x64x128 multistage 3 full)

  pyquant_family(sm80_s8s4_groups_experts sm80_w4_groups_experts 80 "GemmSm80W4GroupsExperts<@TILE@, @SHAPE@, @STAGES@>")
  pyquant_kernel(sm80_s8s4_groups_experts 16x64x128   16x32x32 multistage 6 smoke)
  pyquant_kernel(sm80_s8s4_groups_experts 64x128x128  32x32x32 multistage 4 full)

  pyquant_family(sm80_s8s8_conv sm80_conv 80
                 "ConvSm80<Sm80S8S8, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_s8s8_conv 64x64x64   32x32x64 splitk     5 full)
  pyquant_kernel(sm80_s8s8_conv 64x128x64  32x64x64 splitk     5 full)
  pyquant_kernel(sm80_s8s8_conv 128x64x64  64x32x64 splitk     5 smoke)
  pyquant_kernel(sm80_s8s8_conv 128x128x64 64x64x64 splitk     5 full)
  pyquant_kernel(sm80_s8s8_conv 256x128x64 64x64x64 multistage 3 full)

  pyquant_family(sm80_f16 sm80 80
                 "GemmSm80<Sm80F16, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_f16 16x64x64   16x64x32  multistage 4 full)
  pyquant_kernel(sm80_f16 48x64x64   48x64x32  multistage 4 full)
  pyquant_kernel(sm80_f16 48x128x32  48x64x32  multistage 4 full)
  pyquant_kernel(sm80_f16 64x128x64  32x64x64  multistage 3 full)
  pyquant_kernel(sm80_f16 80x64x64   80x32x64  multistage 4 full)
  pyquant_kernel(sm80_f16 112x128x64 112x32x64 multistage 3 full)
  pyquant_kernel(sm80_f16 128x128x32 64x64x32  multistage 4 smoke)
  pyquant_kernel(sm80_f16 128x256x32 64x64x32  multistage 3 full)
  pyquant_kernel(sm80_f16 160x128x32 80x64x32  multistage 4 full)
  pyquant_kernel(sm80_f16 256x128x64 64x64x64  multistage 3 full)

  pyquant_family(sm80_bf16 sm80 80
                 "GemmSm80<Sm80Bf16, schedule80::@SCHEDULE@, Shape80<@TILE@>, Shape80<@SHAPE@>, @STAGES@>")
  pyquant_kernel(sm80_bf16 16x64x64   16x64x32  multistage 4 full)
  pyquant_kernel(sm80_bf16 48x64x64   48x64x32  multistage 4 full)
  pyquant_kernel(sm80_bf16 48x128x32  48x64x32  multistage 4 full)
  pyquant_kernel(sm80_bf16 64x128x64  32x64x64  multistage 3 full)
  pyquant_kernel(sm80_bf16 80x64x64   80x32x64  multistage 4 full)
  pyquant_kernel(sm80_bf16 112x128x64 112x32x64 multistage 3 full)
  pyquant_kernel(sm80_bf16 128x128x32 64x64x32  multistage 4 full)
  pyquant_kernel(sm80_bf16 128x256x32 64x64x32  multistage 3 full)
  pyquant_kernel(sm80_bf16 160x128x32 80x64x32  multistage 4 full)
  pyquant_kernel(sm80_bf16 256x128x64 64x64x64  multistage 3 full)

  pyquant_family(sm80_w8a16 sm80_weight_only 80 "GemmSm80WeightOnly<DecodeW8A16, @TILE@, @SHAPE@, @STAGES@>")
  pyquant_kernel(sm80_w8a16 32x64x64   16x32x32 splitk     6 full)
  pyquant_kernel(sm80_w8a16 64x64x64   32x32x32 splitk     6 full)
  pyquant_kernel(sm80_w8a16 64x128x64  32x32x32 splitk     4 smoke)
  pyquant_kernel(sm80_w8a16 96x128x64  48x32x32 splitk     4 full)
  pyquant_kernel(sm80_w8a16 128x128x64 64x32x32 splitk     4 full)

  pyquant_family(sm80_w4a16 sm80_weight_only 80 "GemmSm80WeightOnly<DecodeW4A16, @TILE@, @SHAPE@, @STAGES@>")
  pyquant_kernel(sm80_w4a16 32x64x64   16x32x32 splitk     6 full)
  pyquant_kernel(sm80_w4a16 64x64x64   32x32x32 splitk     6 full)
  pyquant_kernel(sm80_w4a16 64x128x64  32x32x32 splitk     4 smoke)
  pyquant_kernel(sm80_w4a16 96x128x64  48x32x32 splitk     4 full)
  pyquant_kernel(sm80_w4a16 128x128x64 64x32x32 splitk     4 full)

  pyquant_family(sm80_w8a16_experts sm80_weight_only_experts 80
                 "GemmSm80WeightOnlyExperts<DecodeW8A16, @TILE@, @SHAPE@, @STAGES@>")
  pyquant_kernel(sm80_w8a16_experts 16x128x64  16x32x32 multistage 6 full)
  pyquant_kernel(sm80_w8a16_experts 64x128x64  32x32x32 multistage 4 smoke)
  pyquant_kernel(sm80_w8a16_experts 128x128x64 64x32x32 multistage 4 full)

  pyquant_family(sm80_w4a16_experts sm80_weight_only_experts 80
                 "GemmSm80WeightOnlyExperts<DecodeW4A16, @TILE@, @SHAPE@, @STAGES@>")
  pyquant_kernel(sm80_w4a16_experts 16x128x64  16x32x32 multistage 6 smoke)
  pyquant_kernel(sm80_w4a16_experts 64x128x64  32x32x32 multistage 4 full)
  pyquant_kernel(sm80_w4a16_experts 128x128x64 64x32x32 multistage 4 full)

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

  pyquant_family(sm90_s8s8_experts sm90_experts 90a
                 "GemmSm90Experts<Sm90S8S8, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_s8s8_experts 32x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s8_experts 64x128x128  1x1 swapped_cooperative 0 smoke)
  pyquant_kernel(sm90_s8s8_experts 128x128x128 1x2 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s8_experts 128x256x128 1x2 cooperative         0 full)

  pyquant_family(sm90_f16 sm90 90a "GemmSm90<Sm90F16, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_f16 32x128x64  1x1 swapped_streamk 0 smoke)
  pyquant_kernel(sm90_f16 96x128x64  1x1 swapped_streamk 0 full)
  pyquant_kernel(sm90_f16 192x128x64 1x1 swapped_streamk 0 full)
  pyquant_kernel(sm90_f16 64x128x64  1x1 pingpong        0 full)
  pyquant_kernel(sm90_f16 128x128x64 1x1 streamk         0 full)
  pyquant_kernel(sm90_f16 128x256x64 2x1 cooperative     0 full)

  pyquant_family(sm90_bf16 sm90 90a "GemmSm90<Sm90BF16, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_bf16 32x128x64  1x1 swapped_streamk 0 full)
  pyquant_kernel(sm90_bf16 96x128x64  1x1 swapped_streamk 0 full)
  pyquant_kernel(sm90_bf16 192x128x64 1x1 swapped_streamk 0 full)
  pyquant_kernel(sm90_bf16 64x128x64  1x1 pingpong        0 full)
  pyquant_kernel(sm90_bf16 128x128x64 1x1 streamk         0 full)
  pyquant_kernel(sm90_bf16 128x256x64 2x1 cooperative     0 full)

  pyquant_family(sm90_s8s4 sm90_w4 90a "GemmSm90W4<@TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_s8s4 32x128x128  1x1 swapped_streamk 0 smoke)
  pyquant_kernel(sm90_s8s4 64x128x128  1x1 swapped_streamk 0 full)
  pyquant_kernel(sm90_s8s4 96x128x128  1x1 swapped_streamk 0 full)
  pyquant_kernel(sm90_s8s4 128x128x128 1x1 swapped_streamk 0 full)
  pyquant_kernel(sm90_s8s4 160x128x128 1x1 swapped_streamk 0 full)

  pyquant_family(sm90_s8s4_blocked sm90_w4_blocked 90a "GemmSm90W4Blocked<@TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_s8s4_blocked 16x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 32x128x128  1x1 swapped_streamk     0 smoke)
  pyquant_kernel(sm90_s8s4_blocked 48x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 64x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 96x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 128x128x128 1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 160x128x128 1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 192x128x128 1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_blocked 256x128x128 1x1 swapped_cooperative 0 full)

  pyquant_family(sm90_s8s4_blocked_experts sm90_w4_blocked_experts 90a
                 "GemmSm90W4BlockedExperts<@TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_s8s4_blocked_experts 32x128x128  1x1 swapped_cooperative 0 smoke)
  pyquant_kernel(sm90_s8s4_blocked_experts 64x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_blocked_experts 128x128x128 1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_blocked_experts 256x128x128 1x1 swapped_cooperative 0 full)

  pyquant_family(sm90_s8s4_groups sm90_w4_groups 90a "GemmSm90W4Groups<@TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_s8s4_groups 16x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_groups 32x128x128  1x1 swapped_cooperative 0 smoke)
  pyquant_kernel(sm90_s8s4_groups 48x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_groups 64x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_groups 80x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_groups 96x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_groups 112x128x128 1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_groups 128x128x128 1x1 swapped_cooperative 0 full)

  pyquant_family(sm90_s8s4_groups_experts sm90_w4_groups_experts 90a
                 "GemmSm90W4GroupsExperts<@TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_s8s4_groups_experts 16x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_groups_experts 32x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_groups_experts 64x128x128  1x1 swapped_cooperative 0 smoke)
  pyquant_kernel(sm90_s8s4_groups_experts 128x128x128 1x1 swapped_cooperative 0 full)

  pyquant_family(sm90_s8s4_steps sm90_w4_blocked 90a "GemmSm90W4Blocked<@TILE@, @SHAPE@, schedule90::@SCHEDULE@, true>")
  pyquant_kernel(sm90_s8s4_steps 16x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_steps 32x128x128  1x1 swapped_streamk     0 smoke)
  pyquant_kernel(sm90_s8s4_steps 48x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_steps 64x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_steps 96x128x128  1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_steps 128x128x128 1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_steps 160x128x128 1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_steps 192x128x128 1x1 swapped_streamk     0 full)
  pyquant_kernel(sm90_s8s4_steps 256x128x128 1x1 swapped_cooperative 0 full)

  pyquant_family(sm90_s8s4_steps_experts sm90_w4_blocked_experts 90a
                 "GemmSm90W4BlockedExperts<@TILE@, @SHAPE@, schedule90::@SCHEDULE@, true>")
  pyquant_kernel(sm90_s8s4_steps_experts 32x128x128  1x1 swapped_cooperative 0 smoke)
  pyquant_kernel(sm90_s8s4_steps_experts 64x128x128  1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_steps_experts 128x128x128 1x1 swapped_cooperative 0 full)
  pyquant_kernel(sm90_s8s4_steps_experts 256x128x128 1x1 swapped_cooperative 0 full)

  pyquant_family(sm90_w8a16 sm90_weight_only 90a
                 "GemmSm90WeightOnly<ScaledSums90, DecodeW8A16, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_w8a16 16x128x128  1x1 swapped_splitk 0 full)
  pyquant_kernel(sm90_w8a16 32x128x128  1x1 swapped_splitk 0 full)
  pyquant_kernel(sm90_w8a16 64x128x128  1x1 swapped_splitk 0 smoke)
  pyquant_kernel(sm90_w8a16 96x128x128  1x1 swapped_splitk 0 full)
  pyquant_kernel(sm90_w8a16 128x128x128 1x1 swapped_splitk 0 full)

  pyquant_family(sm90_w4a16 sm90_weight_only 90a
                 "GemmSm90WeightOnly<ScaledSums90, DecodeW4A16, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_w4a16 16x128x128  1x1 swapped_splitk 0 full)
  pyquant_kernel(sm90_w4a16 32x128x128  1x1 swapped_splitk 0 smoke)
  pyquant_kernel(sm90_w4a16 64x128x128  1x1 swapped_splitk 0 full)
  pyquant_kernel(sm90_w4a16 96x128x128  1x1 swapped_splitk 0 full)
  pyquant_kernel(sm90_w4a16 128x128x128 1x1 swapped_splitk 0 full)
  pyquant_kernel(sm90_w4a16 16x128x256  1x2 swapped_splitk 0 full)
  pyquant_kernel(sm90_w4a16 32x128x256  1x2 swapped_splitk 0 full)
  pyquant_kernel(sm90_w4a16 64x128x256  1x2 swapped_splitk 0 smoke)
  pyquant_kernel(sm90_w4a16 96x128x256  1x2 swapped_splitk 0 full)
  pyquant_kernel(sm90_w4a16 128x128x256 1x2 swapped_splitk 0 bench)

  pyquant_family(sm90_w8a16_rounded sm90_weight_only 90a
                 "GemmSm90WeightOnly<RoundedWeights90, DecodeW8A16, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_w8a16_rounded 64x128x64  1x2 swapped_splitk 0 bench)
  pyquant_kernel(sm90_w8a16_rounded 128x128x64 1x2 swapped_splitk 0 full)
  pyquant_kernel(sm90_w8a16_rounded 192x128x64 1x2 swapped_splitk 0 full)
  pyquant_kernel(sm90_w8a16_rounded 256x128x64 1x2 swapped_splitk 0 smoke)

  pyquant_family(sm90_w4a16_rounded sm90_weight_only 90a
                 "GemmSm90WeightOnly<RoundedWeights90, DecodeW4A16, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_w4a16_rounded 64x128x128  1x2 swapped_splitk 0 bench)
  pyquant_kernel(sm90_w4a16_rounded 128x128x128 1x2 swapped_splitk 0 full)
  pyquant_kernel(sm90_w4a16_rounded 192x128x128 1x2 swapped_splitk 0 full)
  pyquant_kernel(sm90_w4a16_rounded 256x128x128 1x2 swapped_splitk 0 smoke)

  pyquant_family(sm90_w8a16_rounded_experts sm90_weight_only_experts 90a
                 "GemmSm90WeightOnlyExperts<DecodeW8A16, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_w8a16_rounded_experts 64x128x64  1x2 swapped_cooperative 0 full)
  pyquant_kernel(sm90_w8a16_rounded_experts 128x128x64 1x2 swapped_cooperative 0 smoke)
  pyquant_kernel(sm90_w8a16_rounded_experts 256x128x64 1x2 swapped_cooperative 0 full)

  pyquant_family(sm90_w4a16_rounded_experts sm90_weight_only_experts 90a
                 "GemmSm90WeightOnlyExperts<DecodeW4A16, @TILE@, @SHAPE@, schedule90::@SCHEDULE@>")
  pyquant_kernel(sm90_w4a16_rounded_experts 64x128x128  1x2 swapped_cooperative 0 smoke)
  pyquant_kernel(sm90_w4a16_rounded_experts 128x128x128 1x2 swapped_cooperative 0 full)
  pyquant_kernel(sm90_w4a16_rounded_experts 256x128x128 1x2 swapped_cooperative 0 full)

  # Clusters stand first: of rows that cost the same the first is taken.
  pyquant_family(sm90_decode_s8s8 decode 90a
                 "GemmDecode<@TILE@, @STAGES@, true, decode_schedule::@SCHEDULE@<DecodeS8S8>>")
  pyquant_kernel(sm90_decode_s8s8 16x32x64   1x1 decode 3 full)
  pyquant_kernel(sm90_decode_s8s8 16x128x64  1x1 decode 3 full)
  pyquant_kernel(sm90_decode_s8s8 16x128x64  1x1 decode256 3 bench)

  pyquant_family(sm90_decode_s8s4 decode 90a "GemmDecode<@TILE@, @STAGES@, true, DecodeS8S4>")
  pyquant_kernel(sm90_decode_s8s4 16x32x128  1x1 decode 3 smoke)
  pyquant_kernel(sm90_decode_s8s4 16x128x128 1x1 decode 3 full)

  pyquant_family(sm90_decode_s8s4_blocked decode 90a
                 "GemmDecode<@TILE@, @STAGES@, true, decode_schedule::@SCHEDULE@<DecodeS8S4Blocked>>")
  pyquant_kernel(sm90_decode_s8s4_blocked 16x32x128  1x1 decode 3 full)
  pyquant_kernel(sm90_decode_s8s4_blocked 16x128x128 1x1 decode 3 full)
  pyquant_kernel(sm90_decode_s8s4_blocked 16x128x128 1x1 decode256 3 bench)

  pyquant_family(sm90_decode_s8s4_steps decode 90a "GemmDecode<@TILE@, @STAGES@, true, DecodeS8S4BlockedSteps>")
  pyquant_kernel(sm90_decode_s8s4_steps 16x32x128  1x1 decode 3 full)
  pyquant_kernel(sm90_decode_s8s4_steps 16x128x128 1x1 decode 3 full)

  pyquant_family(sm90_decode_w8a16 decode 90a
                 "GemmDecode<@TILE@, @STAGES@, true, DecodeW8A16<__half>, DecodeW8A16<__nv_bfloat16>>")
  pyquant_kernel(sm90_decode_w8a16 16x32x64   1x1 decode 3 full)
  pyquant_kernel(sm90_decode_w8a16 16x128x64  1x1 decode 3 full)
  pyquant_kernel(sm90_decode_w8a16 32x128x64  1x1 decode 3 full)

  pyquant_family(sm90_decode_w4a16 decode 90a
                 "GemmDecode<@TILE@, @STAGES@, true, decode_schedule::@SCHEDULE@<DecodeW4A16<__half>>, decode_schedule::@SCHEDULE@<DecodeW4A16<__nv_bfloat16>>>")
  pyquant_kernel(sm90_decode_w4a16 16x32x128  1x1 decode 3 full)
  pyquant_kernel(sm90_decode_w4a16 16x128x128 1x1 decode 3 full)
  pyquant_kernel(sm90_decode_w4a16 16x128x128 1x1 decode256 3 bench)
  pyquant_kernel(sm90_decode_w4a16 32x128x128 1x1 decode 3 full)
  pyquant_kernel(sm90_decode_w4a16 32x32x128  1x1 decode 2 full)

  pyquant_family(decode_s8s8 decode 80 "GemmDecode<@TILE@, @STAGES@, false, DecodeS8S8>")
  pyquant_kernel(decode_s8s8 16x32x64   1x1 decode 3 smoke)
  pyquant_kernel(decode_s8s8 16x128x64  1x1 decode 3 full)

  pyquant_family(decode_s8s4 decode 80 "GemmDecode<@TILE@, @STAGES@, false, DecodeS8S4>")
  pyquant_kernel(decode_s8s4 16x32x128  1x1 decode 3 full)
  pyquant_kernel(decode_s8s4 16x128x128 1x1 decode 3 full)

  pyquant_family(decode_s8s4_wide decode 80 "GemmDecode<@TILE@, @STAGES@, false, DecodeS8S4>")
  pyquant_kernel(decode_s8s4_wide 48x32x128  1x1 decode 2 full)

  pyquant_family(decode_s8s4_blocked decode 80 "GemmDecode<@TILE@, @STAGES@, false, DecodeS8S4Blocked>")
  pyquant_kernel(decode_s8s4_blocked 16x32x128  1x1 decode 3 full)
  pyquant_kernel(decode_s8s4_blocked 16x128x128 1x1 decode 3 full)
  pyquant_kernel(decode_s8s4_blocked 32x128x128 1x1 decode 3 full)
  pyquant_kernel(decode_s8s4_blocked 48x32x128  1x1 decode 2 full)

  pyquant_family(decode_s8s4_steps decode 80 "GemmDecode<@TILE@, @STAGES@, false, DecodeS8S4Steps>")
  pyquant_kernel(decode_s8s4_steps 16x32x128  1x1 decode 3 full)
  pyquant_kernel(decode_s8s4_steps 16x128x128 1x1 decode 3 full)
  pyquant_kernel(decode_s8s4_steps 48x32x128  1x1 decode 2 full)

  pyquant_family(decode_w8a16 decode 80
                 "GemmDecode<@TILE@, @STAGES@, false, DecodeW8A16<__half>, DecodeW8A16<__nv_bfloat16>>")
  pyquant_kernel(decode_w8a16 16x32x64   1x1 decode 3 full)
  pyquant_kernel(decode_w8a16 16x128x64  1x1 decode 3 full)
  pyquant_kernel(decode_w8a16 32x128x64  1x1 decode 3 full)
  pyquant_kernel(decode_w8a16 48x128x64  1x1 decode 2 full)

  pyquant_family(decode_w4a16 decode 80
                 "GemmDecode<@TILE@, @STAGES@, false, DecodeW4A16<__half>, DecodeW4A16<__nv_bfloat16>>")
  pyquant_kernel(decode_w4a16 16x32x128  1x1 decode 3 full)
  pyquant_kernel(decode_w4a16 16x128x128 1x1 decode 3 full)
  pyquant_kernel(decode_w4a16 32x128x128 1x1 decode 3 full)
  pyquant_kernel(decode_w4a16 32x32x128  1x1 decode 2 full)
  pyquant_kernel(decode_w4a16 48x128x128 1x1 decode 2 full)
endmacro()

set(PYQUANT_INSTANCES_PER_FILE 6)
set(PYQUANT_WARP_SCHEDULES multistage splitk)  # whose shape is a warp's; others have a cluster, which is in the name
set(PYQUANT_PLAN_SOURCES csrc/core/build_facts.cpp csrc/core/claim.cpp csrc/core/reason.cpp csrc/plan/accept.cpp csrc/plan/chip.cpp
    csrc/plan/choice.cpp csrc/plan/cost.cpp csrc/plan/decode_cost.cpp csrc/plan/layer.cpp csrc/plan/route.cpp csrc/plan/select.cpp csrc/plan/tuned.cpp)
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
  if(coin MATCHES "^[0-2]")
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

# The chips among PYQUANT_ARCHS that a family's kernels run on, as nvcc numbers their machine code.
function(pyquant_codes archs result)
  set(codes "")
  foreach(arch ${PYQUANT_ARCHS})
    string(REPLACE "a" "" number ${arch})
    if(archs STREQUAL "90a" AND arch STREQUAL "90a")
      list(APPEND codes sm_90a)
    elseif(archs STREQUAL "80" OR (archs STREQUAL "80only" AND number LESS 90))
      list(APPEND codes sm_${number})
    endif()
  endforeach()
  set(${result} "${codes}" PARENT_SCOPE)
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

# Adds a row to what the build costs: CPU seconds, in the middle of what machines took with nvcc 13.0 (36 to 70 CPU
# minutes for every row of both chips).
function(pyquant_count_row archs)
  set(seconds 7)
  if(archs STREQUAL "90a")
    set(seconds 14)
  endif()
  foreach(total ROWS=1 SECONDS=${seconds})
    string(REPLACE "=" ";" total "${total}")
    list(POP_FRONT total name)
    get_property(sum GLOBAL PROPERTY PYQUANT_BUILD_${name})
    math(EXPR sum "0${sum} + ${total}")
    set_property(GLOBAL PROPERTY PYQUANT_BUILD_${name} ${sum})
  endforeach()
endfunction()

# The rows of a family: into the tables, and the compiled ones into PYQUANT_INSTANCES_<family>.
function(pyquant_family_rows family)
  get_property(rows GLOBAL PROPERTY PYQUANT_ROWS_${family})
  get_property(archs GLOBAL PROPERTY PYQUANT_ARCHS_${family})
  get_property(type GLOBAL PROPERTY PYQUANT_TYPE_${family})
  pyquant_codes(${archs} codes)
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
    if(PYQUANT_HAVE_CUDA AND codes)
      if(PYQUANT_KERNELS STREQUAL "full" OR (set STREQUAL "smoke" AND PYQUANT_KERNELS MATCHES "^(smoke|sample)$")
         OR (PYQUANT_KERNELS STREQUAL "sample" AND name STREQUAL sampled)
         OR (NOT PYQUANT_KERNELS MATCHES "^(full|smoke|sample|none)$" AND name MATCHES "${PYQUANT_KERNELS}"))
        set(compiled 1)
      endif()
    endif()
    pyquant_table_row(${name} ${family} "${tile}" "${cluster}" ${stages} ${schedule} ${selectable} ${compiled})
    if(compiled)
      pyquant_count_row(${archs})
      string(REPLACE "@TILE@" "${tile}" instance "${type}")
      string(REPLACE "@SHAPE@" "${shape}" instance "${instance}")
      string(REPLACE "@SCHEDULE@" "${schedule}" instance "${instance}")
      string(REPLACE "@STAGES@" "${stages}" instance "${instance}")
      set_property(GLOBAL APPEND PROPERTY PYQUANT_INSTANCES_${family}
        "using ${name}_type = ${instance}$<SEMICOLON>\nextern const Launcher ${name}$<SEMICOLON>\nconst Launcher ${name}{&${name}_type::run, &${name}_type::workspace}$<SEMICOLON>")
    endif()
  endforeach()
endfunction()

# nvcc puts a hash of the whole path into the names of kernels in anonymous namespaces: it is told a path without folders.
function(pyquant_forget_folders)
  foreach(source ${ARGN})
    string(REPLACE "${CMAKE_BINARY_DIR}/" "" name "${source}")
    set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS
                 "-Xcudafe=--orig_src_path_name,pyquant/${name}")
  endforeach()
endfunction()

# An object library of CUDA sources. GENCODE: what nvcc makes of them.
function(pyquant_cuda_objects target gencode)
  add_library(${target} OBJECT ${ARGN})
  if(PYQUANT_REPRODUCIBLE)
    pyquant_forget_folders(${ARGN})
  endif()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF JOB_POOL_COMPILE cuda CUDA_VISIBILITY_PRESET hidden)
  target_include_directories(${target} PRIVATE csrc ${CMAKE_BINARY_DIR}/generated)
  target_include_directories(${target} SYSTEM PRIVATE ${PYQUANT_CUTLASS_INCLUDE})
  # CuTe's calls of the driver: csrc/cuda/gemm/tensor_maps.cu
  target_compile_definitions(${target} PRIVATE NDEBUG CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL)
  target_compile_options(${target} PRIVATE -O3 --expt-relaxed-constexpr -fmad=false "SHELL:${gencode}")
  if(PYQUANT_EMBED_PTX)
    target_compile_options(${target} PRIVATE -no-compress)
  elseif(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)  # earlier ones do not know it
    target_compile_options(${target} PRIVATE --compress-mode=size)
  endif()
endfunction()

# Writes the instances of the families that nvcc is told the same of into files, and makes object libraries of them;
# appends their names to OBJECTS. A file goes on from one family to the next: CUTLASS's headers take nvcc as long to read
# as a row to compile.
function(pyquant_instances archs)
  pyquant_gencode(${archs} gencode)
  get_property(families GLOBAL PROPERTY PYQUANT_FAMILIES)
  set(instances "")
  foreach(family ${families})
    get_property(of_family GLOBAL PROPERTY PYQUANT_ARCHS_${family})
    get_property(rows GLOBAL PROPERTY PYQUANT_INSTANCES_${family})
    if(of_family STREQUAL archs)
      foreach(row ${rows})
        list(APPEND instances "${family}|${row}")
      endforeach()
    endif()
  endforeach()
  set(objects ${OBJECTS})
  list(LENGTH instances count)
  set(number 0)
  set(start 0)
  while(start LESS count)
    list(SUBLIST instances ${start} ${PYQUANT_INSTANCES_PER_FILE} chunk)
    math(EXPR start "${start} + ${PYQUANT_INSTANCES_PER_FILE}")
    set(headers "")
    set(body "")
    foreach(row ${chunk})
      string(REGEX MATCH "^[^|]+" family "${row}")
      string(REGEX REPLACE "^[^|]+\\|" "" row "${row}")
      get_property(header GLOBAL PROPERTY PYQUANT_HEADER_${family})
      list(APPEND headers "#include \"cuda/gemm/${header}.cuh\"")
      string(APPEND body "${row}\n")
    endforeach()
    list(REMOVE_DUPLICATES headers)
    string(REPLACE ";" "\n" headers "${headers}")
    string(REPLACE "$<SEMICOLON>" ";" body "${body}")
    set(name sm${archs}_${number})
    set(source ${CMAKE_BINARY_DIR}/generated/cuda/${name}.cu)
    file(CONFIGURE OUTPUT ${source} @ONLY CONTENT
      "${headers}\n\nnamespace pyquant::cuda {\n${body}}  // namespace pyquant::cuda\n")
    pyquant_cuda_objects(pyquant_cuda_${name} "${gencode}" ${source})
    if(archs STREQUAL "90a")  # CUTLASS's kernels wait for their predecessor (launch90.cuh)
      target_compile_definitions(pyquant_cuda_${name} PRIVATE CUTLASS_ENABLE_GDC_FOR_SM90)
    endif()
    list(APPEND objects pyquant_cuda_${name})
    math(EXPR number "${number} + 1")
  endwhile()
  set(OBJECTS ${objects} PARENT_SCOPE)
endfunction()

# nvcc's words for machine code of some chips and PTX for chips to come, all from one virtual architecture.
function(pyquant_gencode_words virtual codes result)
  list(APPEND codes compute_${virtual})
  string(REPLACE ";" "," codes "${codes}")
  set(${result} "-gencode arch=compute_${virtual},code=[${codes}]" PARENT_SCOPE)
endfunction()

# What nvcc makes of a family's sources.
function(pyquant_gencode archs result)
  pyquant_codes(${archs} codes)
  if(NOT archs STREQUAL "90a")
    pyquant_gencode_words(80 "${codes}" words)
  elseif(PYQUANT_EMBED_PTX)
    pyquant_gencode_words(90a "${codes}" words)
  else()  # PTX of 90a is for no other chip
    set(words "-gencode arch=compute_90a,code=sm_90a")
  endif()
  set(${result} "${words}" PARENT_SCOPE)
endfunction()

# Kernels that overlap their predecessor (csrc/cuda/overlap.cuh) are compiled for sm_90 by themselves: code made from
# compute_80 would lack the wait. The PTX is of both, so that chips to come take the one with the wait.
function(pyquant_gencode_overlapping result)
  pyquant_codes(80 newer)
  pyquant_codes(80only older)
  if(older)
    list(REMOVE_ITEM newer ${older})
  endif()
  pyquant_gencode_words(80 "${older}" before)
  pyquant_gencode_words(90 "${newer}" since)
  set(${result} "${before} ${since}" PARENT_SCOPE)
endfunction()

# How many files nvcc may compile at a time (one peaks at 6 GB), and what that comes to.
function(pyquant_cuda_pool)
  cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)
  cmake_host_system_information(RESULT jobs QUERY NUMBER_OF_LOGICAL_CORES)
  if("$ENV{MAX_JOBS}" MATCHES "^[1-9][0-9]*$" AND "$ENV{MAX_JOBS}" LESS jobs)
    set(jobs $ENV{MAX_JOBS})
  endif()
  math(EXPR pool "${memory} / 6000")
  if(pool GREATER jobs)
    set(pool ${jobs})
  elseif(pool LESS 1)
    set(pool 1)
  endif()
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS cuda=${pool})
  get_property(rows GLOBAL PROPERTY PYQUANT_BUILD_ROWS)
  if(PYQUANT_KERNELS STREQUAL "none")
    set(rows 0)
  elseif(NOT rows)
    message(FATAL_ERROR "PYQUANT_KERNELS: '${PYQUANT_KERNELS}' names no row for ${PYQUANT_ARCHS}; "
      "allowed: full, smoke, sample, none, or a regular expression over names such as gemm_sm80_s8s8_128x128x64_splitk")
  endif()
  get_property(seconds GLOBAL PROPERTY PYQUANT_BUILD_SECONDS)
  list(LENGTH PYQUANT_ARCHS chips)
  math(EXPR seconds "0${seconds} + 300 + 200 * ${chips}")  # what is not in the table: C++, quantisers
  math(EXPR minutes "(${seconds} / ${pool} + 59) / 60")
  message(STATUS "pyquant: ${rows} CUDA kernels to compile, about ${seconds} CPU seconds: about ${minutes} minutes with "
    "${pool} jobs of up to 6 GB each (MAX_JOBS bounds them), less where ccache or sccache knows them")
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

  pyquant_cuda_pool()
  set(OBJECTS pyquant_cuda_common)
  pyquant_gencode(80 common)
  pyquant_cuda_objects(pyquant_cuda_common "${common}" csrc/cuda/codes.cu csrc/cuda/device.cu csrc/cuda/pack.cu
                       csrc/cuda/gemm/depthwise_conv.cu csrc/cuda/gemm/float_epilogue.cu
                       csrc/cuda/gemm/grouped_conv.cu csrc/cuda/gemm/simt.cu csrc/cuda/gemm/tensor_maps.cu
                       csrc/cuda/quantize/histogram.cu)
  pyquant_gencode_overlapping(overlapping)
  pyquant_cuda_objects(pyquant_cuda_quantize "${overlapping}" csrc/cuda/clear.cu csrc/cuda/quantize/expert_rows.cu
                       csrc/cuda/quantize/dequantize.cu
                       csrc/cuda/quantize/fake_gradients.cu csrc/cuda/quantize/fake_quantize.cu
                       csrc/cuda/quantize/gate.cu csrc/cuda/quantize/given.cu csrc/cuda/quantize/groups.cu
                       csrc/cuda/quantize/hadamard.cu csrc/cuda/quantize/images.cu
                       csrc/cuda/quantize/norm.cu csrc/cuda/quantize/parts.cu csrc/cuda/quantize/patches.cu
                       csrc/cuda/quantize/per_token.cu
                       csrc/cuda/quantize/short_groups.cu)
  list(APPEND OBJECTS pyquant_cuda_quantize)
  set_target_properties(pyquant_cuda_common pyquant_cuda_quantize PROPERTIES CUDA_VISIBILITY_PRESET default)  # interface
  foreach(archs 90a 80 80only)
    pyquant_instances(${archs})
  endforeach()
  set(${result} ${OBJECTS} PARENT_SCOPE)
endfunction()
