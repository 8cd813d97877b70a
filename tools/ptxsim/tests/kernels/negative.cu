// Kernels with one deliberate defect each; test_negative.py expects every one to be reported.
// With |ok| set the same kernel does it right and must pass.
#include <cassert>
#include <cstdint>
#include <cuda_runtime.h>
using u32 = uint32_t;
using u64 = uint64_t;
using u8 = uint8_t;
#define C extern "C"
static int done() {
  cudaError_t e = cudaGetLastError();
  if (e == cudaSuccess) e = cudaDeviceSynchronize();
  return (int)e;
}
__device__ u32 sm(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void mb_init(u64* b, u32 n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sm(b)), "r"(n) : "memory");
}
__device__ void mb_expect(u64* b, u32 n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sm(b)), "r"(n) : "memory");
}
__device__ void mb_arrive(u64* b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(sm(b)) : "memory"); }
__device__ void mb_wait(u64* b, u32 ph) {
  asm volatile(
      "{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D; bra W; D:}" ::"r"(sm(b)),
      "r"(ph)
      : "memory");
}
__device__ void bulk_load(void* s, const void* g, u32 n, u64* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(sm(s)),
               "l"(g), "r"(n), "r"(sm(b))
               : "memory");
}
#define K(name, threads, smem)                      \
  C int name(u32* in, u32* out, int n, int ok) {    \
    k_##name<<<1, threads, smem>>>(in, out, n, ok); \
    return done();                                  \
  }
#define ARGS u32 *in, u32 *out, int n, int ok

