// Instructions of quantised GEMMs beyond those of instr.cu; test_quant.py holds the references.
#include <cuda.h>
#include <cuda_runtime.h>
#include "common.h"

// ---- packed arithmetic ----
OP32(max_u16x2, "max.u16x2 %0, %1, %2;");
OP32(max_s16x2, "max.s16x2 %0, %1, %2;");
OP32(min_u16x2, "min.u16x2 %0, %1, %2;");
OP32(min_s16x2, "min.s16x2 %0, %1, %2;");
OP32(max_s16x2_relu, "max.s16x2.relu %0, %1, %2;");
OP32(min_s16x2_relu, "min.relu.s16x2 %0, %1, %2;");
OP32(max_s32_relu, "max.relu.s32 %0, %1, %2;");
OP32(add_s16x2, "add.s16x2 %0, %1, %2;");
OP32(max_f16x2, "max.f16x2 %0, %1, %2;");
OP32(max_nan_f16x2, "max.NaN.f16x2 %0, %1, %2;");
OP32(min_f16x2, "min.f16x2 %0, %1, %2;");
OP32(min_nan_f16x2, "min.NaN.f16x2 %0, %1, %2;");
OP32(max_bf16x2, "max.bf16x2 %0, %1, %2;");
OP32(max_nan_bf16x2, "max.NaN.bf16x2 %0, %1, %2;");
OP32(min_bf16x2, "min.bf16x2 %0, %1, %2;");
OP32(min_nan_bf16x2, "min.NaN.bf16x2 %0, %1, %2;");
OP32(max_xs_f16x2, "max.xorsign.abs.f16x2 %0, %1, %2;");
OP32(max_xs_bf16x2, "max.xorsign.abs.bf16x2 %0, %1, %2;");
OP32(min_nan_xs_bf16x2, "min.NaN.xorsign.abs.bf16x2 %0, %1, %2;");
OP32(max_xs_f32, "{.reg .f32 x, y, z; mov.b32 x, %1; mov.b32 y, %2; max.xorsign.abs.f32 z, x, y; mov.b32 %0, z;}");
OP32(add_f16x2, "add.rn.f16x2 %0, %1, %2;");
OP32(sub_f16x2, "sub.rn.f16x2 %0, %1, %2;");
OP32(mul_f16x2, "mul.rn.f16x2 %0, %1, %2;");
OP32(add_sat_f16x2, "add.sat.f16x2 %0, %1, %2;");
OP32(mul_ftz_f16x2, "mul.rn.ftz.f16x2 %0, %1, %2;");
OP32(add_bf16x2, "add.rn.bf16x2 %0, %1, %2;");
OP32(sub_bf16x2, "sub.rn.bf16x2 %0, %1, %2;");
OP32(mul_bf16x2, "mul.rn.bf16x2 %0, %1, %2;");
OP32(mul_bf16x2_plain, "mul.bf16x2 %0, %1, %2;");
OP32(fma_sat_f16x2, "fma.rn.sat.f16x2 %0, %1, %2, %3;");
OP32(fma_relu_f16x2, "fma.rn.relu.f16x2 %0, %1, %2, %3;");
OP32(fma_ftz_f16x2, "fma.rn.ftz.f16x2 %0, %1, %2, %3;");
OP32(fma_bf16x2, "fma.rn.bf16x2 %0, %1, %2, %3;");
OP32(fma_relu_bf16x2, "fma.rn.relu.bf16x2 %0, %1, %2, %3;");
OP32(v_absdiff4, "vabsdiff4.u32.u32.u32 %0, %1, %2, %3;");
OP32(v_absdiff4_add, "vabsdiff4.u32.s32.s32.add %0, %1, %2, %3;");
OP32(v_add4_sat, "vadd4.s32.s32.s32.sat %0, %1, %2, %3;");
OP32(v_sub2, "vsub2.u32.u32.u32 %0, %1, %2, %3;");
OP32(v_max2, "vmax2.u32.u32.u32 %0, %1, %2, %3;");
OP32(v_min4, "vmin4.s32.s32.s32 %0, %1, %2, %3;");
OP32(v_avrg4, "vavrg4.u32.u32.u32 %0, %1, %2, %3;");
OP32(v_set4, "vset4.u32.u32.gt %0, %1, %2, %3;");
OP32(x_lop3, "{.reg .pred p, q; setp.lt.s32 q, %3, 0; lop3.or.b32 %0|p, %1, %2, %3, 0x96, q; @p add.u32 %0, %0, 1;}");
OP32(x_lop3_and,
     "{.reg .pred p, q; setp.lt.s32 q, %3, 0; lop3.and.b32 %0|p, %1, %2, %3, 0xc0, !q; @p add.u32 %0, %0, 1;}");
