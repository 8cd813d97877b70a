// How the decode kernels move bytes: loads past L1, copies into shared memory, reads of another block's shared memory.
#pragma once
#include <cstdint>
#include <cstring>

namespace pyquant::cuda {

// A 16-byte load of data that is read once (no allocation in L1); what is not there leaves `v` as it was. kAhead: bytes
// that L2 is asked to fetch where it misses, 256 or (0) as many as it does by itself.
template <int kAhead>
__device__ __forceinline__ void load_streamed(uint4& v, const void* from, bool there) {
  static_assert(kAhead == 0 || kAhead == 256, "");
#define PYQUANT_LOAD(HINT)                         \
  asm volatile(                                    \
      "{\n"                                        \
      ".reg .pred there;\n"                        \
      "setp.ne.b32 there, %5, 0;\n"                \
      "@there ld.global.nc.L1::no_allocate" HINT   \
      ".v4.u32 {%0, %1, %2, %3}, [%4];\n"          \
      "}\n"                                        \
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) \
      : "l"(from), "r"(static_cast<int32_t>(there)))
  if constexpr (kAhead == 256)
    PYQUANT_LOAD(".L2::256B");
  else
    PYQUANT_LOAD("");
#undef PYQUANT_LOAD
}

// Keeps the compiler from unpacking codes ahead of the loop that uses them: there are not enough registers.
__device__ __forceinline__ void keep_packed(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

// To the next row. One addition at a time: the compiler would keep every multiple of the stride in registers.
__device__ __forceinline__ void advance(const uint8_t*& row, int64_t bytes) {
  row += bytes;
  asm volatile("" : "+l"(row));
}

__device__ __forceinline__ void prefetch_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// 16 bytes into shared memory, or zeros; then `from` is not looked at.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most kPending of this thread's groups of copies are on their way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// sm_90: clusters. Not `.aligned`: lanes come here from loops of different lengths.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Neighbouring words, moved as one.
template <class Word>
struct alignas(8) Two {
  static_assert(sizeof(Word) == 4, "one register each");
  Word a, b;
};

template <class Word>
__device__ __forceinline__ Two<Word> two_of(uint32_t a, uint32_t b) {
  Two<Word> two;
  memcpy(&two.a, &a, 4);
  memcpy(&two.b, &b, 4);
  return two;
}

// Past L1, which may hold what was there before another block wrote.
template <class Word>
__device__ __forceinline__ Two<Word> load_uncached(const Word* from) {
  const uint2 v = __ldcg(reinterpret_cast<const uint2*>(from));
  return two_of<Word>(v.x, v.y);
}

// What lies at the address `mine` in the shared memory of block `rank` of the cluster, or zeros.
template <class Word>
__device__ __forceinline__ Two<Word> load_of_block(const Word* mine, uint32_t rank, bool there) {
  uint32_t a, b;
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      ".reg .u32 at;\n"
      "setp.ne.b32 there, %4, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "@there mapa.shared::cluster.u32 at, %2, %3;\n"
      "@there ld.shared::cluster.v2.u32 {%0, %1}, [at];\n"
      "}\n"
      : "=&r"(a), "=&r"(b)
      : "r"(shared_address(mine)), "r"(rank), "r"(static_cast<int32_t>(there))
      : "memory");
  return two_of<Word>(a, b);
}

}  // namespace pyquant::cuda
