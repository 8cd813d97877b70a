"""Layers of Llama 3 8B on a GPU, quantised with one line, against bf16: whole forward passes, alone and in CUDA graphs.

    python -m bench.decoder [--layers L] [--tokens T ...] [--clock faked] [--allow-missing] [--out DIR]

Random weights of `transformers`, nothing is downloaded. A line says when each variant was built and each number of
tokens timed, and bench/results/<gpu>/decoder.json and decoder.md are written after each: a killed run keeps them.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import pyquant
from bench.shared import check_counts, device_for, exit_code, folder_name, follow, reason_of
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import make_clock, time_interleaved
from pyquant.report.records.environment import FAKED, Environment
from pyquant.report.render import table

SCHEMES: Final = ("W8A8Dynamic", "W4A8Dynamic", "W8A16", "W4A16(group_size=128)")
FLOAT: Final = "bf16"
TOKENS: Final = (1, 16, 256, 2048)
SIZES: Final = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
DRY_SIZES: Final = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
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
    rows: list[DecoderRow] = field(default_factory=list)
    db: dict[str, float] = field(default_factory=dict)
    mib: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


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

    def merged(scheme: str) -> nn.Module:
        return pyquant.merge_(fused(scheme))

    def quantised(scheme: str) -> nn.Module:
        return pyquant.quantize_(copy.deepcopy(model), {"*lm_head*": None, "*": scheme})

    made: dict[str, Callable[[], nn.Module]] = {FLOAT: lambda: model}
    made |= {scheme: partial(quantised, scheme) for scheme in SCHEMES}
    made[f"{SCHEMES[0]}, fused"] = partial(fused, SCHEMES[0])
    return made | {f"{SCHEMES[0]}, fused, merged": partial(merged, SCHEMES[0])}


def forward(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits, as `generate` has them computed: merged layers share a product under no_grad alone (docs/layers.md)."""
    with torch.inference_mode(False), torch.no_grad():
        return model(input_ids=ids).logits  # type: ignore[no-any-return]


def measure(
    model: nn.Module, tokens: Sequence[int], clocks: Sequence[str], rounds: int, report: DecoderReport
) -> Iterator[str]:
    """Fills the report with every variant at every number of tokens by every clock. -> what was done, step by step."""
    device = next(model.parameters()).device
    ids = {t: torch.randint(0, 32000, (1, t), device=device) for t in tokens}
    built: dict[str, nn.Module] = {}
    true: torch.Tensor | None = None
    for name, make in variants(model).items():
        began = time.perf_counter()
        try:
            one = make()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            report.seconds[name] = time.perf_counter() - began
            logits = forward(one, ids[tokens[-1]]).double()
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            report.failed[name] = reason_of(error)
            yield f"{name}: failed after {time.perf_counter() - began:.1f} s: {report.failed[name]}"
            continue
        built[name] = one
        report.mib[name] = _bytes(one) / 2**20
        if true is None:
            true = logits
        else:
            report.db[name] = float(10 * torch.log10(true.square().sum() / (logits - true).square().sum()))
        yield f"{name}: built in {report.seconds[name]:.1f} s, run after {time.perf_counter() - began:.1f} s"
    for t in tokens:
        for clock in clocks:
            began = time.perf_counter()
            one_clock, runs = make_clock(clock), {}
            for name, one in built.items():
                run: Callable[[], Any] = partial(forward, one, ids[t])
                try:
                    run()
                    one_clock.seconds(run, 1)
                except RuntimeError as error:  # such as a graph that cannot be captured
                    report.failed[f"{name}, {t} tokens, {clock}"] = reason_of(error)
                else:
                    runs[name] = run
            if FLOAT not in runs:
                yield f"{t} tokens {CLOCKS.get(clock, clock)}: {FLOAT} failed"
                continue
            timings = time_interleaved(runs, clock=one_clock, rounds=rounds, min_sample_s=0.005, warm_calls=2)
            ms = {name: timings.median_us(name) / 1e3 for name in runs}
            report.rows.append(DecoderRow(t, clock, ms, {name: timings.ratio(FLOAT, name) for name in runs}))
            yield f"{t} tokens {CLOCKS.get(clock, clock)}: timed in {time.perf_counter() - began:.1f} s"


def _bytes(model: nn.Module) -> int:
    held = {t.data_ptr(): t.nbytes for t in model.state_dict().values() if isinstance(t, torch.Tensor)}
    return sum(held.values())


def _cell(row: DecoderRow, name: str) -> str:
    return f"{row.ms[name]:.3f} ({row.speedup[name]:.2f}x)" if name in row.ms else "-"


def markdown(report: DecoderReport) -> str:
    """A table a clock, and what the logits lose."""
    parts = [f"# {report.layers} layers of Llama 3 8B", report.environment.line()]
    for clock in dict.fromkeys(row.clock for row in report.rows):
        mine = [row for row in report.rows if row.clock == clock]
        names = list(dict.fromkeys(name for row in mine for name in row.ms))
        lines = [[row.tokens, *(_cell(row, name) for name in names)] for row in mine]
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
    """-> 0; 1 when a variant failed; 2 without a GPU or transformers, or for wrong words."""
    return exit_code("bench.decoder", _run, argv)


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decoder", description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4, metavar="L", help="default: 4")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="T", help=f"default: {TOKENS}")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    parser.add_argument("--clock", choices=(*CLOCKS, FAKED), help=f"default: {' and '.join(CLOCKS)}; faked: a dry run")
    parser.add_argument("--allow-missing", action="store_true", help="forgive that transformers is not installed")
    parser.add_argument("--out", metavar="DIR", help="default: bench/results/<gpu>")
    args = parser.parse_args(argv)
    check_counts(args, "layers", "tokens", "rounds")
    device = device_for(args.clock)
    if importlib.util.find_spec("transformers") is None:
        print("bench.decoder: nothing is measured: transformers is not installed", file=sys.stderr)
        return 0 if args.allow_missing else 2
    clocks = (args.clock,) if args.clock else tuple(CLOCKS)
    environment = describe_environment(device, clock=args.clock or "cuda-graph")
    report = DecoderReport(environment, args.layers)
    out = Path(args.out or Path("bench/results") / folder_name(environment))
    began = time.perf_counter()
    model = decoder(args.layers, SIZES if device == "cuda" else DRY_SIZES, device)
    print(f"bench.decoder: the float model: made in {time.perf_counter() - began:.1f} s", flush=True)
    follow("bench.decoder", measure(model, args.tokens, clocks, args.rounds, report), report, markdown, out)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
