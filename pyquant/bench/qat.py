"""The engine of `pyquant bench qat`: fake quantisers forward and backward, and whole training steps, in interleaved
rounds of one run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyquant.bench import fake_quantize, qat_steps
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import Timings, make_clock, time_interleaved
from pyquant.report.records.bench import QatReport, QatRow, Unavailable

GRANULARITIES = ("per_tensor", "per_channel")


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
    for name in bench.granularities:
        if name not in GRANULARITIES:
            raise ArgumentError("granularities", name, " or ".join(GRANULARITIES))
    for name in bench.steps:
        if name not in qat_steps.MODELS:
            raise ArgumentError("steps", name, " or ".join(qat_steps.MODELS))
    for part in bench.candidates or ():
        names = [c.name for c in fake_quantize.CANDIDATES] + [v.name for v in qat_steps.VARIANTS]
        if not any(part.lower() in name.lower() for name in names):
            raise ArgumentError("candidates", part, "part of one of: " + ", ".join(dict.fromkeys(names)))
    make_clock(bench.clock)
    rows: list[QatRow] = []
    missing: list[Unavailable] = []
    for elements in () if bench.steps else bench.elements:
        for granularity in bench.granularities:
            case = f"{granularity}, {elements / 1e6:.3g} M elements"
            if on_case:
                on_case(case)
            rows += _passes(bench, case, granularity, elements, missing)
    for name in bench.steps:
        case = f"step of the {name}"
        if on_case:
            on_case(case)
        rows += _steps(bench, case, name, missing)
    return QatReport(describe_environment(clock=bench.clock), bench.allocator, rows, missing, _notes())


def _wanted(bench: QatBench, name: str, always: str) -> bool:
    if bench.candidates is None or name == always:
        return True
    return any(part.lower() in name.lower() for part in bench.candidates)


def _passes(
    bench: QatBench, case: str, granularity: str, elements: int, missing: list[Unavailable]
) -> list[QatRow]:  # fmt: skip
    columns = min(4096, elements)
    x = torch.randn(max(elements // columns, 1), columns, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    scale = torch.tensor([4.0 / 127]) if granularity == "per_tensor" else x.abs().amax(-1) / 127
    calls: dict[str, Callable[[], object]] = {}
    ours = set()
    for candidate in fake_quantize.CANDIDATES:
        if candidate.granularity != granularity or not _wanted(bench, candidate.name, fake_quantize.FLOOR):
            continue
        try:
            call = _both_ways(candidate.build(x, scale), x, grad)
            _check(candidate, call(), x, scale)
        except Exception as error:  # other packages fail in their own ways; ours is never allowed to
            if candidate.name.startswith("pyquant"):
                raise
            missing.append(Unavailable(candidate.name, (str(error).strip() or type(error).__name__)[:200], case))
            continue
        calls[candidate.name] = call
        if candidate.name.startswith("pyquant"):
            ours.add(candidate.name)
    timings = time_interleaved(calls, clock=make_clock(bench.clock), rounds=bench.rounds, warm_calls=1, gradients=True)
    torchs = next((n for n in calls if n.startswith("torch.fake_quantize_per")), None)
    return [
        _row(case, name, name in ours, timings, 1e3 / x.numel(), "ns/element", fake_quantize.FLOOR, torchs)
        for name in calls
    ]


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
    raise fake_quantize.Missing("its result is further than a step from what it was given")


def _steps(bench: QatBench, case: str, model: str, missing: list[Unavailable]) -> list[QatRow]:
    calls: dict[str, Callable[[], object]] = {}
    for variant in qat_steps.VARIANTS:
        if not _wanted(bench, variant.name, qat_steps.PLAIN):
            continue
        try:
            calls[variant.name] = call = qat_steps.step_of(model, variant)
            call()
        except Exception as error:  # as above
            if variant.name.startswith("pyquant") and not isinstance(error, fake_quantize.Missing):
                raise
            calls.pop(variant.name, None)
            missing.append(Unavailable(variant.name, (str(error).strip() or type(error).__name__)[:200], case))
    timings = time_interleaved(
        calls, clock=make_clock(bench.clock), rounds=bench.rounds, warm_calls=2, min_sample_s=1e-3, gradients=True
    )
    row = functools.partial(_row, case, timings=timings, factor=1e-3, unit="ms", floor=qat_steps.PLAIN, torchs=None)
    return [row(name, name.startswith("pyquant")) for name in calls]


def _row(
    case: str, name: str, ours: bool, timings: Timings, factor: float, unit: str, floor: str, torchs: str | None
) -> QatRow:  # fmt: skip
    return QatRow(
        case, name, ours, timings.median_us(name) * factor, unit, 1 / timings.ratio(floor, name),
        timings.ratio(torchs, name) if torchs else None, timings.spread(name), len(timings.samples[name]),
    )  # fmt: skip


def _notes() -> list[str]:
    return [
        "time: forward and backward, median over the interleaved rounds of one run",
        "to floor: time over that of a clone with its backward (or of the plain fp32 step), median of the rounds",
        "kept allocator: the C heap keeps its pages (glibc tunables), so that page faults are not what is timed",
    ]
