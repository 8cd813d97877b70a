"""Physical floors: what the machine can move and multiply, measured, and the least time a shape can take.

A figure without its floor says little: 3x faster than a slow peer may still be a fifth of what the machine can do.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.measure.gpu_timing import CudaEventClock
from pyquant.measure.timing import Clock, default_clock, make_clock, time_interleaved
from pyquant.ops.load import native_available, why_not_native
from pyquant.report.records.bench import Ceiling

Maker = Callable[[int, torch.device], Callable[[], object]]  # of a square product
COPY = "copy"  # a GPU's memory
READ = "read"  # a CPU's main memory
_MEMORY = 256 << 20  # bytes that no cache holds
_SMALL, _LONGEST_S = 256, 2.0  # edge of a product that is tried first; of a product that is timed
# Operands of the inner loop, as (rows, K / 4): one tile of AVX-512 registers over a long K, one of AMX, many rows.
_INNER = ((6, 1024), (6, 256), (32, 256), (48, 64))
_INNER_PRODUCTS = 1 << 28  # a call: a quarter of a millisecond and more, so that setting the operands up is lost
_HUGE_PAGE = 2 << 20  # bytes
_FEWEST_READS = 4  # a call, of a set that is read again and again: a part of a large one stays in the caches
_READ_A_CALL = 4 << 20  # bytes, so that small sets are not lost in the cost of the call


@dataclass(frozen=True)
class Floor:
    """The least time of a GEMM on a machine, in microseconds, and what binds: 'bytes' or 'ops'."""

    us: float
    kind: str


@dataclass(frozen=True)
class Limit:
    """Something that a CPU cannot do faster, to be timed beside what is held against it: the speed of a shared machine
    moves, so that a limit of a minute ago says little.

    run     one call of it.   amount  bytes that a call reads, or pairs that it multiplies and adds.
    """

    run: Callable[[], object]
    amount: int


def gemm_bytes(m: int, k: int, n: int, *, w_bits: float, x_bits: int, out_bits: int, group_size: int = 0) -> int:
    """Bytes that any kernel has to move: weights, their scales, input, output (each once)."""
    scales = n * (k // group_size if group_size else 1) * 4
    return int(n * k * w_bits / 8 + scales + m * k * x_bits / 8 + m * n * out_bits / 8)


def gemm_floor(m: int, k: int, n: int, *, moved_bytes: int, gbps: float, gops: float) -> Floor:
    """max(bytes / bandwidth, 2 m k n / peak).

    gbps  bandwidth in GB/s (read-only on a CPU; a copy, counting bytes read and written, on a GPU).
    gops  peak in 1e9 operations a second, a multiply-add counting as two.
    Raises ArgumentError when a limit is not positive.
    """
    if gbps <= 0 or gops <= 0:
        raise ArgumentError("gbps, gops", (gbps, gops), "both > 0")
    by_bytes, by_ops = moved_bytes / gbps * 1e-3, 2.0 * m * k * n / gops * 1e-3
    return Floor(by_bytes, "bytes") if by_bytes >= by_ops else Floor(by_ops, "ops")


def measure_ceilings(device: str | torch.device = "cpu", *, size: int | None = None, rounds: int = 5) -> list[Ceiling]:
    """Measured bandwidths and multiplication peaks of `device`, with the threads that torch uses now (default_clock).

    size   edge of the square matmul (default 2048 on a CPU, 8192 on a GPU). Inputs are random: chips clock down on
           random data, and zeros would flatter the peak.
    ->     On a CPU 'read' (main memory, a stream that only reads) [GB/s] and 'int8' [Gop/s], the inner loop of our own
           kernels on operands in the caches: nothing multiplies faster. On a GPU 'copy', 'fp16' and 'fp8' of torch, and
           'int8' of torch or of our own kernel, whichever is faster there: torch's reaches two thirds of it on an H200.
           'fp32' and 'bf16': torch.mm. A type that nothing here can multiply is left out, and so is one whose product
           would take a CPU more than two seconds: torch multiplies bf16 one by one where the processor cannot.
    """
    device = torch.device(device)
    if device.type == "cuda":  # weights rotate beyond the caches, so only main memory matters
        copy = Limit(_copy(1 << 30, device), 2 << 30)
        return _measured({COPY: copy}, device, size or 8192, CudaEventClock(), rounds)
    used = make_clock(default_clock(torch.get_num_threads()))
    multiply = multiply_limit(used, rounds)
    timings = time_interleaved({"int8": multiply.run}, clock=used, rounds=4 * rounds)
    return [
        *_measured({READ: read_limit(_MEMORY)}, device, size or 2048, used, rounds),
        Ceiling("int8", 2.0 * multiply.amount / min(timings.samples["int8"]) * 1e-9, "Gop/s"),
    ]


def _measured(
    streams: Mapping[str, Limit], device: torch.device, size: int, clock: Clock, rounds: int
) -> list[Ceiling]:
    """Streams in GB/s, and what can be multiplied here in Gop/s: the best sample, as a ceiling is what can be done."""
    makers = {(name, i): make for name, ways in _matmuls(device).items() for i, make in enumerate(ways)}
    products = {key: run for key, make in makers.items() if (run := _runs(make, size, device)) is not None}
    work = {name: stream.run for name, stream in streams.items()}
    work |= {f"{name} {i}": run for (name, i), run in products.items()}
    timings = time_interleaved(work, clock=clock, rounds=rounds, warm_calls=2)
    best = {name: min(samples) for name, samples in timings.samples.items()}
    moved = [Ceiling(name, stream.amount / best[name] * 1e-9, "GB/s") for name, stream in streams.items()]
    quickest = {name: min(best[f"{n} {i}"] for n, i in products if n == name) for name, _ in products}
    return moved + [Ceiling(name, 2.0 * size**3 / seconds * 1e-9, "Gop/s") for name, seconds in quickest.items()]


def read_limit(size_bytes: int, *, cold: bool = False) -> Limit:
    """A stream that only reads a working set of `size_bytes` bytes, with the threads that torch uses, from pages as
    large as those of packed weights.

    cold  a call reads it once, for callers that flush the caches; otherwise so often that the call itself is lost.
    Raises UnsupportedError without the native libraries.
    """
    _need_native()
    source = _on_huge_pages(max(1, size_bytes // 4)).fill_(1)
    times = 1 if cold else max(_FEWEST_READS, _READ_A_CALL // size_bytes)
    return Limit(lambda: torch.ops.pyquant._cpu_read(source, times), times * size_bytes)


def _on_huge_pages(count: int) -> torch.Tensor:
    """float32 [count], on pages of 2 MiB where the system has them to give: packed weights ask for them too
    (csrc/cpu/threads.h), and from small ones memory came a third slower, so that layers passed their own limit."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=torch.float32, device="cpu")
    memory = mmap.mmap(-1, 4 * count + _HUGE_PAGE)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    spare = torch.frombuffer(memory, dtype=torch.float32)
    first = -spare.data_ptr() % _HUGE_PAGE // 4
    return spare[first : first + count]


