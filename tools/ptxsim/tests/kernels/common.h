// Kernels of one instruction: element-wise ones and matrix products, registers in, registers out.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

using u32 = uint32_t;
using u64 = uint64_t;
using u16 = uint16_t;
using u8 = uint8_t;

#define C extern "C"

static int done() {
  const cudaError_t error = cudaGetLastError();
  return (int)(error == cudaSuccess ? cudaDeviceSynchronize() : error);
}

// out[i] = op(a[i], b[i], c[i])
#define OP32(name, text)                                                              \
  __global__ void k_##name(int n, const u32* a, const u32* b, const u32* c, u32* o) { \
    int i = blockIdx.x * blockDim.x + threadIdx.x;                                    \
    if (i < n) {                                                                      \
      u32 r;                                                                          \
      asm volatile(text : "=r"(r) : "r"(a[i]), "r"(b[i]), "r"(c[i]));                 \
      o[i] = r;                                                                       \
    }                                                                                 \
  }                                                                                   \
  C int name(int n, const u32* a, const u32* b, const u32* c, u32* o) {               \
    k_##name<<<(n + 127) / 128, 128>>>(n, a, b, c, o);                                \
    return done();                                                                    \
  }

// A warp's mma.sync: NA, NB, NC registers a thread. The statements I424 and so on name the kind of accumulators
// (integer, float, half) and the registers of A, B and C.
#define MMA(name, inst, NA, NB, NC)                                             \
  __global__ void k_##name(const u32* A, const u32* B, const u32* Cc, u32* D) { \
    u32 a[4] = {}, b[2] = {}, c[4] = {}, d[4] = {};                             \
    int l = threadIdx.x;                                                        \
    for (int i = 0; i < NA; ++i) a[i] = A[i * 32 + l];                          \
    for (int i = 0; i < NB; ++i) b[i] = B[i * 32 + l];                          \
    for (int i = 0; i < NC; ++i) c[i] = Cc[i * 32 + l];                         \
    inst;                                                                       \
    for (int i = 0; i < NC; ++i) D[i * 32 + l] = d[i];                          \
  }                                                                             \
  C int name(const u32* A, const u32* B, const u32* Cc, u32* D) {               \
    k_##name<<<1, 32>>>(A, B, Cc, D);                                           \
    return done();                                                              \
  }
#define I424(t)                                                                                                     \
  asm volatile("mma.sync.aligned." t " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"                   \
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), \
                 "r"(c[3]))
#define I214(t)                                                                       \
  asm volatile("mma.sync.aligned." t " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};" \
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]))
#define F424(t)                                                                                         \
  asm volatile("mma.sync.aligned." t " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"       \
               : "=f"(((float*)d)[0]), "=f"(((float*)d)[1]), "=f"(((float*)d)[2]), "=f"(((float*)d)[3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(((float*)c)[0]), \
                 "f"(((float*)c)[1]), "f"(((float*)c)[2]), "f"(((float*)c)[3]))
#define F214(t)                                                                                                  \
  asm volatile("mma.sync.aligned." t " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"                            \
               : "=f"(((float*)d)[0]), "=f"(((float*)d)[1]), "=f"(((float*)d)[2]), "=f"(((float*)d)[3])          \
               : "r"(a[0]), "r"(a[1]), "r"(b[0]), "f"(((float*)c)[0]), "f"(((float*)c)[1]), "f"(((float*)c)[2]), \
                 "f"(((float*)c)[3]))
#define H422(t)                                                                   \
  asm volatile("mma.sync.aligned." t " {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%9};" \
               : "=r"(d[0]), "=r"(d[1])                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]))
#define H212(t)                                                          \
  asm volatile("mma.sync.aligned." t " {%0,%1}, {%2,%3}, {%4}, {%5,%6};" \
               : "=r"(d[0]), "=r"(d[1])                                  \
               : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(c[0]), "r"(c[1]))
#define I112(t)                                                       \
  asm volatile("mma.sync.aligned." t " {%0,%1}, {%2}, {%3}, {%4,%5};" \
               : "=r"(d[0]), "=r"(d[1])                               \
               : "r"(a[0]), "r"(b[0]), "r"(c[0]), "r"(c[1]))
