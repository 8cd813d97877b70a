"""Writes wgmma_all.cu: wgmma of every N, operand A from shared memory and from registers, no swizzle."""

import sys

TYPES = {  # name: (instruction types, K, accumulator, more operands, of them for A in registers)
    "f16": ("f32.f16.f16", 16, "f32", "1, 1, 0, 0", "1, 1, 0"),
    "bf16": ("f32.bf16.bf16", 16, "f32", "1, 1, 0, 0", "1, 1, 0"),
    "f16acc": ("f16.f16.f16", 16, "f16", "1, 1, 0, 0", "1, 1, 0"),
    "e4m3": ("f32.e4m3.e4m3", 32, "f32", "1, 1", "1, 1"),
    "e5m2": ("f32.e5m2.e5m2", 32, "f32", "1, 1", "1, 1"),
    "s8": ("s32.s8.s8", 32, "s32", "", ""),
}
KERNEL = r"""
__global__ void k_{name}(const u8* A, const u8* B, const u32* start, u32* D) {{
  __shared__ __align__(128) u8 sa[64 * 32], sb[{n} * 32];
  stage(sa, A, 64);
  stage(sb, B, {n});
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  u32 a[4], d[{words}];
  load_a(a, A);
  load(d, start);
  asm volatile("{instruction} {registers}, {a_shared}, {b_shared}, 1{more_shared};{tail}"
      : {outputs}
      : "l"(descriptor(sa)), "l"(descriptor(sb)) : "memory");
  store(D, d);
  load(d, start);
  asm volatile("{instruction} {registers}, {a_registers}, {b_registers}, 1{more_registers};{tail}"
      : {outputs}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(sb)) : "memory");
  store(D + {words} * 128, d);
}}
extern "C" int wg_{name}(const u8* A, const u8* B, const u32* start, u32* D) {{
  k_{name}<<<1, 128>>>(A, B, start, D);
  return done();
}}
"""


def sizes(kind, step):
    """Every step-th N that there is, and the largest."""
    every = [n for n in range(8, 257, 8) if kind != "s8" or n <= 24 or n % 16 == 0]
    return sorted({*every[::step], every[-1]})


def kernel(kind, n):
    types, k, accumulator, more_shared, more_registers = TYPES[kind]
    words = n // (4 if accumulator == "f16" else 2)  # of accumulators in a thread

    def group(first, count):
        return "{" + ",".join(f"%{first + i}" for i in range(count)) + "}"

    def further(operands):
        return ", " + operands if operands else ""

    return KERNEL.format(
        name=f"{kind}_{n}",
        n=n,
        words=words,
        instruction=f"wgmma.fence.sync.aligned;\\n wgmma.mma_async.sync.aligned.m64n{n}k{k}.{types}",
        tail="\\n wgmma.commit_group.sync.aligned;\\n wgmma.wait_group.sync.aligned 0;",
        registers=group(0, words),
        outputs=", ".join(f'"+r"(d[{i}])' for i in range(words)),
        a_shared=f"%{words}",
        b_shared=f"%{words + 1}",
        a_registers=group(words, 4),
        b_registers=f"%{words + 4}",
        more_shared=further(more_shared),
        more_registers=further(more_registers),
    )


def source(step):
    return '#include "wgmma_all.h"\n' + "".join(kernel(kind, n) for kind in TYPES for n in sizes(kind, step))


if __name__ == "__main__":
    with open(sys.argv[1], "w") as f:
        f.write(source(int(sys.argv[2])))