OP32(x_fns, "{.reg .u32 b; and.b32 b, %2, 31; .reg .s32 n; and.b32 n, %3, 7; sub.s32 n, n, 3; fns.b32 %0, %1, b, n;}");
OP32(x_szext_s, "szext.clamp.s32 %0, %1, %2;");
OP32(x_szext_u, "szext.wrap.u32 %0, %1, %2;");
// ---- conversions; sources in 64-bit registers included ----
OP32(cvt_wide_s32,
     "{.reg .b64 t, u; mov.b64 t, {%1, %2}; cvt.s64.s32 u, t; .reg .b32 x; mov.b64 {x, %0}, u; xor.b32 %0, %0, x;}");
OP32(cvt_wide_u32,
     "{.reg .b64 t, u; mov.b64 t, {%1, %2}; cvt.u64.u32 u, t; .reg .b32 x; mov.b64 {x, %0}, u; xor.b32 %0, %0, x;}");
OP32(cvt_wide_s8, "{.reg .b64 t; mov.b64 t, {%1, %2}; cvt.s32.s8 %0, t;}");
OP32(cvt_wide_u16, "{.reg .b64 t; mov.b64 t, {%1, %2}; cvt.u32.u16 %0, t;}");
OP32(cvt_wide_f32, "{.reg .b64 t; .reg .f32 f; mov.b64 t, {%1, %2}; cvt.rn.f32.s32 f, t; mov.b32 %0, f;}");
OP32(cvt_bf16_up, "{.reg .b16 t; .reg .f32 f; cvt.u16.u32 t, %1; cvt.f32.bf16 f, t; mov.b32 %0, f;}");
OP32(cvt_bf16_dn, "{.reg .b16 t; .reg .f32 f; mov.b32 f, %1; cvt.rn.bf16.f32 t, f; cvt.u32.u16 %0, t;}");
OP32(cvt_bf16_s32, "{.reg .b16 t; cvt.rn.bf16.s32 t, %1; cvt.u32.u16 %0, t;}");
OP32(cvt_s32_bf16, "{.reg .b16 t; cvt.u16.u32 t, %1; cvt.rni.s32.bf16 %0, t;}");
OP32(cvt_bf16x2_relu, "{.reg .f32 f, g; mov.b32 f, %1; mov.b32 g, %2; cvt.rn.relu.bf16x2.f32 %0, f, g;}");
OP32(cvt_bf16x2_rz, "{.reg .f32 f, g; mov.b32 f, %1; mov.b32 g, %2; cvt.rz.bf16x2.f32 %0, f, g;}");
// fp8 -> f16x2 -> fp8 is the identity on every code but NaN; so is fp8 -> f16x2 -> f32 -> fp8
OP32(cvt_e4m3_round,
     "{.reg .b16 t, h, l; .reg .b32 x; .reg .f32 f, g; cvt.u16.u32 t, %1; cvt.rn.f16x2.e4m3x2 x, t; mov.b32 {l, h}, x; "
     "cvt.f32.f16 f, h; cvt.f32.f16 g, l; cvt.rn.satfinite.e4m3x2.f32 t, f, g; cvt.u32.u16 %0, t;}");
