// Host side of the CUTLASS kernels for sm_90a: sizes, scheduler, workspace, launch.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/device_kernel.h>
#include <cutlass/gemm/gemm.h>

#include <type_traits>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/schedule90.cuh"
#include "cuda/launch.h"
#include "plan/swizzle.h"

namespace pyquant::cuda {

struct NoSums {};  // an accumulator of no bits

}  // namespace pyquant::cuda

template <>
struct cutlass::sizeof_bits<pyquant::cuda::NoSums> {
  static constexpr int value = 0;
};

namespace pyquant::cuda {

// Whether the registers that warps ask for, summed over a block's threads, are those that the launch gives it, a
// multiple of 8 a thread. Of more, the warps that come last would wait for ever (PTX ISA, setmaxnreg).
constexpr bool registers_suffice(int threads, int sum) { return sum <= 65536 / threads / 8 * 8 * threads; }

// Whether a kernel divides tiles along K.
template <class Kernel>
constexpr bool splits90 = std::is_same_v<typename Kernel::TileSchedulerTag, schedule90::StreamKTag>;

template <class Kernel>
int32_t swizzle90(int64_t rows, int64_t columns, int32_t sm_count) {
  using Tile = typename Kernel::TileShape;
  using Cluster = typename Kernel::ClusterShape;
  const int64_t cluster_rows = cute::size<0>(Cluster{}) * cute::size<0>(Tile{});
  const int64_t cluster_columns = cute::size<1>(Cluster{}) * cute::size<1>(Tile{});
  return tile_swizzle({ceil_div(rows, cluster_rows), ceil_div(columns, cluster_columns), cluster_rows, cluster_columns,
                       std::max<int64_t>(sm_count / cute::size(Cluster{}), 1)});
}

// Everything of a kernel's arguments but its main loop's. rows, columns: of the product as the tensor cores see it.
template <class Kernel>
typename Kernel::Arguments common_arguments90(const GemmCall& call, int64_t rows, int64_t columns) {
  typename Kernel::Arguments a{};
  a.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  a.problem_shape = {static_cast<int>(rows), static_cast<int>(columns), static_cast<int>(call.problem.k), 1};
  a.epilogue = epilogue_params(call);
  a.hw_info.device_id = call.context.device;
  a.hw_info.sm_count = call.device.sm_count;
  a.scheduler.max_swizzle_size = swizzle90<Kernel>(rows, columns, call.device.sm_count);
  if constexpr (splits90<Kernel>) {
    a.scheduler.reduction_mode = Kernel::TileScheduler::template reduction_mode<typename Kernel::ElementAccumulator>;
  }
  return a;
}

// CUTLASS lays the semaphores behind the sums: without sums, they are what is left.
template <class Kernel>
Workspace workspace90(const typename Kernel::Arguments& a) {
  const auto bytes = static_cast<int64_t>(Kernel::get_workspace_size(a));
  if constexpr (splits90<Kernel>) {
    const auto semaphores =
        static_cast<int64_t>(Kernel::TileScheduler::template get_workspace_size<typename Kernel::ProblemShape, NoSums>(
            a.scheduler, a.problem_shape, a.hw_info, Kernel::NumMmaWarpGroups));
    return {bytes, bytes - semaphores, semaphores};
  }
  return {bytes, 0, 0};
}

template <class Kernel>
void launch90(const GemmCall& call, const typename Kernel::Arguments& arguments) {
  using Cluster = typename Kernel::ClusterShape;
  DeviceGuard guard(call.context.device);
  const typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, call.operands.workspace);
  LaunchShape shape;
  shape.grid = Kernel::get_grid_shape(params);
  shape.block = Kernel::get_block_shape();
  shape.cluster = dim3(cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), 1);
  shape.shared_bytes = Kernel::SharedStorageSize;
  // CUTLASS's producers wait for the predecessor before their first load, Store90 and StreamK before their own.
  shape.overlaps = true;
  launch<cutlass::device_kernel<Kernel>>(call.name, shape, call.context, params);
}

}  // namespace pyquant::cuda
