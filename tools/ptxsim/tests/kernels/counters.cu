// Kernels whose instructions and bytes are known; test_counters.py asserts the counters.
#include <cstdint>
#include <cuda_runtime.h>
using u32 = uint32_t;
using u64 = uint64_t;
using u16 = uint16_t;
using u8 = uint8_t;
#define C extern "C"
static int done() {
  cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) e = cudaDeviceSynchronize();
  return (int)e;
}
__device__ u32 sm(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// region 1: one of everything, in known numbers; region 2: three instructions under a guard that is off for half of the
// warps
__global__ void k_classes(const float* in, float* out) {
  __shared__ __align__(16) u32 s[512];
  u32 a = sm(s) + threadIdx.x * 16;
  const float* p = in + threadIdx.x;
  float* q = out + blockIdx.x * blockDim.x + threadIdx.x;
  asm volatile(
      "{.reg .f32 f<9>; .reg .b32 r<9>; .reg .b16 h<3>; .reg .pred p;\n pmevent 1;\n"
      " ld.global.f32 f0, [%1];\n"
      " cvt.rni.f32.f32 f1, f0; cvt.rmi.f32.f32 f2, f0; cvt.rzi.f32.f32 f3, f0;\n"                      // 3 FRND
      " cvt.rzi.s32.f32 r1, f0; cvt.rni.s32.f32 r2, f0;\n"                                              // 2 F2I
      " cvt.rn.f32.s32 f4, r1; cvt.rn.f32.s32 f5, r2; cvt.rn.f32.u32 f6, r1; cvt.rn.f16.s32 h0, r1;\n"  // 4 I2F
      " cvt.rn.bf16x2.f32 r3, f4, f5; cvt.f32.f16 f7, h0; cvt.rn.satfinite.e4m3x2.f32 h1, f4, f5;\n"    // 3 F2F
      " cvt.u32.u16 r4, h1;\n"                                                                          // 1 I2I
      " add.f32 f1, f1, f2; fma.rn.f32 f1, f1, f3, f4; mul.f32 f1, f1, f5; setp.gt.f32 p, f1, f2; max.f32 f1, f1, f2;\n"  // 5 float
      " fma.rn.bf16x2 r5, r3, r3, r3; max.bf16x2 r5, r5, r3;\n"  // 2 half
      " ex2.approx.f32 f8, f1;\n"                                // 1 sfu
      " lop3.b32 r6, r1, r2, r3, 0x6a; prmt.b32 r6, r6, r2, 0x5410; add.s32 r6, r6, r4; shl.b32 r6, r6, 2; selp.b32 "
      "r6, r6, r5, p; max.u16x2 r6, r6, r5;\n"                                                       // 6 integer
      " mov.b32 r7, r6;\n"                                                                           // 1 move
      " st.shared.v4.b32 [%0], {r1, r2, r3, r4}; st.shared.b32 [%0], r6; ld.shared.b32 r8, [%0];\n"  // 3 shared
      " ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r1, r2, r3, r4}, [%0]; stmatrix.sync.aligned.m8n8.x2.shared.b16 "
      "[%0], {r1, r2};\n"
      " movmatrix.sync.aligned.m8n8.trans.b16 r1, r1; shfl.sync.bfly.b32 r2, r2, 1, 31, -1; shfl.sync.idx.b32 r2, r2, "
      "0, 31, -1; vote.sync.ballot.b32 r3, p, -1; redux.sync.add.u32 r4, r4, -1;\n"
      " mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {r1, r2, r3, r4}, {r1, r2, r3, r4}, {r5, r6}, {r1, r2, r3, "
      "r4};\n"
      " bar.sync 0; fence.proxy.async.shared::cta; membar.gl;\n"
      " bra L%=; L%=:\n"
      " cvt.rn.f32.s32 f8, r1;\n"  // a fifth I2F
      " st.global.f32 [%2], f8;\n"
      " pmevent 2; setp.lt.u32 p, %3, 32; @p add.s32 r1, r1, 1; @p st.global.f32 [%2], f8; pmevent 0;}\n" ::"r"(a),
      "l"(p), "l"(q), "r"(threadIdx.x)
      : "memory");
}
C int classes(int blocks, const float* in, float* out) {
  k_classes<<<blocks, 64>>>(in, out);
  return done();
}

// per CTA: 2 x 512 bytes by ordinary loads of the same place, 512 by cp.async, and per cluster 1024 by a multicast bulk
// copy that rank 0 issues
__global__ void __cluster_dims__(2, 1, 1) k_traffic(const uint4* in, u32* out, int twice) {
  __shared__ __align__(128) uint4 s[128];
  __shared__ u64 b;
  u32 rank, t = threadIdx.x;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (t == 0)
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024; "
        "fence.mbarrier_init.release.cluster;" ::"r"(sm(&b))
        : "memory");
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (rank == 0 && t == 0)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 1024, [%2], "
        "%3;" ::"r"(sm(s)),
        "l"(in), "r"(sm(&b)), "h"((u16)3)
        : "memory");
  uint4 v, w;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(in + t));
  w = v;
  if (twice)
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(in + t));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n cp.async.commit_group;\n cp.async.wait_group 0;" ::"r"(
                   sm(s + 64 + t)),
               "l"(in + 64 + t)
               : "memory");
  asm volatile(
      "{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @p bra D; bra W; D:}" ::"r"(sm(&b))
      : "memory");
  out[blockIdx.x * 32 + t] = v.x + w.y + s[t].z + s[64 + t].w;
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
C int traffic(const void* in, u32* out, int clusters, int twice) {
  k_traffic<<<2 * clusters, 32>>>((const uint4*)in, out, twice);
  return done();
}