__global__ void k_missing_sync(ARGS) {
  __shared__ u32 s[128];
  int t = threadIdx.x;
  s[t] = in[t];
  if (ok) __syncthreads();
  out[t] = s[127 - t];
}
K(missing_sync, 128, 0);
__global__ void k_missing_sync_war(ARGS) {
  __shared__ u32 s[128];
  int t = threadIdx.x;
  s[t] = in[t];
  __syncthreads();
  u32 v = s[127 - t];
  if (ok) __syncthreads();
  s[t] = v + 1;
  __syncthreads();
  out[t] = s[t];
}
K(missing_sync_war, 128, 0);
__global__ void k_missing_cp_wait(ARGS) {
  __shared__ __align__(16) u32 s[128];
  int t = threadIdx.x;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n cp.async.commit_group;" ::"r"(sm(&s[t])), "l"(in + t)
               : "memory");
  if (ok) asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  out[t] = s[127 - t];
}
K(missing_cp_wait, 128, 0);
__global__ void k_oob_global(ARGS) {
  int t = threadIdx.x;
  out[t + (ok ? 0 : 1)] = in[t];
}
K(oob_global, 128, 0);
__global__ void k_oob_read(ARGS) {
  int t = threadIdx.x;
  out[t] = in[t + (ok ? 0 : 1)];
}
K(oob_read, 128, 0);
__global__ void k_oob_far(ARGS) { out[threadIdx.x + (ok ? 0 : 100000)] = 1; }
K(oob_far, 32, 0);
__global__ void k_oob_shared(ARGS) {
  extern __shared__ u32 d[];
  int t = threadIdx.x;
  d[t + (ok ? 0 : 4)] = in[t];
  __syncthreads();
  out[t] = d[t + (ok ? 0 : 4)];
}
K(oob_shared, 128, 512);
__global__ void k_null_ptr(ARGS) {
  u32* p = (u32*)((u64)out * (u64)ok);
  p[threadIdx.x] = 1;
}
K(null_ptr, 32, 0);
__global__ void k_misaligned(ARGS) { *(u64*)(out + (ok ? 0 : 1)) = in[0]; }
K(misaligned, 32, 0);
__global__ void k_uninit_shared(ARGS) {
  __shared__ u32 s[128];
  int t = threadIdx.x;
  if (ok || t != 5) s[t] = in[t];
  __syncthreads();
  out[t] = s[127 - t] * 3;
}
K(uninit_shared, 128, 0);
__global__ void k_uninit_global(ARGS) {
  int t = threadIdx.x;
  out[t] = (ok ? in[t] : out[t]) + 1;
}
K(uninit_global, 128, 0);
__global__ void k_deadlock_bar(ARGS) {
  int t = threadIdx.x;
  if (ok || t < 96)
    asm volatile("bar.sync 1, 128;" ::: "memory");
  else
    asm volatile("bar.sync 2, 64;" ::: "memory");
  out[t] = t;
}
K(deadlock_bar, 128, 0);
__global__ void k_deadlock_mbar(ARGS) {
  __shared__ u64 b;
  int t = threadIdx.x;
  if (t == 0) mb_init(&b, 2);
  __syncthreads();
  if (t == 0) {
    mb_arrive(&b);
    if (ok) mb_arrive(&b);
  }
  mb_wait(&b, 0);
  out[t] = t;
}
K(deadlock_mbar, 128, 0);
__global__ void k_deadlock_bytes(ARGS) {
  __shared__ u64 b;
  __shared__ __align__(16) u32 s[128];
  int t = threadIdx.x;
  if (t == 0) {
    mb_init(&b, 1);
    mb_expect(&b, ok ? 512 : 528);
    bulk_load(s, in, 512, &b);
  }
  __syncthreads();
  mb_wait(&b, 0);
  out[t] = s[t];
}
K(deadlock_bytes, 128, 0);
__global__ void k_deadlock_global(ARGS) {
  u32 v = 0;
  if (threadIdx.x == 0) {
    if (ok) atomicExch(&out[0], 1);
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(out));
    } while (v == 0);
  }
  __syncthreads();
  out[1] = 2;
}
K(deadlock_global, 64, 0);
__global__ void k_over_arrive(ARGS) {
  __shared__ u64 b;
  int t = threadIdx.x;
  if (t == 0) {
    mb_init(&b, 2);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(sm(&b)), "r"(ok ? 1 : 3) : "memory");
  }
  out[t] = t;
}
K(over_arrive, 32, 0);
__global__ void k_no_mbar_init(ARGS) {
  __shared__ u64 b;
  int t = threadIdx.x;
  if (t == 0) {
    if (ok) mb_init(&b, 1);
    mb_arrive(&b);
  }
  out[t] = t;
}
K(no_mbar_init, 32, 0);
__global__ void k_missing_mbar_wait(ARGS) {
  __shared__ u64 b;
  __shared__ __align__(16) u32 s[128];
  int t = threadIdx.x;
  if (t == 0) {
    mb_init(&b, 1);
    mb_expect(&b, 512);
    bulk_load(s, in, 512, &b);
  }
  __syncthreads();
  if (ok) mb_wait(&b, 0);
  out[t] = s[t];
}
K(missing_mbar_wait, 128, 0);
// a second copy into the buffer while the other warps may still be reading it
__global__ void k_early_reuse(ARGS) {
  __shared__ u64 b, c;
  __shared__ __align__(16) u32 s[128];
  int t = threadIdx.x;
  if (t == 0) {
    mb_init(&b, 1);
    mb_init(&c, 1);
  }
  __syncthreads();
  if (t == 0) {
    mb_expect(&b, 512);
    bulk_load(s, in, 512, &b);
  }
  mb_wait(&b, 0);
  u32 v = s[127 - t];
  if (ok) __syncthreads();
  if (t == 0) {
    mb_expect(&c, 512);
    bulk_load(s, in + 128, 512, &c);
  }
  mb_wait(&c, 0);
  out[t] = v + s[t];
}
K(early_reuse, 128, 0);
// Two warps take steps in turns, from an odd number of buffers: a warp that has not seen a buffer's first phase takes
// the barrier for one that has completed the phase before the second.
__global__ void k_missed_phase(ARGS) {
  __shared__ u64 full[3], empty[3];
  __shared__ __align__(16) u32 s[3][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < 3) {
    mb_init(full + threadIdx.x, 1);
    mb_init(empty + threadIdx.x, ok ? 2 : 1);
  }
  __syncthreads();
  for (int step = 0; step < 8; ++step) {
    const int at = step % 3;
    const u32 phase = step / 3 & 1;
    if (warp == 0) {
      if (lane > 0) continue;
      if (step >= 3) mb_wait(empty + at, phase ^ 1);
      mb_expect(full + at, 128);
      bulk_load(s[at], in + 32 * step, 128, full + at);
    } else if (ok || step % 2 == warp - 1) {
      mb_wait(full + at, phase);
      if (step % 2 == warp - 1 && lane < 16) out[16 * step + lane] = s[at][lane];
      __syncwarp();
      if (lane == 0) mb_arrive(empty + at);
    }
  }
}
K(missed_phase, 96, 0);
__global__ void k_missing_proxy_fence(ARGS) {
  __shared__ __align__(16) u32 s[128];
  int t = threadIdx.x;
  s[t] = in[t];
  if (ok) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" ::"l"(out), "r"(sm(s)) : "memory");
    asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
K(missing_proxy_fence, 128, 0);
__global__ void k_missing_store_wait(ARGS) {
  __shared__ __align__(16) u32 s[128];
  int t = threadIdx.x;
  s[t] = in[t];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" ::"l"(out), "r"(sm(s)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (ok) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  __syncthreads();
  s[t] = 7;
}
K(missing_store_wait, 128, 0);
__device__ u64 desc(const void* p) { return (u64)((sm(p) & 0x3ffff) >> 4) | (u64)8 << 16 | (u64)16 << 32; }
template <int DEFECT>
__device__ void wg(u32* in, u32* out) {
  __shared__ __align__(128) u32 a[512], b[64];
  int t = threadIdx.x;
  for (int i = t; i < 512; i += 128) a[i] = in[i & 127];
  if (t < 64) b[t] = in[t];
  int d[4] = {t, t, t, t};
  if (DEFECT == 1) asm volatile("wgmma.fence.sync.aligned;\n add.s32 %0, %0, 5;" : "+r"(d[0]));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (DEFECT != 1) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  if (DEFECT == 2) {  // accumulators read before the wait
    int r;
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0,%1,%2,%3}, %4, %5, 1;\n wgmma.commit_group.sync.aligned;\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "l"(desc(a)), "l"(desc(b)));
    asm volatile("add.s32 %0, %1, 1;" : "=r"(r) : "r"(d[0]));
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    out[t] = r;
  } else if (DEFECT == 3) {  // operand overwritten before the wait
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0,%1,%2,%3}, %4, %5, 1;\n wgmma.commit_group.sync.aligned;\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "l"(desc(a)), "l"(desc(b)));
    a[t] = 0;
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+r"(d[0])::"memory");
    out[t] = d[0];
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0,%1,%2,%3}, %4, %5, 1;\n wgmma.commit_group.sync.aligned;\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "l"(desc(a)), "l"(desc(b)));
    if (DEFECT != 4) asm volatile("wgmma.wait_group.sync.aligned 0;" : "+r"(d[0])::"memory");
    if (DEFECT != 4) out[t] = d[0];
  }
}
#define W(name, D)                 \
  __global__ void k_##name(ARGS) { \
    if (ok)                        \
      wg<0>(in, out);              \
    else                           \
      wg<D>(in, out);              \
  }                                \
  K(name, 128, 0)