def multiply_limit(clock: Clock, rounds: int = 5) -> Limit:
    """The inner loop of the CPU's kernels on operands that stay in the caches: those that are fastest on this machine.

    Raises UnsupportedError without the native libraries.
    """
    _need_native()
    multiply = torch.ops.pyquant._cpu_multiply
    calls = {shape: max(1, _INNER_PRODUCTS // (shape[0] * shape[1] * 256)) for shape in _INNER}
    runs = {f"{rows} rows": partial(multiply, rows, quads, calls[rows, quads]) for rows, quads in _INNER}
    timings = time_interleaved(runs, clock=clock, rounds=4 * rounds, warm_calls=2)
    limits = {name: Limit(run, run()) for name, run in runs.items()}
    return limits[max(limits, key=lambda name: limits[name].amount / min(timings.samples[name]))]


def _need_native() -> None:
    if not native_available():
        raise UnsupportedError("the machine's limits are those of the compiled kernels", [str(why_not_native())])


def ceiling_value(ceilings: Sequence[Ceiling], name: str) -> float | None:
    """The value of the ceiling called `name`, None where it was not measured."""
    return next((c.value for c in ceilings if c.name == name), None)


def _copy(size_bytes: int, device: torch.device) -> Callable[[], object]:
    source = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _matmuls(device: torch.device) -> dict[str, tuple[Maker, ...]]:
    """The ways to multiply each type; those that do not run here are left out."""
    makers: dict[str, tuple[Maker, ...]] = {
        "fp32": (partial(_float_mm, torch.float32),),
        "bf16": (partial(_float_mm, torch.bfloat16),),
    }
    if device.type == "cuda":
        makers |= {"int8": (_int8_mm, _our_int8), "fp16": (partial(_float_mm, torch.float16),), "fp8": (_fp8_mm,)}
    return makers


def _runs(make: Maker, size: int, device: torch.device) -> Callable[[], object] | None:
    if device.type == "cpu" and _predicted_s(make, size, device) > _LONGEST_S:
        return None
    try:
        run = make(size, device)
        with torch.inference_mode():
            run()
    except (RuntimeError, AttributeError, NotImplementedError):  # torch of this machine has no such matmul
        return None
    return run


def _predicted_s(make: Maker, size: int, device: torch.device) -> float:
    """Seconds of a product, by those of a small one."""
    small = min(size, _SMALL)
    try:
        run = make(small, device)
        with torch.inference_mode():
            run()
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) * (size / small) ** 3
    except (RuntimeError, AttributeError, NotImplementedError):
        return 0.0  # the caller finds out


def _float_mm(dtype: torch.dtype, size: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    return lambda: torch.mm(a, b)


def _int8_mm(size: int, device: torch.device) -> Callable[[], object]:
    a, b = (random_codes((size, size), device) for _ in range(2))
    return lambda: torch._int_mm(a, b.t())


def _our_int8(size: int, device: torch.device) -> Callable[[], object]:
    if not native_available():
        raise NotImplementedError("no compiled kernel")
    a, b = (random_codes((size, size), device) for _ in range(2))
    scale = torch.ones(size, dtype=torch.float32, device=device)
    return lambda: torch.ops.pyquant.gemm_s8s8(a, b, scale, out_dtype=torch.bfloat16)


def _fp8_mm(size: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device=device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def random_codes(shape: tuple[int, ...], device: torch.device | str = "cpu", qmax: int = 127) -> torch.Tensor:
    """Realistic int8 codes: rounded Gaussian that fills [-qmax, qmax]. Zeros or tiny integers flatter every chip."""
    return (
        (torch.randn(shape, dtype=torch.float32, device=device) * (qmax / 3))
        .round_()
        .clamp_(-qmax, qmax)
        .to(torch.int8)
    )
