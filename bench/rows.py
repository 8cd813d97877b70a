"""Every kernel that takes a layer, timed on this machine's GPU beside what the plan's cost model says of it.

    python -m bench.rows [--models NAME ... | --kn KxN ...] [--m M ...] [--schemes TEXT ...] [--within F]
        [--every-row] [--time-budget S] [--clock cuda-graph|faked] [--out DIR]

The model chooses among kernels; this says where it chooses badly, and by which of its terms. Each kernel's result is
checked first. Writes bench/results/<gpu>/rows.json and rows.md after every layer, and each problem into
rows.partial.jsonl at once: a run that was killed, or that --time-budget ended, goes on when it is started again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch

from bench.cards import CARDS
from bench.shared import folder_name, geometric_mean
from pyquant import _native
from pyquant.bench.model_shapes import MODELS, parse_kn
from pyquant.core import arguments
from pyquant.errors import PyquantError
from pyquant.io.journal import Journal
from pyquant.measure.environment import describe_environment, library_digest
from pyquant.measure.timing import Candidate, FakedClock, time_interleaved
from pyquant.measure.tune import TORCH, Problem, Rig, candidates, problems_for
from pyquant.measure.tune_rig import GpuRig
from pyquant.report.records.environment import FAKED, Environment
from pyquant.report.records.figures import Figures, figures_of
from pyquant.report.records.record import plain_of, save_record
from pyquant.report.render import table, write_text

SCHEMES: Final = ("W8A8", "W4A8(group_size=None)", "W4A8(group_size=128)", "W4A16(group_size=128)", "W8A16", "BF16")
MS: Final = (1, 16, 64, 256, 1024, 4096)
_BF16: Final = "FP16(dtype=bfloat16)"
_ROUNDS: Final = 5
UNFINISHED: Final = 3
_FLAT_TITLE: Final = "Kernels beside the plan's model"


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


class DryRig:
    """Stands for a GPU in a dry run: kernels of the whole table on an H200 by its data sheet; nothing is launched."""

    device: Final[Mapping[str, Any]] = next(card.device for card in CARDS if card.name == "NVIDIA H200")
    clock: Final = FakedClock()

    def prepare(self, problem: Problem) -> Callable[[str], tuple[Candidate, bool]]:
        return lambda name: (lambda: None, True)


def measure(
    rig: Rig,
    layers: Sequence[tuple[int, int, str]],
    ms: Sequence[int],
    within: float,
    done: Journal,
    deadline: float | None = None,
    only_selectable: bool = True,
) -> Iterator[tuple[tuple[int, int], list[Shape]]]:
    """Layer by layer: ((K, N), its shapes); problems that the journal holds are not repeated.

    layers    (K, N, scheme).   deadline  on time.monotonic(); no problem is begun after it: the last layer that is
              yielded may lack some of its shapes.
    """
    for kn, group in groupby(layers, key=lambda layer: layer[:2]):
        found: list[Shape] = []
        for scheme, problem in ((s, p) for *_, s in group for p in problems_of(rig, *kn, s, ms)):
            key = f"{scheme} " + " ".join(str(problem[name]) for name in "mkn")
            if key not in done.entries:
                if deadline is not None and time.monotonic() > deadline:
                    yield kn, found
                    return
                chosen = {"only_compiled": not isinstance(rig, DryRig), "only_selectable": only_selectable}
                done.add(key, plain_of(timed(rig, scheme, problem, within, **chosen)))
            found.append(shape_of(done.entries[key]))
        yield kn, found


def problems_of(rig: Rig, k: int, n: int, scheme: str, ms: Sequence[int]) -> list[Problem]:
    """A layer's products, one for each bucket of rows."""
    return problems_for([(n, k, _BF16 if scheme == "BF16" else scheme)], ms, torch.bfloat16, rig.device)


def shape_of(plain: Mapping[str, Any]) -> Shape:
    """A shape as a journal holds it."""
    return Shape(**{**plain, "rows": [TimedRow(**row) for row in plain["rows"]]})


def timed(
    rig: Rig,
    scheme: str,
    problem: Problem,
    within: float,
    *,
    only_compiled: bool = True,
    only_selectable: bool = True,
) -> Shape:
    """One problem, and the kernels that the model thinks at most `within` times as slow as its best; only_selectable:
    but for those that nothing ever selects."""
    names = candidates(problem, rig.device, only_compiled=only_compiled, only_selectable=only_selectable)
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


@dataclass(frozen=True)
class _Flat:
    """A report as tables: a line a kernel and shape, torch's products, and what was not timed."""

    environment: Environment
    kernels: list[dict[str, Any]]
    torch: list[dict[str, Any]]
    wrong: list[dict[str, Any]]