W(wgmma_no_fence, 1);
W(wgmma_early_read, 2);
W(wgmma_early_overwrite, 3);
W(wgmma_no_wait, 4);
__global__ void k_assert_fail(ARGS) {
  assert(ok || threadIdx.x < 40);
  out[threadIdx.x] = 1;
}
K(assert_fail, 64, 0);
__global__ void k_trap(ARGS) {
  if (!ok && threadIdx.x == 3) __trap();
  out[threadIdx.x] = 1;
}
K(trap, 32, 0);
__global__ void k_diverged_shfl(ARGS) {
  int t = threadIdx.x;
  u32 v = in[t];
  if (ok)
    v = __shfl_sync(~0u, v, 0);
  else if (t < 16)
    v = __shfl_sync(~0u, v, 0);
  else {
    v += 1;
    asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
  }
  out[t] = v;
}
K(diverged_shfl, 32, 0);
__global__ void k_unsupported(ARGS) {
  u32 d[4] = {0, 0, 0, 0};
  if (!ok)
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, "
        "{%4,%4,%4,%4}, {%0,%1,%2,%3}, %4, 0x0;"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(in[0]));
  out[threadIdx.x] = d[0];
}
K(unsupported, 32, 0);
__global__ void k_dynamic_limit(ARGS) {
  __shared__ u32 s[10240];
  extern __shared__ u32 d[];
  int t = threadIdx.x;
  s[t * 80 + n] = in[t];
  __syncwarp();
  d[t] = s[(31 - t) * 80 + n];
  out[t] = d[t];
}  // 40 KiB static: 8 KiB more without an attribute
C int dynamic_limit(u32* in, u32* out, int n, int ok) {
  k_dynamic_limit<<<1, 32, ok ? 8192 : 8704>>>(in, out, n, ok);
  return done();
}
__global__ void __launch_bounds__(384, 1) k_register_pool(ARGS) {  // 168 registers a thread at launch
  if (threadIdx.x >= 128)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  else if (ok)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
  if (threadIdx.x < 128) out[threadIdx.x] = threadIdx.x;
}
K(register_pool, 384, 0);
__global__ void __launch_bounds__(128, 3) k_register_take(ARGS) {  // 168 a thread
  asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
  if (ok)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
  else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 40;");
  out[threadIdx.x] = threadIdx.x;
}
K(register_take, 128, 0);
__global__ void __launch_bounds__(64) k_launch_bounds(ARGS) { out[threadIdx.x] = 1; }
C int launch_bounds(u32* in, u32* out, int n, int ok) {
  k_launch_bounds<<<1, ok ? 64 : 128>>>(in, out, n, ok);
  return done();
}
