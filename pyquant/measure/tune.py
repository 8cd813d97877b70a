"""Measures which kernel is the quickest for a user's layers on their GPU: the engine behind `pyquant tune`.

The plan's cost model names the candidates (all rows within a factor of its best), every candidate's result is checked
against the specification before it is timed, and what wins is a Choice that the plan follows from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from pyquant.core.presets import scheme_from_name
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.measure.timing import Candidate, Clock, time_interleaved
from pyquant.ops import plan
from pyquant.ops.layer_time import layer_key, product_of, spec_of
from pyquant.ops.tuned import Choice, LayerChoice

Problem = dict[str, Any]
Layer = tuple[int, int, QScheme | str]  # out_features, in_features, scheme or its text
TORCH: Final = "torch"
USUAL: Final = {"x": "s8", "w": "s8", "x_packed": False, "w_layout": "natural", "group_size": 0}  # where none is said
WITHIN: Final = 3.0  # candidates: rows that the model thinks at most this many times slower than its best
_WINS_BY: Final = 1.02  # noise does not overrule the model
_ANY: Final = plan.Device(0, 0, 0, 0)  # products of weights alone have one layout everywhere
_SHORT: Final = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}


class Rig(Protocol):
    """A device to measure on. Tests have one without a GPU."""

    device: Mapping[str, Any]  # as pyquant._native.device_info
    clock: Clock

    def prepare(self, problem: Problem) -> Callable[[str], tuple[Candidate, bool]]:
        """Memory for a problem. -> a function that, for a row's name or 'torch', returns the candidate to time and
        whether its result is right."""


@dataclass(frozen=True)
class TuneOutcome:
    """What was found for one problem.

    choice   the quickest, or None when nothing could be measured.   before   row of an earlier table, '' without one.
    times    candidate -> median microseconds.   dropped   candidate -> why it was not timed.
    """

    problem: Problem
    choice: Choice | None
    before: str = ""
    times: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)


def problems_for(
    layers: Iterable[Layer],
    ms: Sequence[int],
    dtype: torch.dtype = torch.float16,
    device: Mapping[str, Any] | None = None,
    *,
    residuals: bool = False,
) -> list[Problem]:
    """The GEMMs of layers (out_features, in_features, scheme or its text) for M rows each, in the form that the plan
    takes.

    ms         rows; each represents its bucket (pyquant._native.m_bucket), whose largest M is measured.
    dtype      of the layers' inputs and outputs.
    device     of the rig: the weights have the layout that its layers have. None: natural rows.
    residuals  each problem a second time, with a residual of that type (the key 'residual') added.
    ->         one problem a layer and bucket, without repetition; none of two-level weights, of which whole layers are
               timed alone.
    Raises ArgumentError for a scheme that is unknown, and for float32 where x stays in floating point.
    """
    native = plan._native()
    distinct: dict[str, Problem] = {}
    for n, k, scheme in layers:
        for m in ms:
            problem = _problem(n, k, as_scheme(scheme), int(native.m_bucket(m)), dtype, device)
            if problem.get("step_size"):
                continue
            with_residual = [problem | {"residual": _SHORT[dtype]}] if residuals else []
            for one in (problem, *with_residual):
                distinct.setdefault(repr(sorted(one.items())), one)
    return list(distinct.values())


def as_scheme(scheme: QScheme | str) -> QScheme:
    """The scheme of a layer. Raises ArgumentError for an unknown name."""
    return scheme_from_name(scheme) if isinstance(scheme, str) else scheme


def _problem(n: int, k: int, scheme: QScheme, m: int, dtype: torch.dtype, device: Mapping[str, Any] | None) -> Problem:
    if scheme.inputs is None and dtype is torch.float32:
        raise ArgumentError("dtype", dtype, f"float16 or bfloat16 with scheme {scheme}")
    if scheme.is_float:
        short = _SHORT[dtype]
        return {"m": m, "n": n, "k": k, "x": short, "w": short, "out": short}
    if scheme.inputs is None:
        return product_of(scheme, n, k, m, dtype, _ANY)[1]
    return plan.problem_of(spec_of(scheme, n, k, None if device is None else as_device(device)), m, dtype)


def as_device(facts: Mapping[str, Any]) -> plan.Device:
    """The device of a rig, as the plan takes it."""
    return plan.Device(**{"shared_bytes": 0, "l2_bytes": 0, **facts})


def candidates(
    problem: Problem, device: Mapping[str, Any], *, only_compiled: bool = True, only_selectable: bool = True
) -> list[str]:
    """The rows to measure, the model's choice first: those that take the problem, at most WITHIN times its time."""
    native = plan._native()
    unnamed = {**device, "name": ""}  # without a name no earlier measurement decides
    best, best_us, refused = native.select(problem, unnamed, "residual" in problem, only_compiled)
    if best is None:
        return []
    costs = {
        row["name"]: native.cost_us(row["name"], problem, unnamed)
        for row in native.kernel_table()
        if (row["selectable"] or not only_selectable)
        and (row["compiled"] or not only_compiled)
        and row["name"] not in refused
        and (row["selectable"] or native.refusal(row["name"], problem, unnamed, "residual" in problem)[0])
    }
    near = sorted((us, name) for name, us in costs.items() if us <= WITHIN * best_us and name != best)
    return [best, *(name for _, name in near)]