OP32(cvt_e5m2_round,
     "{.reg .b16 t; .reg .b32 x; cvt.u16.u32 t, %1; cvt.rn.f16x2.e5m2x2 x, t; cvt.rn.satfinite.e5m2x2.f16x2 t, x; "
     "cvt.u32.u16 %0, t;}");

// ---- movmatrix, every form of stmatrix ----
__global__ void k_movmatrix(const u32* in, u32* out) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(in[threadIdx.x]));
  out[threadIdx.x] = r;
}
C int movmatrix(const u32* in, u32* out) {
  k_movmatrix<<<1, 32>>>(in, out);
  return done();
}
template <int N, int T>
__global__ void k_stm(const u32* in, u16* out) {
  __shared__ __align__(16) u16 s[256];
  int l = threadIdx.x;
  for (int i = l; i < 256; i += 32) s[i] = 0;
  u32 r[4];
  for (int i = 0; i < 4; ++i) r[i] = in[i * 32 + l];
  __syncthreads();
  u32 a = (u32)__cvta_generic_to_shared(&s[l * 8]);
  u64 g = (u64)&s[l * 8];
  if (N == 1 && !T) asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(a), "r"(r[0]) : "memory");
  if (N == 1 && T)
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared::cta.b16 [%0], {%1};" ::"r"(a), "r"(r[0]) : "memory");
  if (N == 2 && !T)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.b16 [%0], {%1, %2};" ::"l"(g), "r"(r[0]), "r"(r[1]) : "memory");
  if (N == 2 && T)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(r[0]), "r"(r[1])
                 : "memory");
  if (N == 4 && !T)
    asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
  if (N == 4 && T)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.b16 [%0], {%1, %2, %3, %4};" ::"l"(g), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
  __syncthreads();
  for (int i = l; i < 256; i += 32) out[i] = s[i];
}
C int stmatrices(int n, int t, const u32* in, u16* out) {
  auto go = [&](auto k) {
    k<<<1, 32>>>(in, out);
    return done();
  };
  return n == 1   ? (t ? go(k_stm<1, 1>) : go(k_stm<1, 0>))
         : n == 2 ? (t ? go(k_stm<2, 1>) : go(k_stm<2, 0>))
         : t      ? go(k_stm<4, 1>)
                  : go(k_stm<4, 0>);
}

// ---- further mma.sync shapes: registers in, registers out ----
MMA(mma_u8, I424("m16n8k32.row.col.s32.u8.u8.s32"), 4, 2, 4);
MMA(mma_s8u8, I424("m16n8k32.row.col.s32.s8.u8.s32"), 4, 2, 4);
MMA(mma_u8_k16, I214("m16n8k16.row.col.s32.u8.s8.s32"), 2, 1, 4);
MMA(mma_s4u4, I424("m16n8k64.row.col.s32.s4.u4.s32"), 4, 2, 4);
MMA(mma_u4s4_k32, I214("m16n8k32.row.col.s32.u4.s4.s32"), 2, 1, 4);
MMA(mma_s4_m8, I112("m8n8k32.row.col.s32.s4.s4.s32"), 1, 1, 2);
MMA(mma_bf16_k8, F214("m16n8k8.row.col.f32.bf16.bf16.f32"), 2, 1, 4);
MMA(mma_f16_k8_acc16, H212("m16n8k8.row.col.f16.f16.f16.f16"), 2, 1, 2);
MMA(mma_e4m3_acc16, H422("m16n8k32.row.col.f16.e4m3.e4m3.f16"), 4, 2, 2);
MMA(mma_e4m3e5m2, F424("m16n8k32.row.col.f32.e4m3.e5m2.f32"), 4, 2, 4);
MMA(mma_e5m2_acc16, H422("m16n8k32.row.col.f16.e5m2.e5m2.f16"), 4, 2, 2);
MMA(mma_tf32_k4, F214("m16n8k4.row.col.f32.tf32.tf32.f32"), 2, 1, 4);

