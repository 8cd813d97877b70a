"""Physical floors: what the machine can move and multiply, measured, and the least time a shape can take.

A figure without its floor says little: 3x faster than a slow peer may still be a fifth of what the machine can do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pyquant.errors import ArgumentError
from pyquant.measure.gpu_timing import CudaEventClock
from pyquant.measure.records import Ceiling
from pyquant.measure.timing import Clock, CpuClock, time_interleaved

COPY = "copy"  # main memory; COPY_SETS are working sets that fit caches
COPY_SETS: Mapping[str, int] = {
    "copy in 256 KiB": 256 << 10,
    "copy in 1 MiB": 1 << 20,
    "copy in 4 MiB": 4 << 20,
    "copy in 16 MiB": 16 << 20,
    "copy in 64 MiB": 64 << 20,
}


@dataclass(frozen=True)
class Floor:
    """The least time of a GEMM on a machine, in microseconds, and what binds: 'bytes' or 'ops'."""

    us: float
    kind: str


def gemm_bytes(m: int, k: int, n: int, *, w_bits: float, x_bits: int, out_bits: int, group_size: int = 0) -> int:
    """Bytes that any kernel has to move: weights, their scales, input, output (each once)."""
    scales = n * (k // group_size if group_size else 1) * 4
    return int(n * k * w_bits / 8 + scales + m * k * x_bits / 8 + m * n * out_bits / 8)


def gemm_floor(m: int, k: int, n: int, *, moved_bytes: int, gbps: float, gops: float) -> Floor:
    """max(bytes / bandwidth, 2 m k n / peak).

    gbps  copy bandwidth in GB/s counting bytes read and written; gops  peak in 1e9 operations a second, a
          multiply-add counting as two.
    Raises ArgumentError when a limit is not positive.
    """
    if gbps <= 0 or gops <= 0:
        raise ArgumentError("gbps, gops", (gbps, gops), "both > 0")
    by_bytes, by_ops = moved_bytes / gbps * 1e-3, 2.0 * m * k * n / gops * 1e-3
    return Floor(by_bytes, "bytes") if by_bytes >= by_ops else Floor(by_ops, "ops")


def measure_ceilings(device: str | torch.device = "cpu", *, size: int | None = None, rounds: int = 5) -> list[Ceiling]:
    """Measured copy bandwidth and matmul peaks of `device`.

    size  edge of the square matmul (default 2048 on a CPU, 8192 on a GPU). Inputs are random: chips clock down on
          random data, and zeros would flatter the peak.
    ->    Ceilings 'copy' (main memory) and, on a CPU, COPY_SETS (working sets that caches hold) [GB/s]; 'fp32', 'bf16',
          'int8' (and on a GPU 'fp16', 'fp8') [Gop/s]; a type that the device's torch cannot multiply is left out.
    """
    device = torch.device(device)
    clock: Clock = CudaEventClock() if device.type == "cuda" else CpuClock()
    size = size or (8192 if device.type == "cuda" else 2048)
    # on a GPU weights rotate beyond the caches, so only main memory matters
    sets = {COPY: 2 << 30} if device.type == "cuda" else {COPY: 256 << 20, **COPY_SETS}
    work = {name: _copy(size_bytes // 2, device) for name, size_bytes in sets.items()} | {
        name: run for name, make in _matmuls(device).items() if (run := _runs(make, size, device)) is not None
    }
    timings = time_interleaved(work, clock=clock, rounds=rounds, warm_calls=2)
    ceilings = []
    for name in work:
        seconds = min(timings.samples[name])  # the best sample: a ceiling is what the machine can do
        if name in sets:
            ceilings.append(Ceiling(name, sets[name] / seconds * 1e-9, "GB/s"))
        else:
            ceilings.append(Ceiling(name, 2.0 * size**3 / seconds * 1e-9, "Gop/s"))
    return ceilings


def ceiling_value(ceilings: Sequence[Ceiling], name: str) -> float | None:
    """The value of the ceiling called `name`, None where it was not measured."""
    return next((c.value for c in ceilings if c.name == name), None)


def copy_gbps(ceilings: Sequence[Ceiling], moved_bytes: int, *, cached: bool) -> float | None:
    """Bandwidth of a working set: with `cached`, of the smallest measured set that holds it; else of main memory."""
    for name, size_bytes in COPY_SETS.items() if cached else ():
        if moved_bytes <= size_bytes and (value := ceiling_value(ceilings, name)) is not None:
            return value
    return ceiling_value(ceilings, COPY)


def _copy(size_bytes: int, device: torch.device) -> Callable[[], object]:
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _matmuls(device: torch.device) -> dict[str, Callable[[int, torch.device], Callable[[], object]]]:
    makers = {"fp32": _float_mm(torch.float32), "bf16": _float_mm(torch.bfloat16), "int8": _int8_mm}
    if device.type == "cuda":
        makers |= {"fp16": _float_mm(torch.float16), "fp8": _fp8_mm}
    return makers


def _runs(
    make: Callable[[int, torch.device], Callable[[], object]], size: int, device: torch.device
) -> Callable[[], object] | None:
    try:
        run = make(size, device)
        with torch.inference_mode():
            run()
    except (RuntimeError, AttributeError, NotImplementedError):  # torch of this machine has no such matmul
        return None
    return run


def _float_mm(dtype: torch.dtype) -> Callable[[int, torch.device], Callable[[], object]]:
    def make(size: int, device: torch.device) -> Callable[[], object]:
        a = torch.randn(size, size, device=device).to(dtype)
        b = torch.randn(size, size, device=device).to(dtype)
        return lambda: torch.mm(a, b)

    return make


def _int8_mm(size: int, device: torch.device) -> Callable[[], object]:
    a = random_codes((size, size), device)
    b = random_codes((size, size), device).t()
    return lambda: torch._int_mm(a, b)


def _fp8_mm(size: int, device: torch.device) -> Callable[[], object]:
    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def random_codes(shape: tuple[int, ...], device: torch.device | str = "cpu", qmax: int = 127) -> torch.Tensor:
    """Realistic int8 codes: rounded Gaussian that fills [-qmax, qmax]. Zeros or tiny integers flatter every chip."""
    return (torch.randn(shape, device=device) * (qmax / 3)).round_().clamp_(-qmax, qmax).to(torch.int8)
