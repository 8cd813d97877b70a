"""Layers of Llama 3 8B on a GPU, quantised with one line, against bf16: whole forward passes, alone and in CUDA graphs.

    python -m bench.decoder [--layers L] [--tokens T ...] [--out DIR]

Random weights of `transformers`, nothing is downloaded. Writes bench/results/<gpu>/decoder.json and decoder.md.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import pyquant
from bench.shared import folder_name
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import make_clock, time_interleaved
from pyquant.report.records.environment import Environment
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import save_record
from pyquant.report.render import table, write_text

SCHEMES: Final = ("W8A8Dynamic", "W4A8Dynamic", "W8A16", "W4A16(group_size=128)")
FLOAT: Final = "bf16"
TOKENS: Final = (1, 16, 256, 2048)
SIZES: Final = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
CLOCKS: Final = {"cuda-graph": "in a CUDA graph", "cuda-events": "call by call"}


@dataclass(frozen=True)
class DecoderRow:
    """One number of tokens by one clock: milliseconds of each variant, and bf16's time over each."""

    tokens: int
    clock: str
    ms: dict[str, float]
    speedup: dict[str, float]


@dataclass(frozen=True)
class DecoderReport:
    """All rows. db: the logits' signal over their error against bf16; mib: of weights; seconds: to quantise;
    failed: variant -> reason."""

    environment: Environment
    layers: int
    rows: list[DecoderRow]
    db: dict[str, float]
    mib: dict[str, float]
    seconds: dict[str, float]
    failed: dict[str, str]


def decoder(layers: int, sizes: Mapping[str, int] = SIZES, device: str = "cpu") -> nn.Module:
    """So many layers of Llama in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=32000, use_cache=False, **sizes)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()  # type: ignore[no-any-return]


def variants(model: nn.Module) -> dict[str, Callable[[], nn.Module]]:
    """How each is made from the float model; its head stays as it is."""

    def fused(scheme: str) -> nn.Module:
        made = quantised(scheme)
        pyquant.fuse_(made)
        return made

    def quantised(scheme: str) -> nn.Module:
        return pyquant.quantize_(copy.deepcopy(model), {"*lm_head*": None, "*": scheme})

    made: dict[str, Callable[[], nn.Module]] = {FLOAT: lambda: model}
    made |= {scheme: partial(quantised, scheme) for scheme in SCHEMES}
    return made | {f"{SCHEMES[0]}, fused": partial(fused, SCHEMES[0])}


def measure(
    model: nn.Module, tokens: tuple[int, ...], clocks: tuple[str, ...], rounds: int
) -> tuple[list[DecoderRow], dict[str, float], dict[str, float], dict[str, float], dict[str, str]]:
    """Every variant at every number of tokens by every clock. -> rows, db, mib, seconds, failed."""
    device = next(model.parameters()).device
    built: dict[str, nn.Module] = {}
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    ids = {t: torch.randint(0, 32000, (1, t), device=device) for t in tokens}
    logits: dict[str, torch.Tensor] = {}
    for name, make in variants(model).items():
        began = time.perf_counter()
        try:
            built[name] = make()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds[name] = time.perf_counter() - began
            with torch.inference_mode():
                logits[name] = built[name](input_ids=ids[tokens[-1]]).logits
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            failed[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
            built.pop(name, None)
    true = logits[FLOAT].double()
    db = {
        n: float(10 * torch.log10(true.square().sum() / (y - true).square().sum()))
        for n, y in logits.items()
        if n != FLOAT
    }
    mib = {name: _bytes(one) / 2**20 for name, one in built.items()}
    rows = []
    for t in tokens:
        for clock in clocks:
            runs: dict[str, Callable[[], Any]] = {n: partial(one, input_ids=ids[t]) for n, one in built.items()}
            timings = time_interleaved(runs, clock=make_clock(clock), rounds=rounds, min_sample_s=0.005, warm_calls=2)
            ms = {name: timings.median_us(name) / 1e3 for name in runs}
            rows.append(DecoderRow(t, clock, ms, {name: timings.ratio(FLOAT, name) for name in runs}))
    return rows, db, mib, seconds, failed


def _bytes(model: nn.Module) -> int:
    held = {t.data_ptr(): t.nbytes for t in model.state_dict().values() if isinstance(t, torch.Tensor)}
    return sum(held.values())


def markdown(report: DecoderReport) -> str:
    """A table a clock, and what the logits lose."""
    parts = [f"# {report.layers} layers of Llama 3 8B", report.environment.line()]
    for clock in dict.fromkeys(row.clock for row in report.rows):
        mine = [row for row in report.rows if row.clock == clock]
        names = list(mine[0].ms)
        lines = [[row.tokens, *(f"{row.ms[n]:.3f} ({row.speedup[n]:.2f}x)" for n in names)] for row in mine]
        parts += [
            f"Milliseconds {CLOCKS.get(clock, clock)}; in brackets bf16's over it:",
            table(["tokens", *names], lines),
        ]
    parts.append(table(["", *report.mib], [["MiB", *(f"{v:.0f}" for v in report.mib.values())]]))
    parts.append(table(["logits", *report.db], [["dB", *(f"{v:.1f}" for v in report.db.values())]]))
    took = {name: value for name, value in report.seconds.items() if name != FLOAT}
    parts.append(table(["quantised in", *took], [["s", *(f"{v:.2f}" for v in took.values())]]))
    parts += [f"- {name} failed: {why}" for name, why in report.failed.items()]
    return "\n\n".join([*parts, f"Command: `{report.environment.command}`\n"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decoder", description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4, metavar="L", help="default: 4")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="T", help=f"default: {TOKENS}")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    parser.add_argument("--out", metavar="DIR", help="default: bench/results/<gpu>")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.decoder: torch sees no CUDA device", file=sys.stderr)
        return 2
    environment = describe_environment("cuda", clock="cuda-graph")
    found = measure(decoder(args.layers, device="cuda"), tuple(args.tokens), tuple(CLOCKS), args.rounds)
    report = DecoderReport(environment, args.layers, *found)
    out = Path(args.out or Path("bench/results") / folder_name(environment))
    text = markdown(report)
    print(text)
    print(f"wrote {write_text(out / 'decoder.md', text)}, {save_record(out / 'decoder.json', figures_of(report))}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