// ---- warp ----
__global__ void k_warp2(const u32* in, u32* out) {
  u32 l = threadIdx.x, v = in[l], r, p;
  u32* o = out + l;
  int k = 0;
  auto put = [&](u32 x) { o[32 * k++] = x; };
  put(__reduce_and_sync(~0u, v));
  put(__reduce_or_sync(~0u, v));
  put(__reduce_min_sync(~0u, v));
  put((u32)__reduce_max_sync(~0u, (int)v));
  put(__match_any_sync(~0u, (unsigned long long)(v & 1) << 40));
  put(__uni_sync(~0u, v < 5));
  put(__any_sync(~0u, v == in[9]));
  if (l >= 8) {
    asm volatile("{.reg .pred q; elect.sync %0|q, 0xffffff00; selp.u32 %1, 1, 0, q;}" : "=r"(r), "=r"(p));
    put(r);
    put(p);
    r = __reduce_add_sync(0xffffff00u, l);
    put(r);
  } else {
    put(0);
    put(0);
    put(0);
  }
  u64 c0 = clock64(), t0, t1;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t0));
  __nanosleep(50);
  asm volatile("nanosleep.u32 20;");
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t1));
  u64 c1 = clock64();
  put(c1 > c0);
  put(t1 > t0);
}
C int warp2(const u32* in, u32* out) {
  k_warp2<<<1, 32>>>(in, out);
  return done();
}

// ---- loads and stores with cache hints ----
__global__ void k_hints(const uint4* a, uint4* o) {
  int t = threadIdx.x;
  uint4 v, x;
  u64 pol, pol2;
  float f = 0.5f;
  const uint4* p = a + t;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(pol));
  asm volatile("createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 %0, %1;" : "=l"(pol2) : "f"(f));
  asm volatile(
      "prefetch.global.L2 [%0]; prefetch.global.L2::evict_last [%0]; prefetchu.L1 [%0]; "
      "applypriority.global.L2::evict_normal [%0], 128; cp.async.bulk.prefetch.L2.global [%1], 64;" ::"l"(p),
      "l"(a)
      : "memory");
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], 64, %1;" ::"l"(a), "l"(pol) : "memory");
  asm volatile("ld.global.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  v.x += x.x;
  v.y += x.y;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.v4.b32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p), "l"(pol));
  v.z += x.z;
  asm volatile("ld.relaxed.gpu.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p));
  v.w += x.y;
  asm volatile("ld.acquire.gpu.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(x.x) : "l"(p), "l"(pol2));
  v.w += x.x;
  asm volatile("st.global.L1::no_allocate.L2::cache_hint.v4.b32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(o + t), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w), "l"(pol)
               : "memory");
}
C int hints(const void* a, void* o) {
  k_hints<<<1, 64>>>((const uint4*)a, (uint4*)o);
  return done();
}

// ---- reductions: packed, vector, scoped; every thread adds the same values ----
__global__ void k_reds(u32* b2, u32* h2, float* f4, u32* bv, u32* hm, u32* u, u32* old) {
  int t = threadIdx.x;
  u64 pol;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(pol));
  asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(b2), "r"(0x3f804000u) : "memory");              // {2, 1}
  asm volatile("red.release.gpu.global.add.noftz.bf16x2 [%0], %1;" ::"l"(b2), "r"(0x3f803f80u) : "memory");  // {1, 1}
  asm volatile("red.relaxed.gpu.global.add.noftz.f16x2 [%0], %1;" ::"l"(h2), "r"(0x3c004000u) : "memory");
  asm volatile("red.global.v4.f32.add [%0], {%1, %2, %3, %4};" ::"l"(f4), "f"(1.f), "f"(2.f), "f"(.5f), "f"(-1.f)
               : "memory");
  asm volatile("red.global.v4.bf16x2.add.noftz [%0], {%1, %1, %2, %2};" ::"l"(bv), "r"(0x3f803f80u), "r"(0x40003f80u)
               : "memory");
  asm volatile("red.global.v2.f16x2.max.noftz [%0], {%1, %2};" ::"l"(hm),
               "r"(0x3c000000u | (u32)(t < 32 ? 0x4400 : 0x4000)), "r"(0x3c004000u)
               : "memory");
  asm volatile("red.global.add.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(u), "r"(1), "l"(pol) : "memory");
  u32 a, c, d, e;
  asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], 1;" : "=r"(a) : "l"(u + 1) : "memory");
  asm volatile("atom.add.release.gpu.u32 %0, [%1], 1;" : "=r"(c) : "l"(u + 1) : "memory");
  asm volatile("atom.acq_rel.sys.global.max.s32 %0, [%1], %2;" : "=r"(d) : "l"(u + 2), "r"(t) : "memory");
  asm volatile("atom.global.add.noftz.bf16x2 %0, [%1], %2;" : "=r"(e) : "l"(u + 3), "r"(0x3f800000u) : "memory");
  old[t] = a + c * 0 + d * 0 + (e & 0);
}
C int reds(u32* b2, u32* h2, float* f4, u32* bv, u32* hm, u32* u, u32* old) {
  k_reds<<<1, 64>>>(b2, h2, f4, bv, hm, u, old);
  return done();
}

