"""Every kernel that takes a layer, timed on this machine's GPU beside what the plan's cost model says of it.

    python -m bench.rows [--models NAME ... | --kn KxN ...] [--m M ...] [--schemes TEXT ...] [--within F]
        [--time-budget S] [--out DIR]

The model chooses among kernels; this says where it chooses badly, and by which of its terms. Each kernel's result is
checked first. Writes bench/results/<gpu>/rows.json and rows.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from bench.shared import folder_name, geometric_mean
from pyquant import _native
from pyquant.bench.model_shapes import MODELS, parse_kn
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import time_interleaved
from pyquant.measure.tune import TORCH, Problem, Rig, candidates, problems_for
from pyquant.measure.tune_rig import GpuRig
from pyquant.report.records.environment import Environment
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import save_record
from pyquant.report.render import table, write_text

SCHEMES: Final = ("W8A8", "W4A8(group_size=None)", "W4A8(group_size=128)", "W4A16(group_size=128)", "W8A16", "BF16")
MS: Final = (1, 16, 64, 256, 1024, 4096)
_BF16: Final = "FP16(dtype=bfloat16)"
_ROUNDS: Final = 5


@dataclass(frozen=True)
class TimedRow:
    """A kernel on one problem: microseconds measured and modelled, and what the model reckons them from."""

    row: str
    us: float
    modelled_us: float
    terms: dict[str, float]


@dataclass(frozen=True)
class Shape:
    """One problem: its kernels, the model's choice first. torch_us: torch's product of 16-bit operands where both
    operands have them. wrong: kernels that were not timed, and why."""

    scheme: str
    m: int
    k: int
    n: int
    w_layout: str
    rows: list[TimedRow]
    torch_us: float | None
    wrong: dict[str, str]

    @property
    def chosen(self) -> TimedRow:
        """The model's choice, unless it was wrong."""
        return self.rows[0]

    @property
    def best(self) -> TimedRow:
        return min(self.rows, key=lambda row: row.us)

    @property
    def loss(self) -> float:
        """The chosen kernel's time over the best one's."""
        return self.chosen.us / self.best.us


@dataclass(frozen=True)
class RowsReport:
    """All shapes of one run."""

    environment: Environment
    shapes: list[Shape]


def measure(
    rig: Rig,
    schemes: Sequence[str],
    shapes: Sequence[tuple[int, int]],
    ms: Sequence[int],
    within: float,
    deadline: float | None = None,
) -> Iterator[Shape]:
    """Every problem that is begun before the deadline, on time.monotonic()."""
    for k, n in shapes:
        for scheme in schemes:
            layer = (n, k, _BF16 if scheme == "BF16" else scheme)
            for problem in problems_for([layer], ms, torch.bfloat16, rig.device):
                if deadline is not None and time.monotonic() > deadline:
                    return
                yield timed(rig, scheme, problem, within)


