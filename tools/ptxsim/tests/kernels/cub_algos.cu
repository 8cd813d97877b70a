// CUB device algorithms: reductions, decoupled look-back scan (CTAs wait for each other), radix sort.
#include <cstdint>
#include <cub/cub.cuh>
#define RUN(call)                               \
  do {                                          \
    void* t = nullptr;                          \
    size_t n = 0;                               \
    cudaError_t e = call(t, n);                 \
    if (e) return (int)e;                       \
    if ((e = cudaMalloc(&t, n))) return (int)e; \
    e = call(t, n);                             \
    if (!e) e = cudaDeviceSynchronize();        \
    cudaFree(t);                                \
    return (int)e;                              \
  } while (0)
extern "C" int reduce_f32(const float* in, float* out, int n) {
  auto f = [&](void* t, size_t& b) { return cub::DeviceReduce::Sum(t, b, in, out, n); };
  RUN(f);
}
extern "C" int scan_u32(const uint32_t* in, uint32_t* out, int n) {
  auto f = [&](void* t, size_t& b) { return cub::DeviceScan::InclusiveSum(t, b, in, out, n); };
  RUN(f);
}
extern "C" int sort_pairs(const uint32_t* k, uint32_t* ko, const uint32_t* v, uint32_t* vo, int n) {
  auto f = [&](void* t, size_t& b) { return cub::DeviceRadixSort::SortPairs(t, b, k, ko, v, vo, n); };
  RUN(f);
}
extern "C" int argmin_s32(const int* in, int* val, int* idx, int n) {
  auto f = [&](void* t, size_t& b) { return cub::DeviceReduce::ArgMin(t, b, in, val, idx, n); };
  RUN(f);
}