def figures(report: RowsReport) -> Figures:
    """Everything that was measured and modelled, for readers of JSON: a line a kernel and shape."""
    flat = _Flat(report.environment, [], [], [])
    for s in report.shapes:
        where = {"scheme": s.scheme, "m": s.m, "k": s.k, "n": s.n, "w_layout": s.w_layout}
        flat.kernels.extend({**where, "chosen": row is s.chosen, **plain_of(row)} for row in s.rows)
        flat.torch.extend([{**where, "us": s.torch_us}] if s.torch_us is not None else [])
        flat.wrong.extend({**where, "row": name, "why": why} for name, why in s.wrong.items())
    return replace(figures_of(flat), title=_FLAT_TITLE)


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
        f"# {_FLAT_TITLE}",
        report.environment.line(),
        kinds,
        table(header, lines),
        "\n".join(wrong),
    ]
    return "\n\n".join([*filter(None, text), f"Command: `{report.environment.command}`\n"])


def write(report: RowsReport, out: Path) -> list[Path]:
    """rows.md and rows.json in the folder."""
    return [write_text(out / "rows.md", markdown(report)), save_record(out / "rows.json", figures(report))]


def main(argv: list[str] | None = None) -> int:
    """-> 0; 1 when a kernel is wrong or was not timed; 2 without a GPU or for wrong words; 3 when problems are left."""
    try:
        return _run(argv, time.monotonic())
    except PyquantError as error:
        print(f"bench.rows: {error}", file=sys.stderr)
        return 2


def _run(argv: list[str] | None, began: float) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rows", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=["llama-3-8b"], metavar="NAME")
    parser.add_argument("--kn", nargs="+", metavar="KxN", help="layers instead of a model's")
    parser.add_argument("--m", nargs="+", type=int, default=list(MS), metavar="M", help=f"default: {MS}")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), metavar="TEXT", help=f"default: {SCHEMES}")
    parser.add_argument("--within", type=float, default=2.0, metavar="F", help="of the best, by the model (default: 2)")
    parser.add_argument("--every-row", action="store_true", help="also rows that nothing selects (set 'bench')")
    parser.add_argument("--time-budget", type=float, metavar="S", help="begin no problem after S seconds; exit code 3")
    parser.add_argument("--clock", choices=("cuda-graph", FAKED), default="cuda-graph", help="faked: a dry run")
    parser.add_argument("--out", metavar="DIR", help="default: bench/results/<gpu>")
    args = parser.parse_args(argv)
    for m in args.m:
        arguments.whole("--m", m, 1)
    arguments.number("--within", args.within, 1)
    is_dry = args.clock == FAKED
    if not torch.cuda.is_available() and not is_dry:
        print("bench.rows: torch sees no CUDA device", file=sys.stderr)
        return 2
    environment = describe_environment("cpu" if is_dry else "cuda", clock=args.clock)
    of_models = [kn for model in args.models for kn in MODELS[model]]
    shapes = list(dict.fromkeys(map(parse_kn, args.kn) if args.kn else of_models))
    layers = [(*kn, scheme) for kn in shapes for scheme in args.schemes]
    deadline = None if args.time_budget is None else began + args.time_budget
    rig: Rig = DryRig() if is_dry else GpuRig()
    out = Path(args.out or Path("bench/results") / folder_name(environment))
    facts = {
        "gpu": environment.gpu or "none: a dry run",
        "torch": environment.torch,
        "libraries": library_digest(),
        "clock": args.clock,
        "within": args.within,
        **({"rows": "every"} if args.every_row else {}),
        "rounds": _ROUNDS,
    }
    found: list[Shape] = []
    paths: list[Path] = []
    with Journal(out / "rows.partial.jsonl", "problems of bench.rows", facts) as done:
        for (k, n), some in measure(rig, layers, args.m, args.within, done, deadline, not args.every_row):
            found += some
            paths = write(RowsReport(environment, found), out)
            print(f"bench.rows: {k} x {n}: {len(some)} shapes", flush=True)
    print(markdown(RowsReport(environment, found)))
    print(f"wrote {', '.join(map(str, paths))}")
    whole = sum(len(problems_of(rig, *layer, args.m)) for layer in layers)
    if len(found) < whole:
        print(f"{len(found)} of {whole} shapes are done; the same command goes on", file=sys.stderr)
        return UNFINISHED
    return 1 if any(shape.wrong for shape in found) else 0


if __name__ == "__main__":
    sys.exit(main())