def tune(
    problems: Sequence[Problem],
    rig: Rig,
    *,
    rounds: int = 15,
    only_compiled: bool = True,
    on_problem: Callable[[Problem], None] | None = None,
) -> list[TuneOutcome]:
    """Measure every problem's candidates, interleaved, and name the quickest that is right.

    only_compiled  rows with machine code in this build; False considers the whole table (for a rig without a GPU).
    on_problem     called before each problem (progress).
    ->             an TuneOutcome a problem. The model's row stays unless another is clearly quicker.
    """
    outcomes = []
    for problem in problems:
        if on_problem:
            on_problem(problem)
        outcomes.append(_tune_one(problem, rig, rounds, only_compiled))
    return outcomes


def _tune_one(problem: Problem, rig: Rig, rounds: int, only_compiled: bool) -> TuneOutcome:
    names = candidates(problem, rig.device, only_compiled=only_compiled)
    earlier = plan._native().tuned(problem, rig.device, "residual" in problem)
    before = "" if earlier is None else earlier[0]
    if not names:
        return TuneOutcome(problem, None, before, dropped={"all": "no kernel takes the problem"})
    model_row = names[0]
    build = rig.prepare(problem)
    runs: dict[str, Candidate] = {}
    dropped: dict[str, str] = {}
    for name in [*names, *([TORCH] if problem.get("x") in ("f16", "bf16") else [])]:
        try:
            run, right = build(name)
        except (RuntimeError, ValueError) as error:
            dropped[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        if right:
            runs[name] = run
        else:
            dropped[name] = "its result differs from the specification"
    if not runs:
        return TuneOutcome(problem, None, before, dropped=dropped)
    timings = time_interleaved(runs, clock=rig.clock, rounds=rounds)
    times = {name: timings.median_us(name) for name in runs}
    best = min(times, key=lambda name: times[name])
    if model_row in times and times[model_row] <= _WINS_BY * times[best]:
        best = model_row
    choice = _choice(problem, best, times[best], model_row, times.get(model_row, 0.0))
    return TuneOutcome(problem, choice, before, times, dropped)


def _choice(problem: Problem, row: str, us: float, model_row: str, model_us: float) -> Choice:
    p = {**USUAL, **problem}
    return Choice(
        p["x"],
        p["w"],
        p["out"],
        p["x_packed"],
        p["w_layout"],
        p["group_size"],
        p["n"],
        p["k"],
        p["m"],
        row,
        round(us, 3),
        model_row,
        round(model_us, 3),
        bool(p.get("has_zero_point")),
        "residual" in p,
    )


class LayerRig(Protocol):
    """A device to time whole layers on."""

    layer_clock: Clock

    def layer(self, n: int, k: int, scheme: QScheme, m: int, dtype: torch.dtype) -> tuple[Candidate, Candidate, bool]:
        """(the quantised layer's call, torch's Linear's call, whether the layer's result is right)."""


def time_layers(
    layers: Iterable[Layer],
    ms: Sequence[int],
    dtype: torch.dtype,
    rig: LayerRig,
    *,
    rounds: int = 15,
    on_layer: Callable[[int, int, int], None] | None = None,
) -> tuple[list[LayerChoice], dict[str, str]]:
    """Time whole layers, their quantiser and every launch included, against torch's Linear of 16-bit weights.

    layers, ms, dtype  as in problems_for; float16 or bfloat16.   on_layer  called with (m, n, k) before each.
    ->  (times, {what was not timed: why}); each (shape, scheme, bucket) once.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        raise ArgumentError("dtype", dtype, "float16 or bfloat16 for whole layers")
    short, native = _SHORT[dtype], plan._native()
    found: list[LayerChoice] = []
    done: set[tuple[object, ...]] = set()
    dropped: dict[str, str] = {}
    for n, k, named in layers:
        scheme = as_scheme(named)
        for m in (int(native.m_bucket(m)) for m in ms):
            key = layer_key(scheme, short, n, k, m)
            if key in done or scheme.is_float:
                continue
            done.add(key)
            if on_layer:
                on_layer(m, n, k)
            what = f"{scheme} at M={m} N={n} K={k}"
            try:
                ours, theirs, right = rig.layer(n, k, scheme, m, dtype)
            except (RuntimeError, ValueError) as error:
                dropped[what] = (str(error).strip() or type(error).__name__).splitlines()[0]
                continue
            if not right:
                dropped[what] = "its result differs from the specification"
                continue
            timings = time_interleaved({"ours": ours, "theirs": theirs}, clock=rig.layer_clock, rounds=rounds)
            weights, inputs, zero_point, group_size, *_ = key
            us = (round(timings.median_us(name), 3) for name in ("ours", "theirs"))
            found.append(LayerChoice(weights, inputs, zero_point, group_size, short, n, k, m, *us))  # type: ignore[arg-type]
    return found, dropped
