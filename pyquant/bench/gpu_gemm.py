"""The GPU benchmark of one linear layer: builds every candidate once a (K, N), checks it at every M, times all of them
interleaved, and keeps each finished shape at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from pyquant.bench.gemm import NO_BASELINE, gemm_row
from pyquant.bench.kernels import ADAPTERS
from pyquant.bench.kernels.adapter import Adapter, Built
from pyquant.bench.kernels.torch_own import MM_BF16
from pyquant.bench.partial import Partial, Shape
from pyquant.bench.peers import PeerUnavailable, at, check_shape, first_line
from pyquant.bench.problem import Inputs, Weights
from pyquant.errors import ArgumentError, PyquantError
from pyquant.measure.energy import EnergyUnavailable, energy_meter
from pyquant.measure.floors import COPY, ceiling_value, gemm_bytes, gemm_floor
from pyquant.measure.gpu_timing import ROTATE_BYTES, Rotating, copies_beyond_cache, copies_of, held_bytes
from pyquant.measure.timing import Clock, Timings, make_clock, time_interleaved
from pyquant.report.records.bench import Ceiling, GemmRow, Unavailable

# What a foreign package may raise while it builds, compiles, runs or is captured. A candidate that fails is reported.
_FAILURES = (
    PyquantError,
    PeerUnavailable,
    RuntimeError,
    AttributeError,
    TypeError,
    ValueError,
    ImportError,
    AssertionError,
    LookupError,
    OSError,
)


class DeviceLost(RuntimeError):
    """The device no longer answers: nothing else can be measured in this process."""


@dataclass(frozen=True)
class GpuBench:
    """What to run.

    shapes        (m, k, n) triples.   adapters  the candidates; the baseline among them.
    clock         of pyquant.measure.timing.
    rounds        interleaved rounds a shape; budget_s: seconds after which no further round starts (five are done).
    rotate_bytes  copies of the weights exceed this together, so that no call finds its own in a cache.
    energy        also millijoules a call, a second or more of calls each.
    """

    shapes: Sequence[Shape]
    adapters: Sequence[Adapter] = ADAPTERS
    baseline: str = MM_BF16
    device: str = "cuda"
    clock: str = "cuda-graph"
    rounds: int = 9
    min_sample_s: float = 0.002
    budget_s: float | None = 10.0
    rotate_bytes: int = ROTATE_BYTES
    energy: bool = False

    def __post_init__(self) -> None:
        if self.baseline not in [adapter.name for adapter in self.adapters]:
            raise ArgumentError("baseline", self.baseline, "one of the candidates")
        make_clock(self.clock)  # an unknown one is refused before anything is built


@dataclass
class _Ready:
    """A candidate that is built for one (K, N), with its copies."""

    adapter: Adapter
    built: Built
    copies: list[Any]


@dataclass
class _Bound:
    """A candidate that was checked at one M."""

    adapter: Adapter
    rotating: Rotating
    exact: bool | None
    sqnr: float | None
    kernel: str


def slice_of(shapes: Sequence[Shape], part: int, parts: int) -> list[Shape]:
    """The part-th of `parts` slices, counted from 1: whole (K, N), spread so that large ones do not meet in one slice.

    Raises ArgumentError unless 1 <= part <= parts.
    """
    if not 1 <= part <= parts:
        raise ArgumentError("slice", f"{part}/{parts}", "i/n with 1 <= i <= n")
    sizes = sorted({(k, n) for _, k, n in shapes}, key=lambda kn: (-kn[0] * kn[1], kn))
    mine = set(sizes[part - 1 :: parts])
    return [shape for shape in shapes if shape[1:] in mine]


def run_gpu_bench(
    bench: GpuBench,
    record: Partial,
    *,
    ceilings: Sequence[Ceiling] = (),
    deadline: float | None = None,
    clock: Callable[[], Clock] | None = None,
    on_shape: Callable[[Shape], None] | None = None,
) -> bool:
    """Measures every shape that the record does not hold yet.

    ceilings  from measure_ceilings() of this process; without them rows have no floor.
    deadline  on time.monotonic(): no shape is started after it.
    clock     makes the clock of a shape; default: that of bench.clock.
    on_shape  called before each shape.
    ->        True when no shape is left.
    Raises DeviceLost when a candidate breaks the device; the record then names it, and the next run skips it there.
    """
    remaining = [shape for shape in bench.shapes if shape not in record.cells]
    for kn in dict.fromkeys((k, n) for _, k, n in remaining):
        of_kn = [shape for shape in remaining if shape[1:] == kn]
        if _late(deadline):
            return False
        weights = Weights(*kn, torch.device(bench.device))
        ready, missing = _build(bench, weights, of_kn, record)
        for shape in of_kn:
            if _late(deadline):
                return False
            if on_shape:
                on_shape(shape)
            rows, absent = _measure(bench, Inputs(weights, shape[0]), ready, record, ceilings, clock)
            here = [Unavailable(name, reason, at(shape)) for name, reason in missing.items()]
            record.add(shape, rows, [*here, *absent])
        ready.clear()
        gc.collect()
        if weights.device.type == "cuda":
            torch.cuda.empty_cache()
    return True


def _late(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _build(
    bench: GpuBench, weights: Weights, shapes: Sequence[Shape], record: Partial
) -> tuple[dict[str, _Ready], dict[str, str]]:
    """Candidates by name with copies of their weights, and the reasons of those that could not be built."""
    ready: dict[str, _Ready] = {}
    missing: dict[str, str] = {}
    for adapter in bench.adapters:
        crashes = [record.crash_of(adapter.name, at(shape)) for shape in shapes]
        if all(crashes):
            missing[adapter.name] = str(crashes[0])
            continue
        try:
            with torch.no_grad():
                built = adapter.build(weights)
            held = held_bytes(built.state)
            if held == 0:
                raise PeerUnavailable("holds its weights where they cannot be copied: it would be timed in the cache")
            copies = copies_of(built.state, copies_beyond_cache(held, bench.rotate_bytes))
            ready[adapter.name] = _Ready(adapter, built, copies)
        except _FAILURES as error:
            _alive(record, weights.device, adapter.name, at(shapes[0]), error)
            missing[adapter.name] = first_line(error)
    return ready, missing


def _measure(
    bench: GpuBench,
    inputs: Inputs,
    ready: dict[str, _Ready],
    record: Partial,
    ceilings: Sequence[Ceiling],
    make: Callable[[], Clock] | None,
) -> tuple[list[GemmRow], list[Unavailable]]:
    shape = (inputs.m, inputs.weights.k, inputs.weights.n)
    where, device = at(shape), inputs.weights.device
    clock = (make or partial(make_clock, bench.clock))()
    bound: dict[str, _Bound] = {}
    candidates: dict[str, Rotating] = {}
    absent: list[Unavailable] = []
    for name, candidate in ready.items():
        try:
            if reason := record.crash_of(name, where):
                raise PeerUnavailable(reason)
            with torch.inference_mode():
                bound[name] = _checked(candidate, inputs)
                rotating = bound[name].rotating
                clock.seconds(rotating, rotating.period)  # a candidate that cannot be captured fails alone
            candidates[name] = rotating
        except _FAILURES as error:
            _alive(record, device, name, where, error)
            absent.append(Unavailable(name, first_line(error), where))
    if bench.baseline not in candidates:
        absent.append(Unavailable(bench.baseline, NO_BASELINE, where))
        return [], absent
    timings = time_interleaved(
        candidates,
        clock=clock,
        rounds=bench.rounds,
        min_sample_s=bench.min_sample_s,
        warm_calls=1,
        budget_s=bench.budget_s,
    )
    rows = [_row(shape, bound[name], timings, bench.baseline, ceilings) for name in candidates]
    if bench.energy:
        rows = _with_energy(rows, candidates, timings, clock, device, absent)
    return rows, absent


def _with_energy(
    rows: Sequence[GemmRow],
    candidates: Mapping[str, Rotating],
    timings: Timings,
    clock: Clock,
    device: torch.device,
    absent: list[Unavailable],
) -> list[GemmRow]:
    """The rows with their energy; where the device does not report it, the reason goes to `absent`."""
    where, energies = at((rows[0].m, rows[0].k, rows[0].n)), []
    try:
        meter = energy_meter(device)
        for row in rows:
            with torch.inference_mode():
                energies.append(
                    meter.a_call(partial(_calls, clock, candidates[row.candidate], timings.calls[row.candidate]))
                )
    except EnergyUnavailable as error:
        absent.append(Unavailable("energy per call", str(error), where))
        return list(rows)
    return [replace(row, energy_mj=energy) for row, energy in zip(rows, energies, strict=True)]


def _calls(clock: Clock, candidate: Rotating, calls: int) -> int:
    """One sample as it was timed: a graph that is there already is replayed. -> how many calls that were."""
    clock.seconds(candidate, calls)
    return calls


def _checked(candidate: _Ready, inputs: Inputs) -> _Bound:
    """The candidate bound to the inputs; raises PeerUnavailable when it returns something else than the product."""
    adapter, built, m = candidate.adapter, candidate.built, inputs.m
    run = built.bind(inputs)
    width = inputs.weights.n if adapter.products == 1 else inputs.weights.k
    _poison(inputs, width)
    y = run(built.state)
    check_shape(y, m, width)
    rows, exact = inputs.checked[0], None
    if built.reference is not None:
        exact = torch.equal(y[rows], built.reference(inputs, rows))
    sqnr = inputs.sqnr_db(y, with_bias=adapter.has_bias) if adapter.products == 1 else None
    if sqnr is not None and not sqnr >= adapter.min_sqnr:
        raise PeerUnavailable(f"returned a wrong product: {sqnr:.1f} dB, at least {adapter.min_sqnr:g} dB is right")
    rotating = Rotating([partial(run, state) for state in candidate.copies])
    return _Bound(adapter, rotating, exact, sqnr, built.kernel(m))


def _poison(inputs: Inputs, width: int) -> None:
    """Leaves NaN where the allocator will place the result: an element that no kernel writes is then seen."""
    del_me = torch.full((inputs.m, width), torch.nan, dtype=torch.bfloat16, device=inputs.weights.device)
    del del_me


def _row(shape: Shape, bound: _Bound, timings: Timings, baseline: str, ceilings: Sequence[Ceiling]) -> GemmRow:
    m, k, n = shape
    adapter = bound.adapter
    moved = adapter.products * gemm_bytes(m, k, n, w_bits=adapter.w_bits, x_bits=adapter.x_bits, out_bits=16)
    gbps, gops = ceiling_value(ceilings, COPY), ceiling_value(ceilings, adapter.peak)
    floor = None
    if gbps and gops:
        floor = gemm_floor(m * adapter.products, k, n, moved_bytes=moved, gbps=gbps, gops=gops)
    return gemm_row(
        shape,
        adapter.name,
        timings,
        baseline,
        floor,
        products=adapter.products,
        ours=adapter.ours,
        exact=bound.exact,
        sqnr_db=bound.sqnr,
        kernel=bound.kernel,
        moved_bytes=moved,
        ops=2.0 * m * k * n * adapter.products,
        peak=adapter.peak,
    )


def _alive(record: Partial, device: torch.device, name: str, where: str, error: BaseException) -> None:
    """Returns when the device still answers; a broken context would make every later candidate fail for nothing."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError as broken:
        record.crash(name, f"broke the device: {first_line(error)}", where)
        raise DeviceLost(
            f"{name} at {where} broke the device ({first_line(broken)}). Run the same command again: "
            "it goes on without this candidate there"
        ) from error