// warps that wait for each other at every kind of barrier: the counts must not depend on who waits
__global__ void k_waits(u32* out) {
  __shared__ u64 b;
  __shared__ u32 s[256];
  int t = threadIdx.x, w = t / 32;
  if (t == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 256;" ::"r"(sm(&b)) : "memory");
  s[t] = t;
  __syncthreads();
  u32 v = s[255 - t];
  for (int i = 0; i < 8 * w; ++i) v = v * 3 + 1;
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sm(&b)) : "memory");
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p trap;}" ::"r"(sm(&b))
               : "memory");
  u32 c = __syncthreads_count(v & 1);
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
  out[t] = v + c;
}
C int waits(u32* out) {
  k_waits<<<1, 256>>>(out);
  return done();
}

// a layer: quantise, then a GEMM that starts early (programmatic stream serialization) in clusters of two
__global__ void k_quantise(u32* x) {
  x[threadIdx.x] += 1;
  asm volatile("griddepcontrol.launch_dependents;");
}
__global__ void k_gemm(u32* x, u32* y) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  y[blockIdx.x * 32 + threadIdx.x] = x[threadIdx.x];
}
C int layer(u32* x, u32* y, int sloppy) {
  cudaStream_t s;
  cudaStreamCreate(&s);
  cudaEvent_t e;
  cudaEventCreate(&e);
  if (sloppy) {
    cudaMemsetAsync(y, 0, 256, s);
    cudaMemcpyAsync(y, x, 64, cudaMemcpyDeviceToDevice, s);
    cudaMemset2DAsync(y, 64, 0, 32, 2, s);
  }
  k_quantise<<<1, 32, 0, s>>>(x);
  cudaLaunchConfig_t c = {};
  cudaLaunchAttribute a[2];
  c.gridDim = 2;
  c.blockDim = 32;
  c.stream = s;
  c.attrs = a;
  c.numAttrs = 2;
  a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a[0].val.programmaticStreamSerializationAllowed = 1;
  a[1].id = cudaLaunchAttributeClusterDimension;
  a[1].val.clusterDim.x = 2;
  a[1].val.clusterDim.y = a[1].val.clusterDim.z = 1;
  cudaLaunchKernelEx(&c, k_gemm, x, y);
  cudaEventRecord(e, s);
  cudaStreamSynchronize(s);
  return (int)cudaGetLastError();
}

// an epilogue: 128 accumulators a warp (four each lane) to bf16, scaled; one warp instruction serves 32 outputs of it
__global__ void k_epilogue(const int4* acc, const float* scale, u32* out) {
  int t = threadIdx.x;
  int4 v = acc[t];
  float f = scale[0];
  asm volatile("pmevent 1;" ::: "memory");
  u32 a, b;
  asm volatile(
      "{.reg .f32 x, y; cvt.rn.f32.s32 x, %1; cvt.rn.f32.s32 y, %2; mul.f32 x, x, %3; mul.f32 y, y, %3; "
      "cvt.rn.bf16x2.f32 %0, y, x;}"
      : "=r"(a)
      : "r"(v.x), "r"(v.y), "f"(f));
  asm volatile(
      "{.reg .f32 x, y; cvt.rn.f32.s32 x, %1; cvt.rn.f32.s32 y, %2; mul.f32 x, x, %3; mul.f32 y, y, %3; "
      "cvt.rn.bf16x2.f32 %0, y, x;}"
      : "=r"(b)
      : "r"(v.z), "r"(v.w), "f"(f));
  asm volatile("st.global.v2.b32 [%0], {%1, %2};\n pmevent 0;" ::"l"(out + 2 * t), "r"(a), "r"(b) : "memory");
}
C int epilogue(const void* acc, const float* scale, u32* out) {
  k_epilogue<<<1, 64>>>((const int4*)acc, scale, out);
  return done();
}
