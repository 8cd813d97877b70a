// An ordinary CUDA program: linked with -cudart shared it runs under the simulator unchanged.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>
__device__ int counter;
__constant__ float factor;
__global__ void axpy(int n, const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    y[i] += factor * x[i];
    atomicAdd(&counter, 1);
  }
}
#define CHECK(x)                                     \
  do {                                               \
    cudaError_t e = (x);                             \
    if (e != cudaSuccess) {                          \
      printf("%s: %s\n", #x, cudaGetErrorString(e)); \
      return 1;                                      \
    }                                                \
  } while (0)
int main() {
  const int n = 1000;
  std::vector<float> x(n), y(n, 1.f);
  for (int i = 0; i < n; ++i) x[i] = (float)i;
  float *dx, *dy, f = 2.f;
  int c = 0;
  cudaStream_t s;
  cudaEvent_t e0, e1;
  CHECK(cudaStreamCreate(&s));
  CHECK(cudaEventCreate(&e0));
  CHECK(cudaEventCreate(&e1));
  CHECK(cudaMalloc(&dx, n * 4));
  CHECK(cudaMallocAsync(&dy, n * 4, s));
  CHECK(cudaMemcpyToSymbol(factor, &f, 4));
  CHECK(cudaMemcpyToSymbol(counter, &c, 4));
  CHECK(cudaMemcpyAsync(dx, x.data(), n * 4, cudaMemcpyHostToDevice, s));
  CHECK(cudaMemcpyAsync(dy, y.data(), n * 4, cudaMemcpyHostToDevice, s));
  CHECK(cudaEventRecord(e0, s));
  axpy<<<(n + 127) / 128, 128, 0, s>>>(n, dx, dy);
  CHECK(cudaGetLastError());
  CHECK(cudaEventRecord(e1, s));
  CHECK(cudaStreamSynchronize(s));
  CHECK(cudaMemcpy(y.data(), dy, n * 4, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpyFromSymbol(&c, counter, 4));
  for (int i = 0; i < n; ++i)
    if (y[i] != 1.f + 2.f * i) {
      printf("wrong at %d\n", i);
      return 2;
    }
  cudaDeviceProp p;
  CHECK(cudaGetDeviceProperties(&p, 0));
  cudaFuncAttributes a;
  CHECK(cudaFuncGetAttributes(&a, axpy));
  int nb;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&nb, axpy, 128, 0));
  printf("ok counter %d sms %d cc %d.%d blocks %d\n", c, p.multiProcessorCount, p.major, p.minor, nb);
  CHECK(cudaFree(dx));
  CHECK(cudaFreeAsync(dy, s));
  return 0;
}
