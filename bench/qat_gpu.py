"""Training steps of wide Linear layers on a GPU: bf16, simulated int8 and the integer forward, with their goals.

`python -m bench.qat_gpu` (a part of `make gpu`) times forward, backward and SGD of one Linear under bf16 autocast with
float32 masters, interleaved, by CUDA events, and says how the two forms of prepare_qat_ compare with the plain step.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

import pyquant
from bench.goals import STATED
from bench.shared import folder_name, geometric_mean
from pyquant.io.journal import Journal
from pyquant.measure.environment import describe_environment, library_digest
from pyquant.measure.timing import Clock, make_clock, time_interleaved
from pyquant.report.records.environment import FAKED, Environment
from pyquant.report.records.figures import Cell, Figures, FigureTable
from pyquant.report.records.record import save_record
from pyquant.report.render import write_text

RESULTS = Path(__file__).resolve().parent / "results"
Shape = tuple[int, ...]  # tokens, K, N
SHAPES: Final[tuple[Shape, ...]] = (
    (4096, 4096, 4096),
    (8192, 4096, 4096),
    (8192, 4096, 11008),
    (4096, 8192, 8192),
)
DRY: Final = 128  # what a dry run divides them by
UNFINISHED: Final = 3
PLAIN, SIMULATED, INTEGER = "plain bf16", "prepare_qat_", 'prepare_qat_(forward="int8")'
# Share of the plain step's time: what must be reached, what should be possible.
GOALS: Final = {goal["name"]: (goal["at_most"], goal["stretch"]) for goal in STATED["qat_step"]}


def step_of(linear: nn.Linear, x: Tensor, variant: str) -> Callable[[], None]:
    """One training step of a copy of the layer under a variant."""
    model = nn.Sequential(copy.deepcopy(linear))
    if variant != PLAIN:
        config = pyquant.W8A8Dynamic()
        pyquant.prepare_qat_(model, config, forward="int8" if variant == INTEGER else "simulated")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    gradient = torch.ones(*x.shape[:-1], linear.out_features, dtype=torch.bfloat16, device=x.device)

    def step() -> None:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = model(x)
        y.backward(gradient)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(shape: Shape, device: str, clock: Clock, rounds: int) -> dict[str, float]:
    """Median seconds of a step by variant."""
    m, k, n = shape
    torch.manual_seed(0)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    linear = nn.Linear(k, n, device=device)
    steps = {name: step_of(linear, x, name) for name in (PLAIN, *GOALS)}
    timings = time_interleaved(steps, clock=clock, rounds=rounds, gradients=True)
    return {name: timings.median_us(name) * 1e-6 for name in steps}


def measure_all(
    shapes: Sequence[Shape], device: str, clock: str, rounds: int, folder: Path, budget: float | None
) -> dict[Shape, dict[str, float]]:
    """measure() of the shapes that the folder's journal lacks, until the budget ends. -> those that are done."""
    deadline = None if budget is None else time.monotonic() + budget
    environment = describe_environment(device, clock=clock)
    facts = {
        "gpu": environment.gpu,
        "torch": environment.torch,
        "libraries": library_digest(),
        "clock": clock,
        "rounds": str(rounds),
    }
    with Journal(folder / "qat_step.partial.jsonl", "shapes of bench.qat_gpu", facts) as done:
        for shape in shapes:
            key = " ".join(map(str, shape))
            if key not in done.entries and (deadline is None or time.monotonic() < deadline):
                done.add(key, measure(shape, device, make_clock(clock), rounds))
        return {shape: found for shape in shapes if (found := done.entries.get(" ".join(map(str, shape))))}


def report(rows: dict[Shape, dict[str, float]]) -> tuple[str, bool]:
    """The table, a verdict line for each goal, and whether all of them hold."""
    lines = ["| tokens x K x N | " + " | ".join([f"{PLAIN}, ms", *GOALS]) + " |", "|---" * (2 + len(GOALS)) + "|"]
    for shape, seconds in rows.items():
        shares = (f"{seconds[name] / seconds[PLAIN]:.2f}" for name in GOALS)
        lines.append(f"| {' x '.join(map(str, shape))} | {seconds[PLAIN] * 1e3:.2f} | " + " | ".join(shares) + " |")
    lines.append("")
    holds = True
    for name, (limit, stretch) in GOALS.items():
        share = geometric_mean([seconds[name] / seconds[PLAIN] for seconds in rows.values()])
        holds &= share <= limit
        verdict = "PASS" if share <= limit else "MISS"
        lines.append(f"- {verdict}: {name} takes {share:.2f} of the plain step (goal {limit}, possible {stretch})")
    return "\n".join(lines) + "\n", holds


def main(argv: list[str] | None = None) -> int:
    """-> 0, also where a goal is missed: the verdicts are for reading; 2 without a GPU; 3 when shapes are left."""
    parser = argparse.ArgumentParser(prog="python -m bench.qat_gpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help="folder of the results (default: bench/results/<gpu>)")
    parser.add_argument("--time-budget", type=float, metavar="S", help="begin no shape after S seconds; exit code 3")
    parser.add_argument("--clock", choices=("cuda-events", FAKED), default="cuda-events", help="faked: a dry run")
    args = parser.parse_args(argv)
    faked = args.clock == FAKED
    if not torch.cuda.is_available() and not faked:
        print("bench.qat_gpu: torch sees no CUDA device; on a CPU: pyquant bench qat --step mlp transformer")
        return 2
    device = "cpu" if faked else "cuda"
    environment = describe_environment(device, clock=args.clock)
    folder = Path(args.out) if args.out else RESULTS / folder_name(environment)
    shapes = [tuple(size // DRY for size in shape) for shape in SHAPES] if faked else SHAPES
    rows = measure_all(shapes, device, args.clock, args.rounds, folder, args.time_budget)
    if len(rows) < len(shapes):
        print(f"{len(rows)} of {len(shapes)} shapes are done; the same command goes on", file=sys.stderr)
        return UNFINISHED
    text, _ = report(rows)
    print(text, end="")
    write(folder, rows, environment, text)
    return 0


def write(folder: Path, rows: dict[Shape, dict[str, float]], environment: Environment, text: str) -> None:
    """qat_step.json and qat_step.md in the folder."""
    header = ["tokens", "K", "N", *(f"{name}, s" for name in (PLAIN, *GOALS))]
    cells: list[list[Cell]] = [[*shape, *(row[name] for name in (PLAIN, *GOALS))] for shape, row in rows.items()]
    figures = Figures("Training steps on a GPU", environment, [FigureTable("seconds a step", header, cells)])
    save_record(folder / "qat_step.json", figures)
    write_text(folder / "qat_step.md", f"# Training steps on a GPU\n\n{text}\nCommand: `python -m bench.qat_gpu`\n")


if __name__ == "__main__":
    sys.exit(main())