def timed(rig: Rig, scheme: str, problem: Problem, within: float, *, only_compiled: bool = True) -> Shape:
    """One problem, and the kernels that the model thinks at most `within` times as slow as its best."""
    names = candidates(problem, rig.device, only_compiled=only_compiled)
    sizes = (problem["m"], problem["k"], problem["n"])
    layout = problem.get("w_layout", "natural")
    if not names:
        return Shape(scheme, *sizes, layout, [], None, {"all": "no kernel takes the problem"})
    costs = {name: modelled(name, problem, rig.device)[0] for name in names}
    names = [name for name in names if costs[name] <= within * costs[names[0]]]
    build = rig.prepare(problem)
    runs, wrong = {}, {}
    is_float = problem.get("x") in ("f16", "bf16") and problem["w"] == problem["x"]
    for name in [*names, *([TORCH] if is_float else [])]:
        try:
            run, right = build(name)
        except (RuntimeError, ValueError) as error:
            wrong[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        if right:
            runs[name] = run
        else:
            wrong[name] = "its result differs from the specification"
    if not runs:
        return Shape(scheme, *sizes, layout, [], None, wrong)
    timings = time_interleaved(runs, clock=rig.clock, rounds=_ROUNDS, min_sample_s=0.001, warm_calls=1)
    us = {name: timings.median_us(name) for name in runs}
    torch_us = us.pop(TORCH, None)
    rows = [TimedRow(name, time_us, *modelled(name, problem, rig.device)) for name, time_us in us.items()]
    return Shape(scheme, *sizes, layout, rows, torch_us, wrong)


def modelled(row: str, problem: Problem, device: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
    """(microseconds, what they are spent on) by the plan's model."""
    return _native.cost_us(row, problem, device), _native.cost_terms(row, problem, device)


def markdown(report: RowsReport) -> str:
    """A line a shape, and what the choice loses by scheme."""
    header = ["scheme", "M", "K", "N", "chosen", "us", "modelled", "best", "us", "loss"]
    lines: list[list[Any]] = []
    for s in report.shapes:
        if s.rows:
            chosen, best = s.chosen, s.best
            us = (f"{chosen.us:.1f}", f"{chosen.modelled_us:.1f}")
            named = "" if best is chosen else best.row
            lines.append([s.scheme, s.m, s.k, s.n, chosen.row, *us, named, f"{best.us:.1f}", f"{s.loss:.2f}"])
    by_scheme = []
    for scheme in dict.fromkeys(s.scheme for s in report.shapes):
        mine = [s for s in report.shapes if s.scheme == scheme and s.rows]
        if mine:
            shares = [row.us / row.modelled_us for s in mine for row in s.rows]
            losses = [s.loss for s in mine]
            by_scheme.append(
                [
                    scheme,
                    len(mine),
                    f"{geometric_mean(losses):.3f}",
                    f"{max(losses):.2f}",
                    f"{statistics.median(shares):.2f}",
                ]
            )
    wrong = [
        f"- {s.scheme}, M {s.m}, K {s.k}, N {s.n}: {name}: {why}"
        for s in report.shapes
        for name, why in s.wrong.items()
    ]
    kinds = table(["scheme", "shapes", "loss, mean", "worst", "measured over modelled, median"], by_scheme)
    text = [
        "# Kernels beside the plan's model",
        report.environment.line(),
        kinds,
        table(header, lines),
        "\n".join(wrong),
    ]
    return "\n\n".join([*filter(None, text), f"Command: `{report.environment.command}`\n"])


def main(argv: list[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m bench.rows", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=["llama-3-8b"], metavar="NAME")
    parser.add_argument("--kn", nargs="+", metavar="KxN", help="layers instead of a model's")
    parser.add_argument("--m", nargs="+", type=int, default=list(MS), metavar="M", help=f"default: {MS}")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), metavar="TEXT", help=f"default: {SCHEMES}")
    parser.add_argument("--within", type=float, default=2.0, metavar="F", help="of the best, by the model (default: 2)")
    parser.add_argument("--time-budget", type=float, metavar="S", help="no problem is begun after S seconds")
    parser.add_argument("--out", metavar="DIR", help="default: bench/results/<gpu>")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.rows: torch sees no CUDA device", file=sys.stderr)
        return 2
    environment = describe_environment("cuda", clock="cuda-graph")
    of_models = [kn for model in args.models for kn in MODELS[model]]
    shapes = list(dict.fromkeys(map(parse_kn, args.kn) if args.kn else of_models))
    deadline = None if args.time_budget is None else began + args.time_budget
    found = [*measure(GpuRig(), args.schemes, shapes, args.m, args.within, deadline)]
    report = RowsReport(environment, found)
    out = Path(args.out or Path("bench/results") / folder_name(environment))
    text = markdown(report)
    print(text)
    print(f"wrote {write_text(out / 'rows.md', text)}, {save_record(out / 'rows.json', figures_of(report))}")
    return 1 if any(shape.wrong for shape in found) else 0


if __name__ == "__main__":
    sys.exit(main())