// ---- bulk and tensor copies between global memory, and inside a cluster ----
__device__ u32 sm(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ u32 peer(u32 a, u32 r) {
  u32 x;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(r));
  return x;
}
__device__ void mb_init(u64* b, u32 n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(sm(b)), "r"(n) : "memory");
}
__device__ void mb_expect(u64* b, u32 n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sm(b)), "r"(n) : "memory");
}
__device__ void mb_wait(u64* b, u32 ph) {
  asm volatile(
      "{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra D; bra W; D:}" ::"r"(sm(b)),
      "r"(ph)
      : "memory");
}
__device__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// multicast load of 512 bytes to all four CTAs; st.async and red.async to the next CTA; bulk copy and bulk reductions
// from every CTA into CTA 0
__global__ void __cluster_dims__(4, 1, 1) k_dsmem(const u32* in, u32* out) {
  __shared__ __align__(128) u32 s[128], own[32], got[4][32], sum[32];
  __shared__ __align__(16) u32 next[8];
  __shared__ u64 b[4];
  u32 rank, t = threadIdx.x;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (t == 0) {
    for (int i = 0; i < 4; ++i) mb_init(b + i, 1);
    mb_expect(b, 512);
    mb_expect(b + 1, 32);
    if (rank == 0) {
      mb_expect(b + 2, 4 * 128);
      mb_expect(b + 3, 4 * 128);
    }
  }
  sum[t] = 1000;
  if (t < 8) next[t] = 5;
  own[t] = rank * 100 + t;
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
  cluster_sync();
  if (rank == 1 && t == 0)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 512, [%2], "
        "%3;" ::"r"(sm(s)),
        "l"(in + 128 * (blockIdx.x / 4)), "r"(sm(b)), "h"((u16)15)
        : "memory");
  u32 n = (rank + 1) & 3, nb = peer(sm(b + 1), n), na = peer(sm(next), n);
  if (t == 0)
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(na),
        "r"(rank), "r"(rank + 10), "r"(rank + 20), "r"(rank + 30), "r"(nb)
        : "memory");
  if (t < 4)
    asm volatile(
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];" ::"r"(na + 16),
        "r"(t + 1), "r"(nb)
        : "memory");
  if (t == 0) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];" ::"r"(
                     peer(sm(got[rank]), 0)),
                 "r"(sm(own)), "r"(peer(sm(b + 2), 0))
                 : "memory");
    asm volatile(
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%0], [%1], 128, "
        "[%2];" ::"r"(peer(sm(sum), 0)),
        "r"(sm(own)), "r"(peer(sm(b + 3), 0))
        : "memory");
  }
  mb_wait(b, 0);
  mb_wait(b + 1, 0);
  if (rank == 0) {
    mb_wait(b + 2, 0);
    mb_wait(b + 3, 0);
  }
  u32* o = out + blockIdx.x * 320;
  for (int i = t; i < 128; i += 32) {
    o[i] = s[i];
    o[128 + i] = rank ? 0 : ((u32*)got)[i];
  }
  o[256 + t] = rank ? 0 : sum[t];
  o[288 + t] = t < 8 ? next[t] : 0;
  cluster_sync();
}
C int dsmem(const u32* in, u32* out) {
  k_dsmem<<<8, 32>>>(in, out);
  return done();
}
// tensor reductions of a 2-dimensional tile of ones .. into a tensor; kind 0 add 1 min 2 max 3 inc 4 and 5 xor
__global__ void k_tred(const __grid_constant__ CUtensorMap mo, int x, int y, u32 bytes, const u8* tile, int kind) {
  extern __shared__ __align__(128) u8 s[];
  int t = threadIdx.x;
  for (u32 i = t; i < bytes; i += blockDim.x) s[i] = tile[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (t == 0) {
    u64 m = (u64)&mo, pol;
    asm volatile("prefetch.tensormap [%0]; cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(m),
                 "r"(x), "r"(y)
                 : "memory");
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(pol));
#define TR(k, op)                                                                      \
  if (kind == k)                                                                       \
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta." op               \
                 ".tile.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;" ::"l"(m), \
                 "r"(x), "r"(y), "r"(sm(s)), "l"(pol)                                  \
                 : "memory");
    TR(0, "add");
    TR(1, "min");
    TR(2, "max");
    TR(3, "inc");
    TR(4, "and");
    TR(5, "xor");
    asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
C int tensor_reduce(int dtype, int esize, int kind, void* out, int w, int h, int bw, int bh, int x, int y,
                    const u8* tile) {
  typedef CUresult (*Enc)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                          const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                          CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void* f = nullptr;
  cudaDriverEntryPointQueryResult q;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &q)) return 200;
  cuuint64_t gd[2] = {(u64)w, (u64)h}, st[1] = {(u64)w * esize};
  u32 box[2] = {(u32)bw, (u32)bh}, es[2] = {1, 1};
  CUtensorMap m;
  if (((Enc)f)(&m, (CUtensorMapDataType)dtype, 2, out, gd, st, box, es, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
    return 201;
  k_tred<<<1, 64, bw * bh * esize>>>(m, x, y, bw * bh * esize, tile, kind);
  return done();
}
// bulk reductions of 16-bit floats, and inc
__global__ void k_bulkred(const u32* in, u32* b, u32* h, u32* inc, float* f) {
  __shared__ __align__(128) u32 s[64];
  int t = threadIdx.x;
  s[t] = in[t];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], 64;" ::"l"(b),
                 "r"(sm(s))
                 : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.f16 [%0], [%1], 64;" ::"l"(h), "r"(sm(s + 16))
                 : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.u32 [%0], [%1], 64;" ::"l"(inc),
                 "r"(sm(s + 32))
                 : "memory");
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 64;" ::"l"(f), "r"(sm(s + 48))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\n cp.async.bulk.wait_group.read 0;\n cp.async.bulk.wait_group 0;" ::
                     : "memory");
  }
}
C int bulk_reduce(const u32* in, u32* b, u32* h, u32* inc, float* f) {
  k_bulkred<<<1, 64>>>(in, b, h, inc, f);
  return done();
}
// a warp-specialised shell: setmaxnreg, griddepcontrol
__global__ void __launch_bounds__(256, 1) k_special(u32* out) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x < 128)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
  else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  out[threadIdx.x] = threadIdx.x;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
C int special(u32* out) {
  k_special<<<1, 256>>>(out);
  return done();
}

// ---- a place where test_quant.py puts instructions that are refused ----
#define M4 " mov.b32 z, 305419896; mov.b32 z, 305419896; mov.b32 z, 305419896; mov.b32 z, 305419896;"
#define M16 M4 M4 M4 M4
__global__ void k_refuse(u32* p) {
  asm volatile("{.reg .b32 z;" M16 M16 "}" ::: "memory");
  p[0] = 1;
}
C int refuse(u32* p) {
  k_refuse<<<1, 128>>>(p);
  return done();
}
