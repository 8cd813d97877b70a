// The experts of a launch as kernels see them: whose rows are whose, and where their operands lie. How many rows an
// expert has is known on the device alone.
#pragma once
#include <algorithm>
#include <cstdint>

namespace pyquant::cuda {

constexpr int32_t kExpertsAtOnce = 512;  // published models have up to 512 a layer; 4 KiB of parameters

// By value, as a grid constant: the addresses need no copy to the device, and a captured graph holds them.
struct ExpertTable {
  const int32_t* ends;            // of the rows of all experts
  int32_t first, count;           // experts of this launch
  bool rest;                      // the rows beyond the last expert's are this launch's, too
  int64_t shift[kExpertsAtOnce];  // of experts first, first + 1, ...: bytes from the operands of expert 0 to theirs
};

// launch_one(table) for every share of the experts that a launch takes.
template <class LaunchOne>
void for_expert_tables(const int32_t* ends, const int64_t* shifts, int64_t experts, LaunchOne launch_one) {
  for (int64_t first = 0; first < experts; first += kExpertsAtOnce) {
    ExpertTable table{};
    table.ends = ends;
    table.first = static_cast<int32_t>(first);
    table.count = static_cast<int32_t>(std::min<int64_t>(experts - first, kExpertsAtOnce));
    table.rest = first + table.count == experts;
    std::copy_n(shifts + first, table.count, table.shift);
    launch_one(table);
  }
}

#ifdef __CUDACC__
template <class T>
__host__ __device__ __forceinline__ const T* shifted(const T* base, int64_t bytes) {
  return base ? reinterpret_cast<const T*>(reinterpret_cast<const char*>(base) + bytes) : nullptr;
}
#endif

}  // namespace pyquant::cuda
