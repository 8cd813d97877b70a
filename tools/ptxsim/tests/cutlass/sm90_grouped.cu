// sm_90a grouped fp16 GEMM: tensor maps are rewritten on the device for every group.
#include "sm90_gemm.h"
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <vector>
using half_t = cutlass::half_t;
using Problem = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;
using TileMNK = Shape<_128, _128, _64>;
using ClusterMNK = Shape<_2, _1, _1>;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileMNK, ClusterMNK,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, half_t, RowMajor*, 8, half_t, RowMajor*, 8,
    cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, half_t, RowMajor*, 8, half_t, ColumnMajor*, 8, float, TileMNK,
    ClusterMNK, cutlass::gemm::collective::StageCountAutoCarveout<(int)sizeof(typename Epilogue::SharedStorage)>,
    cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
template <class T>
static T* up(std::vector<T> const& v) {
  T* p;
  cudaMalloc(&p, v.size() * sizeof(T));
  cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice);
  return p;
}

extern "C" int sm90_grouped(int groups, const int* mnk, const half_t** A, const half_t** B, const half_t** C,
                            half_t** D, float alpha, float beta) {
  using SA = typename Kernel::InternalStrideA;
  using SB = typename Kernel::InternalStrideB;
  using SD = typename Kernel::InternalStrideD;
  std::vector<typename Problem::UnderlyingProblemShape> ps;
  std::vector<SA> sa;
  std::vector<SB> sb;
  std::vector<SD> sd;
  for (int g = 0; g < groups; ++g) {
    int m = mnk[3 * g], n = mnk[3 * g + 1], k = mnk[3 * g + 2];
    ps.push_back({m, n, k});
    sa.push_back(cutlass::make_cute_packed_stride(SA{}, {m, k, 1}));
    sb.push_back(cutlass::make_cute_packed_stride(SB{}, {n, k, 1}));
    sd.push_back(cutlass::make_cute_packed_stride(SD{}, {m, n, 1}));
  }
  auto dA = up(std::vector<const half_t*>(A, A + groups));
  auto dB = up(std::vector<const half_t*>(B, B + groups));
  auto dC = up(std::vector<const half_t*>(C, C + groups));
  auto dD = up(std::vector<half_t*>(D, D + groups));
  cutlass::KernelHardwareInfo hw;
  hw.device_id = 0;
  hw.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(0);
  typename Gemm::Arguments args{cutlass::gemm::GemmUniversalMode::kGrouped,
                                {groups, up(ps), ps.data()},
                                {dA, up(sa), dB, up(sb)},
                                {{}, dC, up(sd), dD, up(sd)},
                                hw};
  args.epilogue.thread.alpha = alpha;
  args.epilogue.thread.beta = beta;
  return launch<Gemm>(args);
}
