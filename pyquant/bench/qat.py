"""The engine of `pyquant bench qat`: fake quantisers forward and backward, and whole training steps, in interleaved
rounds of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from pyquant.bench import fake_quantize, qat_steps
from pyquant.bench.peers import PeerUnavailable, named
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import make_clock, time_interleaved
from pyquant.report.records.bench import QatReport, QatRow, Unavailable

GRANULARITIES: Final = fake_quantize.GRANULARITIES
Call = Callable[[], object]


@dataclass(frozen=True)
class QatBench:
    """elements: sizes of the tensors. granularities, candidates (part of a name; None: all). steps: 'mlp',
    'transformer'. clock and rounds as for bench gemm; allocator: how the process was started, for the record."""

    elements: Sequence[int] = (1 << 18, 1 << 24)
    granularities: Sequence[str] = GRANULARITIES
    candidates: Sequence[str] | None = None
    steps: Sequence[str] = ()
    clock: str = "cpu"
    rounds: int = 9
    allocator: str = "default"


def run_qat_bench(bench: QatBench, *, on_case: Callable[[str], None] | None = None) -> QatReport:
    """Time every candidate; a candidate that cannot run is listed with its reason. Raises ArgumentError for an unknown
    granularity, step, clock or candidate."""
    known = (("granularities", bench.granularities, GRANULARITIES), ("steps", bench.steps, qat_steps.MODELS))
    for argument, names, allowed in known:
        for name in names:
            if name not in allowed:
                raise ArgumentError(argument, name, " or ".join(allowed))
    named(
        bench.candidates or (),
        dict.fromkeys(c.name for c in (*fake_quantize.CANDIDATES, *qat_steps.VARIANTS)),
        "candidates",
    )
    make_clock(bench.clock)
    rows: list[QatRow] = []
    missing: list[Unavailable] = []
    cases: dict[str, Callable[[str], list[QatRow]]] = {
        f"step of the {name}": partial(_steps, bench, name, missing) for name in bench.steps
    } or {
        f"{granularity}, {elements / 1e6:.3g} M elements": partial(_passes, bench, granularity, elements, missing)
        for elements in bench.elements
        for granularity in bench.granularities
    }
    for case, measure in cases.items():
        if on_case:
            on_case(case)
        rows += measure(case)
    return QatReport(describe_environment(clock=bench.clock), bench.allocator, rows, missing, _notes())


def _passes(bench: QatBench, granularity: str, elements: int, missing: list[Unavailable], case: str) -> list[QatRow]:
    columns = min(4096, elements)
    x = torch.randn(max(elements // columns, 1), columns, generator=torch.Generator().manual_seed(0), device="cpu")
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), device="cpu")
    scale = torch.tensor([4.0 / 127], device="cpu") if granularity == "per_tensor" else x.abs().amax(-1) / 127

    def made(candidate: fake_quantize.Candidate) -> Call:
        call = _both_ways(candidate.build(x, scale, granularity), x, grad)
        _check(candidate, call(), x, scale)
        return call

    fitting = [c for c in fake_quantize.CANDIDATES if granularity in c.granularities]
    calls = _ready(bench, case, {c.name: partial(made, c) for c in fitting}, missing)
    torchs = next((n for n in calls if n.startswith("torch.fake_quantize_per")), None)
    return _timed(bench, case, calls, 1e3 / x.numel(), "ns/element", torchs, warm_calls=1)


def _both_ways(function: fake_quantize.Function, x: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    """Forward and backward; the gradient of x is dropped, so every call makes a new one. -> y"""
    leaf = x.detach().requires_grad_()

    def call() -> Tensor:
        y = function(leaf)
        y.backward(grad)
        leaf.grad = None
        return y

    return call


def _check(candidate: fake_quantize.Candidate, y: object, x: Tensor, scale: Tensor) -> None:
    """A candidate that does not fake-quantise is not timed: what no range clips stays within a step."""
    if not candidate.checked:
        return
    step = scale if scale.numel() == 1 else scale.unsqueeze(-1)
    if isinstance(y, Tensor) and bool(((y.detach() - x).abs() <= 1.5 * step)[x.abs() <= 126 * step].all()):
        return
    raise PeerUnavailable("its result is further than a step from what it was given")


def _steps(bench: QatBench, model: str, missing: list[Unavailable], case: str) -> list[QatRow]:
    def made(variant: qat_steps.Variant) -> Call:
        call = qat_steps.step_of(model, variant)
        call()
        return call

    calls = _ready(bench, case, {v.name: partial(made, v) for v in qat_steps.VARIANTS}, missing)
    return _timed(bench, case, calls, 1e-3, "ms", None, warm_calls=2, min_sample_s=1e-3)


def _ready(
    bench: QatBench, case: str, makers: Mapping[str, Callable[[], Call]], missing: list[Unavailable]
) -> dict[str, Call]:
    """What is timed: the floor, and of the candidates that were asked for those that run; others go to `missing`."""
    calls: dict[str, Call] = {}
    for i, (name, make) in enumerate(makers.items()):
        if i and bench.candidates and not any(part.lower() in name.lower() for part in bench.candidates):
            continue
        try:
            calls[name] = make()
        except Exception as error:  # other packages fail in their own ways; ours is never allowed to
            if name.startswith("pyquant"):
                raise
            missing.append(Unavailable(name, (str(error).strip() or type(error).__name__)[:200], case))
    return calls


def _timed(
    bench: QatBench, case: str, calls: Mapping[str, Call], factor: float, unit: str, torchs: str | None, **options: Any
) -> list[QatRow]:
    """Times against the floor, which is the first."""
    timings = time_interleaved(calls, clock=make_clock(bench.clock), rounds=bench.rounds, gradients=True, **options)
    floor = next(iter(calls))
    return [
        QatRow(
            case,
            name,
            name.startswith("pyquant"),
            timings.median_us(name) * factor,
            unit,
            1 / timings.ratio(floor, name),
            timings.ratio(torchs, name) if torchs else None,
            timings.spread(name),
            len(timings.samples[name]),
        )
        for name in calls
    ]


def _notes() -> list[str]:
    return [
        "time: forward and backward, median over the interleaved rounds of one run",
        "to floor: time over that of a clone with its backward (or of the plain fp32 step), median of the rounds",
        "kept allocator: the C heap keeps its pages (glibc tunables), so that page faults are not what is timed",
    ]
