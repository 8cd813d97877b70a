"""One linear problem on a CPU, all candidates side by side: the engine behind `pyquant bench gemm` and the bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from pyquant.bench.peers import FP32, PEERS, Candidate, Peer, PeerUnavailable, at, check_shape, first_line
from pyquant.bench.problem import Inputs, inputs_of
from pyquant.core.presets import scheme_from_name
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, PyquantError
from pyquant.measure.environment import describe_environment
from pyquant.measure.exact import is_exact
from pyquant.measure.floors import Floor, Limit, ceiling_value, gemm_bytes, gemm_floor, multiply_limit, read_limit
from pyquant.measure.timing import CacheFlush, Clock, Timings, make_clock, time_interleaved
from pyquant.report.records.bench import Ceiling, GemmReport, GemmRow, Unavailable

Shape = tuple[int, int, int]
NO_BASELINE: Final = "the baseline did not run, so this shape has no ratios"
_MULTIPLY = "limit: multiply int8"
_MIN_SQNR_DB = 5.0  # 4-bit per channel on Gaussian weights stays above 15 dB; below 5 something else is computed


@dataclass(frozen=True)
class GemmBench:
    """What to run.

    shapes     (m, k, n) triples.   schemes   texts such as 'W8A8Dynamic'.   peers   rivals by name; None for all.
    dtype      of the pyquant layer's input and output (peers have their own).
    """

    shapes: Sequence[Shape]
    schemes: Sequence[str] = ("W8A8Dynamic", "W4A8Dynamic")
    peers: Sequence[str] | None = None
    baseline: str = FP32
    dtype: torch.dtype = torch.float32
    clock: str = "cpu"
    rounds: int = 15
    budget_s: float | None = None
    cold: bool = False


@dataclass
class _Built:
    """A candidate of one shape, checked. group: of weights that share a scale, 0: a row does."""

    run: Candidate
    ours: bool
    w_bits: int
    x_bits: int
    peak: str
    group: int = 0
    exact: bool | None = None
    sqnr: float | None = None
    kernel: str = ""


def run_gemm_bench(
    bench: GemmBench, *, ceilings: Sequence[Ceiling] = (), on_shape: Callable[[Shape], None] | None = None
) -> GemmReport:
    """Time every candidate at every shape, interleaved, and check what each returns before timing it.

    ceilings  from measure_ceilings(); without them rows have no floor. Its peaks of float types are used as they are;
              reading and int8 are measured again with every shape.
    on_shape  called before each shape (progress).
    ->        GemmReport; candidates that could not run are in `unavailable` with the reason.
    Raises ArgumentError for an unknown scheme, peer or clock before anything is timed.
    """
    schemes = {text: scheme_from_name(text) for text in bench.schemes}
    peers = _chosen_peers(bench)
    make_clock(bench.clock)  # an unknown clock is refused before anything is built
    flush = CacheFlush() if bench.cold else None
    multiply = multiply_limit(make_clock(bench.clock)) if ceilings else None
    rows: list[GemmRow] = []
    missing: list[Unavailable] = []
    for shape in bench.shapes:
        if on_shape:
            on_shape(shape)
        built = _prepare(bench, shape, peers, schemes, missing)
        if bench.baseline not in built:
            missing.append(Unavailable(bench.baseline, NO_BASELINE, at(shape)))
            continue
        rows += _time_shape(bench, shape, built, make_clock(bench.clock), flush, ceilings, multiply)
    environment = describe_environment(clock=bench.clock)
    return GemmReport(environment, bench.baseline, rows, list(ceilings), missing, notes=_notes(bench))


def _chosen_peers(bench: GemmBench) -> list[Peer]:
    by_name = {peer.name: peer for peer in PEERS}
    names = list(by_name) if bench.peers is None else [bench.baseline, *bench.peers]
    for name in names:
        if name not in by_name:
            raise ArgumentError("peers", name, ", ".join(by_name))
    return [by_name[name] for name in dict.fromkeys(names)]


def _prepare(
    bench: GemmBench, shape: Shape, peers: Iterable[Peer], schemes: Mapping[str, QScheme], missing: list[Unavailable]
) -> dict[str, _Built]:
    """The candidates that run, by name; the reasons of the others go to `missing`."""
    case, built = inputs_of(*shape), dict[str, _Built]()
    theirs: tuple[type[Exception], ...] = (PeerUnavailable, RuntimeError, AttributeError, TypeError)
    makers = [(peer.name, partial(_build_peer, peer), theirs) for peer in peers]
    makers += [
        (f"QLinear {text}", partial(_build_ours, bench, scheme), (PyquantError, PeerUnavailable))
        for text, scheme in schemes.items()
    ]
    for name, make, failures in makers:
        try:
            built[name] = make(case)
        except failures as error:
            missing.append(Unavailable(name, first_line(error), at(shape)))
    return built


def _build_peer(peer: Peer, case: Inputs) -> _Built:
    with torch.inference_mode():
        run = peer.build(case)
        y = run()
    sqnr = None if peer.gemm_only else _checked_sqnr(y, case)
    return _Built(run, False, peer.w_bits, peer.x_bits, peer.peak, sqnr=sqnr)


def _build_ours(bench: GemmBench, scheme: QScheme, case: Inputs) -> _Built:
    layer, x = case.qlinear(scheme, bench.dtype)
    with torch.inference_mode():
        sqnr = _checked_sqnr(layer(x), case)
    exact = is_exact(layer, x) if scheme.is_integer else None
    x_bits = 32 if bench.dtype is torch.float32 else 16
    peak = "int8" if scheme.is_integer else ("bf16" if x_bits == 16 else "fp32")
    return _Built(
        partial(layer, x),
        True,
        scheme.weights.bits,
        x_bits,
        peak,
        scheme.weights.group_size or 0,
        exact,
        sqnr,
        layer.kernel_info(case.m).kernel,
    )


def _time_shape(
    bench: GemmBench,
    shape: Shape,
    built: Mapping[str, _Built],
    clock: Clock,
    flush: CacheFlush | None,
    ceilings: Sequence[Ceiling],
    multiply: Limit | None,
) -> list[GemmRow]:
    limits = {} if multiply is None else _limits(shape, built, multiply, bench.cold)
    runs = {name: b.run for name, b in built.items()} | {name: limit.run for name, limit in limits.items()}
    timings = time_interleaved(runs, clock=clock, rounds=bench.rounds, budget_s=bench.budget_s, flush=flush)
    # GB/s, and 1e9 multiply-adds a second.
    rates = {name: limit.amount / timings.median_us(name) * 1e-3 for name, limit in limits.items()}
    return [
        gemm_row(
            shape,
            name,
            timings,
            bench.baseline,
            _floor(shape, b, ceilings, rates) if rates else None,
            ours=b.ours,
            exact=b.exact,
            sqnr_db=b.sqnr,
            kernel=b.kernel,
        )
        for name, b in built.items()
    ]


def gemm_row(
    shape: Shape, name: str, timings: Timings, baseline: str, floor: Floor | None, *, products: int = 1, **facts: Any
) -> GemmRow:
    """The row of a candidate at a shape. products: GEMMs of this size in a call; facts: further fields of the row."""
    return GemmRow(
        *shape,
        name,
        median_us=timings.median_us(name),
        ratio=timings.ratio(baseline, name) * products,
        spread=timings.spread(name),
        rounds=len(timings.samples[name]),
        floor_us=floor.us if floor else None,
        floor_kind=floor.kind if floor else "",
        **facts,
    )


def _limits(shape: Shape, built: Mapping[str, _Built], multiply: Limit, cold: bool) -> dict[str, Limit]:
    """What is timed along with the candidates of a shape: a stream over the bytes of each, and the int8 inner loop."""
    sets = {_moved(shape, b) for b in built.values()}
    return {_MULTIPLY: multiply} | {_read_name(size): read_limit(size, cold=cold) for size in sorted(sets)}


def _floor(shape: Shape, b: _Built, ceilings: Sequence[Ceiling], rates: Mapping[str, float]) -> Floor | None:
    moved = _moved(shape, b)
    gops = 2.0 * rates[_MULTIPLY] if b.peak == "int8" else ceiling_value(ceilings, b.peak)
    return None if gops is None else gemm_floor(*shape, moved_bytes=moved, gbps=rates[_read_name(moved)], gops=gops)


def _moved(shape: Shape, b: _Built) -> int:
    return gemm_bytes(*shape, w_bits=b.w_bits, x_bits=b.x_bits, out_bits=b.x_bits, group_size=b.group)


def _read_name(size_bytes: int) -> str:
    return f"limit: read {size_bytes} bytes"


def _checked_sqnr(y: torch.Tensor, case: Inputs) -> float:
    check_shape(y, case.m, case.weights.n)
    value = case.sqnr_db(y, with_bias=True)
    if not value >= _MIN_SQNR_DB:
        raise PeerUnavailable(f"returned a wrong product: {value:.1f} dB against the float64 result")
    return value


def _notes(bench: GemmBench) -> list[str]:
    warmth = "cold: the cache is flushed before every call" if bench.cold else "hot: the same weights every call"
    return [
        warmth,
        "ratio: baseline time / candidate time, median over interleaved rounds of one run",
        (
            "floor: max(bytes / bandwidth of a stream that only reads a working set of that size, operations / peak of "
            "the type), with the same threads. The stream and the peak of int8 (the inner loop of our kernels on "
            "operands in the caches) are timed in the rounds of the shape itself; the peaks of float types once"
        ),
    ]
