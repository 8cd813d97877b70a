"""Whole encoders that others wrote, quantised with one line, against themselves in fp32 and bf16.

`python -m bench.encoders` builds BERT and T5 of transformers with random weights (their speed does not depend on them;
nothing is downloaded), runs them on random tokens and writes bench/results/cpu-<model>/encoders.md. Its bar is T5's: an
architecture that nothing was tuned for should gain as BERT does. Exit code 1 when it is missed.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

import pyquant
from bench.shared import folder_name
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import default_clock, make_clock, time_interleaved, using_threads
from pyquant.report.records.bench import Bar
from pyquant.report.records.environment import Environment
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import save_record
from pyquant.report.render import write_text

SIZES = ((1, 24), (1, 128), (8, 128))  # sentences, tokens of each
LAYERS = 6
SCHEME = "W8A8Dynamic"
T5_SHARE = 2.5 / 3  # of what BERT gains in the same run


@dataclass(frozen=True)
class EncoderRow:
    """One encoder on one size of input: milliseconds a call, and fp32's time over each."""

    model: str
    sentences: int
    tokens: int
    ms: dict[str, float]
    speedup: dict[str, float]


@dataclass(frozen=True)
class EncoderReport:
    """All rows of one run."""

    environment: Environment
    rows: list[EncoderRow]
    bars: list[Bar] = field(default_factory=list)


def models() -> Iterator[tuple[str, nn.Module]]:
    """Base sizes, with fewer layers: the layers are alike."""
    from transformers import BertConfig, BertModel, T5Config, T5EncoderModel

    yield "BERT base", BertModel(BertConfig(num_hidden_layers=LAYERS)).eval()
    yield "T5 base", T5EncoderModel(T5Config(d_model=768, d_ff=3072, num_layers=LAYERS, num_heads=12)).eval()


def variants(model: nn.Module) -> dict[str, nn.Module]:
    """fp32 as it is, bf16, and the quantised model, as it is and fused."""
    quantised = pyquant.quantize_(copy.deepcopy(model), SCHEME)
    fused = copy.deepcopy(quantised)
    pyquant.fuse_(fused)
    return {"fp32": model, "bf16": copy.deepcopy(model).bfloat16(), SCHEME: quantised, f"{SCHEME}, fused": fused}


def measure(rounds: int, budget_s: float) -> list[EncoderRow]:
    """Every encoder at every size, its variants interleaved."""
    clock, rows = make_clock(default_clock(torch.get_num_threads())), []
    for name, model in models():
        built = variants(model)
        for sentences, tokens in SIZES:
            ids = torch.randint(0, 1000, (sentences, tokens), device="cpu")
            runs: dict[str, Callable[[], object]] = {v: partial(m, input_ids=ids) for v, m in built.items()}
            timings = time_interleaved(runs, clock=clock, rounds=rounds, budget_s=budget_s)
            ms = {v: timings.median_us(v) / 1e3 for v in runs}
            rows.append(EncoderRow(name, sentences, tokens, ms, {v: timings.ratio("fp32", v) for v in runs}))
    return rows


def bars_of(rows: list[EncoderRow]) -> list[Bar]:
    """T5's gain over BERT's on the same input, the smallest of all sizes."""
    gains = {(row.model, (row.sentences, row.tokens)): row.speedup[SCHEME] for row in rows}
    shares = [gains["T5 base", size] / gains["BERT base", size] for size in SIZES]
    return [Bar(f"{SCHEME}: T5's gain over fp32, as a share of BERT's, smallest", T5_SHARE, min(shares), unit="")]


def markdown(report: EncoderReport) -> str:
    """The table, with the machine and the bar."""
    kinds = list(report.rows[0].ms)
    lines = [f"# Encoders of {LAYERS} layers", "", report.environment.line(), ""]
    lines += ["| encoder | input | " + " | ".join(f"{k}, ms" for k in kinds) + " |", "|---" * (2 + len(kinds)) + "|"]
    for row in report.rows:
        cells = [row.model, f"{row.sentences} x {row.tokens} tokens"]
        cells += [f"{row.ms[k]:.1f} ({row.speedup[k]:.2f}x)" for k in kinds]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "In brackets: fp32's time over it, the median of the ratios of a round.", ""]
    for bar in report.bars:
        lines.append(f"- {'PASS' if bar.passed else 'MISS'}: {bar.name}: {bar.measured:.2f} (goal >= {bar.goal:.2f})")
    return "\n".join([*lines, "", f"Command: `{report.environment.command}`", ""])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.encoders", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds a size (default: 9)")
    parser.add_argument(
        "--budget", type=float, default=20.0, help="seconds a size after which rounds end (default: 20)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; 1: CPU time (default: the machine's)")
    parser.add_argument("--out", default=None, metavar="DIR", help="default: bench/results/cpu-<model>")
    args = parser.parse_args(argv)
    threads = torch.get_num_threads() if args.threads is None else args.threads
    if threads < 1:
        parser.error(f"--threads {threads}: at least 1")
    with using_threads(threads):
        rows = measure(args.rounds, args.budget)
        report = EncoderReport(describe_environment(clock=default_clock(threads)), rows, bars_of(rows))
    text = markdown(report)
    print(text)
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    name = "encoders_one_thread" if threads == 1 else "encoders"
    print(f"wrote {write_text(out / f'{name}.md', text)}, {save_record(out / f'{name}.json', figures_of(report))}")
    return 0 if all(bar.passed for bar in report.bars) else 1


if __name__ == "__main__":
    sys.exit(main())
