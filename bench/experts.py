"""A mixture of experts like Qwen3-MoE, quantised with one line, against fp32 by the ways that transformers has.

`python -m bench.experts` builds two layers with random weights (nothing is downloaded), runs them on random tokens and
writes bench/results/cpu-<model>/experts.md. Its bar: W8A8Dynamic at least 2.5 times the faster fp32 at every number of
tokens. Exit code 1 when it is missed.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import pyquant
from bench.shared import folder_name
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import default_clock, make_clock, time_interleaved, using_threads
from pyquant.report.records.bench import Bar
from pyquant.report.records.environment import Environment
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import save_record
from pyquant.report.render import write_text

TOKENS = (1, 16, 128, 512)
SIZES = {"hidden_size": 1024, "moe_intermediate_size": 384, "num_experts": 64, "num_experts_per_tok": 8}
ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
FLOATS = ("eager", "grouped_mm")  # of transformers' experts implementations; batched_mm copies weights for each token
BAR, GOAL = "W8A8Dynamic", 2.5
SCHEMES = (BAR, "W4A8Dynamic(group_size=128)", "W8A16", "W4A16(group_size=128)")


@dataclass(frozen=True)
class TokensRow:
    """One number of tokens: milliseconds a call of each, and how many times the faster fp32 each is."""

    tokens: int
    ms: dict[str, float]
    speedup: dict[str, float]


@dataclass(frozen=True)
class ExpertsReport:
    """All rows of one run; db: the signal over the error of the logits of each scheme."""

    environment: Environment
    rows: list[TokensRow]
    db: dict[str, float]
    bars: list[Bar]


def mixture() -> Any:
    """Two layers of the sizes above."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, **ATTENTION, num_hidden_layers=2, vocab_size=1024, intermediate_size=3072)
    return Qwen3MoeForCausalLM(config).eval()


def measure(tokens: tuple[int, ...], rounds: int, budget_s: float) -> tuple[list[TokensRow], dict[str, float]]:
    """Every number of tokens, the models interleaved."""
    model, clock, rows = mixture(), make_clock(default_clock(torch.get_num_threads())), []
    quantised = {s: pyquant.quantize_(copy.deepcopy(model), s, heads=True, check_speed=False) for s in SCHEMES}
    ids = torch.randint(0, 1024, (1, 128), device="cpu")
    with torch.inference_mode():
        want = model(ids).logits
        errors = {scheme: m(ids).logits - want for scheme, m in quantised.items()}
    db = {scheme: float(20 * torch.log10(want.norm() / error.norm())) for scheme, error in errors.items()}

    def run_float(implementation: str, ids: torch.Tensor) -> None:
        model.set_experts_implementation(implementation)
        model(ids)

    for count in tokens:
        ids = torch.randint(0, 1024, (1, count), device="cpu")
        runs: dict[str, Callable[[], object]] = {f"fp32 {how}": partial(run_float, how, ids) for how in FLOATS}
        runs |= {scheme: partial(m, ids) for scheme, m in quantised.items()}
        timings = time_interleaved(runs, clock=clock, rounds=rounds, budget_s=budget_s)
        best = min((f"fp32 {how}" for how in FLOATS), key=timings.median_us)
        ms = {name: timings.median_us(name) / 1e3 for name in runs}
        rows.append(TokensRow(count, ms, {name: timings.ratio(best, name) for name in runs}))
    return rows, db


def markdown(report: ExpertsReport) -> str:
    """The table, with the machine and the bar."""
    kinds = list(report.rows[0].ms)
    sizes = ", ".join(f"{name} {size}" for name, size in SIZES.items())
    lines = [f"# Two layers of a Qwen3-MoE ({sizes})", "", report.environment.line(), ""]
    lines += ["| tokens | " + " | ".join(f"{k}, ms" for k in kinds) + " |", "|---" * (1 + len(kinds)) + "|"]
    for row in report.rows:
        cells = [str(row.tokens), *(f"{row.ms[k]:.1f} ({row.speedup[k]:.2f}x)" for k in kinds)]
        lines.append("| " + " | ".join(cells) + " |")
    told = ", ".join(f"{scheme} {db:.1f} dB" for scheme, db in report.db.items())
    lines += ["", "In brackets: the time of the faster fp32 over it, the median of the ratios of a round.", ""]
    lines += [f"Signal over error of the logits: {told}.", ""]
    for bar in report.bars:
        lines.append(f"- {'PASS' if bar.passed else 'MISS'}: {bar.name}: {bar.measured:.2f} (goal >= {bar.goal:.2f})")
    return "\n".join([*lines, "", f"Command: `{report.environment.command}`", ""])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.experts", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="default: 1 16 128 512")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds for each (default: 9)")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for each after which rounds end")
    parser.add_argument("--out", default=None, metavar="DIR", help="default: bench/results/cpu-<model>")
    args = parser.parse_args(argv)
    threads = torch.get_num_threads()
    with using_threads(threads):
        rows, db = measure(tuple(args.tokens), args.rounds, args.budget)
        bars = [Bar(f"{BAR} over the faster fp32, {r.tokens} tokens", GOAL, r.speedup[BAR]) for r in rows]
        report = ExpertsReport(describe_environment(clock=default_clock(threads)), rows, db, bars)
    text = markdown(report)
    print(text)
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    name = "experts_one_thread" if threads == 1 else "experts"
    print(f"wrote {write_text(out / f'{name}.md', text)}, {save_record(out / f'{name}.json', figures_of(report))}")
    return 0 if all(bar.passed for bar in report.bars) else 1


if __name__ == "__main__":
    sys.exit(main())
