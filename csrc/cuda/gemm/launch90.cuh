// Host side of the CUTLASS kernels for sm_90a: sizes, scheduler, workspace, launch.
#pragma once
#include <cute/tensor.hpp>
#include <cutlass/device_kernel.h>
#include <cutlass/gemm/gemm.h>

#include <type_traits>

#include "cuda/gemm/epilogue.cuh"
#include "cuda/gemm/schedule90.cuh"
#include "cuda/launch.h"

namespace pyquant::cuda {

// Whether a kernel divides tiles along K.
template <class Kernel>
constexpr bool splits90 = std::is_same_v<typename Kernel::TileSchedulerTag, schedule90::StreamKTag>;

// Everything of a kernel's arguments but its main loop's. rows, columns: of the product as the tensor cores see it.
template <class Kernel>
typename Kernel::Arguments common_arguments90(const GemmCall& call, int64_t rows, int64_t columns) {
  typename Kernel::Arguments a{};
  a.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  a.problem_shape = {static_cast<int>(rows), static_cast<int>(columns), static_cast<int>(call.problem.k), 1};
  a.epilogue = epilogue_params(call);
  a.hw_info.device_id = call.context.device;
  a.hw_info.sm_count = call.device.sm_count;
  if constexpr (splits90<Kernel>) {
    // Integer sums are the same in any order; float sums are added in the order of K, whoever comes first.
    using Mode = cutlass::gemm::kernel::detail::ReductionMode;
    a.scheduler.reduction_mode =
        std::is_integral_v<typename Kernel::ElementAccumulator> ? Mode::Nondeterministic : Mode::Deterministic;
  }
  return a;
}

template <class Kernel>
void launch90(const GemmCall& call, const typename Kernel::Arguments& arguments) {
  using Cluster = typename Kernel::ClusterShape;
  DeviceGuard guard(call.context.device);
  auto* stream = static_cast<cudaStream_t>(call.context.stream);
  // Clears the semaphores of a divided K; does nothing for other schedules.
  if (Kernel::initialize_workspace(arguments, call.operands.workspace, stream) != cutlass::Status::kSuccess)
    throw std::runtime_error(std::string(call.name) + ": the workspace could not be prepared");
  const typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, call.operands.workspace);
  LaunchShape shape;
  shape.grid = Kernel::get_grid_shape(params);
  shape.block = Kernel::get_block_shape();
  shape.cluster = dim3(cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), 1);
  shape.shared_bytes = Kernel::SharedStorageSize;
  // CUTLASS's producers wait for the predecessor before their first load, Store90 before its own. Where semaphores are
  // cleared the predecessor is that memset: nothing to overlap with, and the plain order is the one that holds for it.
  shape.overlaps = !splits90<Kernel> || Kernel::get_workspace_size(arguments) == 0;
  launch<cutlass::device_kernel<Kernel>>(call.name, shape, call.context, params);
}

}  // namespace pyquant::cuda
