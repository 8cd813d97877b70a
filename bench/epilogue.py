"""What an epilogue costs a product on a GPU: each activation, residual, zero point and output beside the plain one.

    python -m bench.epilogue [--m M ...] [--kn KxN ...] [--clock faked] [--out DIR]

An int8 product whose rows have scales, with a bias, to bfloat16; then the same with one thing more. Beside them
PyTorch's own activation behind the plain product, and the gate of a feed-forward block, activation(a) * b and its
codes, as three kernels and as one. bench/results/<gpu>/epilogue.json and .md are written after each shape.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.shared import check_counts, device_for, exit_code, folder_name, follow, reason_of
from pyquant import ops
from pyquant.bench.model_shapes import parse_kn
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import make_clock, time_interleaved
from pyquant.report.records.environment import FAKED, Environment
from pyquant.report.render import table

PLAIN: Final = "plain"
GATE: Final = "silu, multiply, quantise: three kernels"
TOKENS: Final = (16, 256, 2048)
LAYERS: Final = ("4096x14336", "14336x4096")


@dataclass(frozen=True)
class EpilogueRow:
    """One shape: microseconds of each epilogue, and over those of the plain product (of a gate: of three kernels)."""

    m: int
    k: int
    n: int
    us: dict[str, float]
    ratio: dict[str, float]


@dataclass(frozen=True)
class EpilogueReport:
    """All shapes, and why one failed: {shape: reason}."""

    environment: Environment
    rows: list[EpilogueRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def candidates(m: int, k: int, n: int, device: str) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    draw = torch.Generator(device).manual_seed(0)

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=draw, device=device).to(dtype)

    def codes(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=draw, device=device).to(torch.int8)

    x, w = codes(m, k), codes(n, k)
    given = {"w_scale": floats(n).abs() / 1e3, "x_scale": floats(m).abs() / 10, "bias": floats(n)}
    product = partial(ops.gemm_s8s8, x, w, **given, out_dtype=torch.bfloat16)
    one = torch.ones(1, device=device)
    gate, up = floats(m, n, dtype=torch.bfloat16), floats(m, n, dtype=torch.bfloat16)
    found: dict[str, Callable[[], Any]] = {PLAIN: product}
    for name in ops.ACTIVATIONS[1:]:
        limits = {"clamp_min": 0.0, "clamp_max": 6.0} if name == "clamp" else {}
        found[name] = partial(product, activation=name, **limits)
    found["residual bf16"] = partial(product, residual=gate)
    found["residual f32"] = partial(product, residual=floats(m, n))
    found["zero points (and sums of w, which layers keep)"] = partial(
        product, x_zero_point=torch.full((m,), 3, dtype=torch.int32, device=device)
    )
    found["to float32"] = partial(product, out_dtype=torch.float32)
    found["to int8"] = partial(product, out_dtype=torch.int8, out_scale=one)
    found["plain, then torch's silu"] = lambda: F.silu(product())
    found["plain, then torch's gelu"] = lambda: F.gelu(product())
    found[GATE] = lambda: ops.quantize_dynamic(F.silu(gate) * up)
    found["the same as one kernel"] = partial(ops.activation_mul_quantize, gate, up, "silu")
    return found


def measure(
    shapes: Sequence[tuple[int, int, int]], device: str, clock: str, rounds: int, report: EpilogueReport
) -> Iterator[str]:
    """Fills the report, shape by shape. -> what was done."""
    for m, k, n in shapes:
        try:
            timings = time_interleaved(
                candidates(m, k, n, device), clock=make_clock(clock), rounds=rounds, min_sample_s=0.002, warm_calls=2
            )
        except RuntimeError as error:
            report.failed[f"{m} x {k} x {n}"] = reason_of(error)
            yield f"{m} x {k} x {n}: failed"
            continue
        names = list(timings.samples)
        base = {name: GATE if name in names[names.index(GATE) :] else PLAIN for name in names}
        us = {name: timings.median_us(name) for name in names}
        report.rows.append(EpilogueRow(m, k, n, us, {name: timings.ratio(name, base[name]) for name in names}))
        yield f"{m} x {k} x {n}: timed"


def markdown(report: EpilogueReport) -> str:
    """A column a shape."""
    parts = ["# What an epilogue costs", report.environment.line()]
    if report.rows:
        lines = [
            [name, *(f"{row.us[name]:.1f} ({row.ratio[name]:.2f}x)" for row in report.rows)]
            for name in report.rows[0].us
        ]
        parts += [
            f"Microseconds; in brackets over the plain product, of the last line over `{GATE}`.",
            table(["", *(f"{row.m} x {row.k} x {row.n}" for row in report.rows)], lines),
        ]
    parts += [f"- {shape} failed: {why}" for shape, why in report.failed.items()]
    return "\n\n".join([*parts, f"Command: `{report.environment.command}`\n"])


def main(argv: list[str] | None = None) -> int:
    """-> 0; 1 when a shape failed; 2 without a GPU, or for wrong words."""
    return exit_code("bench.epilogue", _run, argv)


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.epilogue", description=__doc__.split("\n")[0])
    parser.add_argument("--m", nargs="+", type=int, default=list(TOKENS), help=f"rows (default: {TOKENS})")
    parser.add_argument("--kn", nargs="+", default=list(LAYERS), metavar="KxN", help=f"default: {' '.join(LAYERS)}")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    parser.add_argument("--clock", choices=("cuda-graph", FAKED), default="cuda-graph", help="faked: a dry run")
    parser.add_argument("--out", metavar="DIR", help="default: bench/results/<gpu>")
    args = parser.parse_args(argv)
    check_counts(args, "m", "rounds")
    shapes = [(m, *kn) for kn in map(parse_kn, args.kn) for m in args.m]
    device = device_for(args.clock)
    report = EpilogueReport(describe_environment(device, clock=args.clock))
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    follow("bench.epilogue", measure(shapes, device, args.clock, args.rounds, report), report, markdown, out)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
