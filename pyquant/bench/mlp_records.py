"""The founding experiment as trade-offs, one a column."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyquant.bench.mlp import END_TO_END, KERNEL, MlpBench, MlpResult
from pyquant.bench.mlp_space import BITS, FLOAT, capacity
from pyquant.results.environment import Environment
from pyquant.results.trade_off import TradeOff, TradeOffAxis, TradeOffPoint, trade_off

HEADLINE_RUNS = 7
_WHAT = {
    KERNEL: "the products alone, inputs ready in each layer's format",
    END_TO_END: "floats in, floats out, quantising and converting included",
}


def trade_off_of(result: MlpResult, column: str, environment: Environment, of: str = "output") -> TradeOff:
    """One column of a result against representational capacity.

    column  KERNEL or END_TO_END: the two are never in one picture.
    of      'output' or 'input' dimensions: what capacity counts.
    """
    bench, times = result.bench, result.times[column]
    shown = {FLOAT: _float_name(bench)}
    points = [
        TradeOffPoint(
            {f"layer {i + 1}": shown.get(name, name) for i, name in enumerate(config)},
            _rounded(s.median), float(capacity(bench.sizes, config, of)), _rounded(s.low), _rounded(s.high),
            figures={"mean_us": _rounded(s.mean), "std_us": _rounded(s.std)},
        )
        for config, s in times.items()
    ]  # fmt: skip
    made = trade_off(
        points,
        f"{'-'.join(map(str, bench.sizes))}, batch {bench.batch}: {len(points)} configurations, {column} latency",
        TradeOffAxis("latency", "us", f"{_WHAT[column]}; median of {bench.runs} runs"),
        TradeOffAxis("representational capacity", "bits", f"sum over layers of {of} dimension x bits of its format"),
        higher_is_better=True,
        formats=tuple(shown.get(name, name) for name in BITS),
    )
    if bench.runs < HEADLINE_RUNS:  # the largest of hundreds of differences is then one of noise
        made = replace(made, pair=None)
    return replace(
        made, environment=environment.plain(), command=environment.command,
        notes=tuple(_notes(result, column)),
    )  # fmt: skip


def _notes(result: MlpResult, column: str) -> list[str]:
    added = result.additivity[column]
    errors = f"median error {added.median:.1%}, worst {added.worst:.1%}, bias {added.bias:+.1%}"
    against = f"{added.configs} random configurations"
    how = "integer ones bit by bit, and every timed network against its checked layers"
    few = f"{result.bench.runs} runs: too few for a headline, which takes medians of {HEADLINE_RUNS} or more."
    return [
        *([few] if result.bench.runs < HEADLINE_RUNS else []),
        f"Column {column}: {_WHAT[column]}. The other column has a record of its own.",
        f"Checked before timing: {result.checked} layer results in place against exact references, {how}.",
        "Every round times every configuration once, in random order.",
        f"Additivity: single layers, each timed between its neighbours' formats, summed, against {against}: {errors}.",
    ]


def _float_name(bench: MlpBench) -> str:
    return "bf16" if bench.float_type == torch.bfloat16 else "fp16"


def _rounded(value: float) -> float:
    """Five digits: more would be noise in every file."""
    return float(f"{value:.5g}")
