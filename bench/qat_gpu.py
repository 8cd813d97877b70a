"""Training steps of wide Linear layers on a GPU: bf16, simulated int8 and the integer forward, with their goals.

`python -m bench.qat_gpu` (a part of `make gpu`) times forward, backward and SGD of one Linear under bf16 autocast with
float32 masters, interleaved, by CUDA events, and says how the two forms of prepare_qat_ compare with the plain step.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

import pyquant
from bench.goals import STATED
from bench.shared import folder_name, geometric_mean
from pyquant.measure.environment import describe_environment
from pyquant.measure.gpu_timing import CudaEventClock
from pyquant.measure.timing import Clock, time_interleaved
from pyquant.report.records.environment import Environment
from pyquant.report.records.figures import Cell, Figures, FigureTable
from pyquant.report.records.record import save_record
from pyquant.report.render import write_text

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES: Final = ((4096, 4096, 4096), (8192, 4096, 4096), (8192, 4096, 11008), (4096, 8192, 8192))  # tokens, K, N
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


def measure(shape: tuple[int, int, int], device: str, clock: Clock, rounds: int) -> dict[str, float]:
    """Median seconds of a step by variant."""
    m, k, n = shape
    torch.manual_seed(0)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    linear = nn.Linear(k, n, device=device)
    steps = {name: step_of(linear, x, name) for name in (PLAIN, *GOALS)}
    timings = time_interleaved(steps, clock=clock, rounds=rounds, gradients=True)
    return {name: timings.median_us(name) * 1e-6 for name in steps}


def report(rows: dict[tuple[int, int, int], dict[str, float]]) -> tuple[str, bool]:
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
    """-> 0, also where a goal is missed: the verdicts are for reading; 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.qat_gpu", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help="folder of the results (default: bench/results/<gpu>)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.qat_gpu: torch sees no CUDA device; on a CPU: pyquant bench qat --step mlp transformer")
        return 2
    rows = {shape: measure(shape, "cuda", CudaEventClock(), args.rounds) for shape in SHAPES}
    environment = describe_environment("cuda")
    folder = Path(args.out) if args.out else RESULTS / folder_name(environment)
    text, _ = report(rows)
    print(text, end="")
    write(folder, rows, environment, text)
    return 0


def write(
    folder: Path, rows: dict[tuple[int, int, int], dict[str, float]], environment: Environment, text: str
) -> None:
    """qat_step.json and qat_step.md in the folder."""
    header = ["tokens", "K", "N", *(f"{name}, s" for name in (PLAIN, *GOALS))]
    cells: list[list[Cell]] = [[*shape, *(row[name] for name in (PLAIN, *GOALS))] for shape, row in rows.items()]
    figures = Figures("Training steps on a GPU", environment, [FigureTable("seconds a step", header, cells)])
    save_record(folder / "qat_step.json", figures)
    write_text(folder / "qat_step.md", f"# Training steps on a GPU\n\n{text}\nCommand: `python -m bench.qat_gpu`\n")


if __name__ == "__main__":
    sys.exit(main())
