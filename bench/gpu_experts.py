"""The experts of a mixture on a GPU, quantised, beside bf16 through torch's grouped product.

    python -m bench.gpu_experts [--model NAME ...] [--tokens T ...] [--clock faked] [--out DIR]

Whole banks of Mixtral, Qwen3-MoE and GPT-OSS under a random routing: sorting, both projections with all that belongs to
them, the gate, the weighted sum. Weight-only banks also with a call for each expert, as if the host knew their rows,
for which it would have to wait. Every result is compared with that of bf16 weights first.
bench/results/<gpu>/gpu_experts.json and .md are written after each bank and number of tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyquant
from bench.shared import check_counts, device_for, exit_code, folder_name, follow, reason_of
from pyquant.core.scheme import QScheme
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import make_clock, time_interleaved
from pyquant.nn.expert_rows import Sorted, added
from pyquant.nn.experts import QExperts, bank_of
from pyquant.report.records.environment import FAKED, Environment
from pyquant.report.render import bullets, page, section, table

BF16: Final = "bf16"
TOKENS: Final = (1, 16, 256, 2048)
# Signal over error, dB, that a scheme has at least on random weights: less is a mistake, not rounding.
SCHEMES: Final[dict[str, tuple[QScheme, float]]] = {
    "W8A8Dynamic": (pyquant.W8A8Dynamic(), 28.0),
    "W4A8Dynamic(128)": (pyquant.W4A8Dynamic(128), 11.0),
    "W8A16": (pyquant.W8A16(), 30.0),
    "W4A16(128)": (pyquant.W4A16(128), 11.0),
}
ONE_BY_ONE: Final = "one by one"


@dataclass(frozen=True)
class Shape:
    """A bank: width of tokens, width between the projections, experts, experts of a token."""

    width: int
    inner: int
    experts: int
    slots: int

    def __str__(self) -> str:
        return f"{self.experts} experts {self.width}x{self.inner}, {self.slots} a token"


MODELS: Final = {
    "Mixtral-8x7B": Shape(4096, 14336, 8, 2),
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8),
    "GPT-OSS-20B": Shape(2880, 2880, 32, 4),
}
SMALL: Final = {"small": Shape(256, 128, 8, 2)}  # for a dry run


@dataclass(frozen=True)
class GpuExpertsRow:
    """One bank at one number of tokens.

    us, ratio  microseconds a call, and how many times as fast as bf16.
    db         signal over error of the result.
    how        the kernels of the first projection in a call outside of a graph, and how many calls there are.
    """

    model: str
    shape: str
    tokens: int
    us: dict[str, float]
    ratio: dict[str, float]
    db: dict[str, float]
    how: dict[str, str]


@dataclass(frozen=True)
class GpuExpertsReport:
    """All rows, and why one failed: {bank and tokens: reason}."""

    environment: Environment
    rows: list[GpuExpertsRow] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether everything ran and gave what it should."""
        return not self.failed and all(not wrong(row) for row in self.rows)


def wrong(row: GpuExpertsRow) -> list[str]:
    """What has more error than its scheme explains."""
    return [name for name, db in row.db.items() if not db >= SCHEMES[name.removesuffix(f", {ONE_BY_ONE}")][1]]


class FloatBank(nn.Module):
    """The same in bf16 through torch's grouped product, as transformers' `grouped_mm` has it."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        draw = torch.Generator(device).manual_seed(0)

        def weights(n: int, k: int) -> nn.Parameter:
            drawn = torch.randn(shape.experts, n, k, generator=draw, device=device, dtype=torch.bfloat16)
            return nn.Parameter(drawn.mul_(k**-0.5), requires_grad=False)

        self.up, self.down = weights(2 * shape.inner, shape.width), weights(shape.width, shape.inner)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        slots = Sorted.of(ids, self.up.shape[0])
        gate, up = torch._grouped_mm(x[slots.tokens(ids.shape[1])], self.up.mT, offs=slots.ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, self.down.mT, offs=slots.ends)
        return added(y, slots.order, weights).to(x.dtype)


def quantised(bank: FloatBank, scheme: QScheme) -> QExperts:
    """A bank of layers with its weights, one expert at a time."""
    pairs = []
    for up, down in zip(bank.up, bank.down, strict=True):
        pair = []
        for matrix in (up, down):
            linear = nn.Linear(*reversed(matrix.shape), bias=False, device="meta")
            linear.weight = nn.Parameter(matrix, requires_grad=False)
            pair.append(pyquant.QLinear.from_float(linear, scheme).eval())
        pairs.append((pair[0], pair[1]))
    rule = pyquant.ExpertsRule(up="up", down="down", gate=lambda _, y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1])
    return bank_of(pairs, rule)


def one_by_one(bank: QExperts, counts: list[int], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The bank with a call for each expert that has rows. counts: how many each has."""
    slots, gate = Sorted.of(ids, len(counts)), cast(Callable[..., Tensor], bank.rule.gate)
    parts = []
    for (up, down), part in zip(bank.experts(), x[slots.tokens(ids.shape[1])].split(counts), strict=True):
        if len(part):
            parts.append(down(gate(None, up(part))))
    return added(torch.cat(parts), slots.order, weights).to(x.dtype)


def candidates(banks: dict[str, nn.Module], shape: Shape, tokens: int, device: str) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name."""
    draw = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, shape.width, generator=draw, device=device, dtype=torch.bfloat16)
    scores = torch.rand(tokens, shape.experts, generator=draw, device=device)
    weights, ids = scores.topk(shape.slots)
    routed = (x, ids, weights / weights.sum(-1, keepdim=True))
    counts = torch.bincount(ids.flatten(), minlength=shape.experts).tolist()
    found: dict[str, Callable[[], Tensor]] = {name: partial(bank, *routed) for name, bank in banks.items()}
    for name, (scheme, _) in SCHEMES.items():
        if scheme.inputs is None and name in banks:
            found[f"{name}, {ONE_BY_ONE}"] = partial(one_by_one, cast(QExperts, banks[name]), counts, *routed)
    return found


def banks_of(shape: Shape, device: str) -> dict[str, nn.Module]:
    """bf16 and every scheme that takes the sizes."""
    base = FloatBank(shape, device)
    banks: dict[str, nn.Module] = {BF16: base}
    for name, (scheme, _) in SCHEMES.items():
        group = scheme.weights.group_size
        if group is None or (shape.width % group == 0 and shape.inner % group == 0):
            banks[name] = quantised(base, scheme)
    return banks


def measure(
    models: Sequence[str], tokens: Sequence[int], clock: str, rounds: int, report: GpuExpertsReport
) -> Iterator[str]:
    """Fills the report, row by row. -> what was done."""
    device = device_for(clock)
    for model in models:
        shape, banks = (MODELS | SMALL)[model], {}
        for count in tokens:
            what = f"{model}, {count} tokens"
            try:
                banks = banks or banks_of(shape, device)
                report.rows.append(row := timed(model, shape, banks, count, device, clock, rounds))
            except RuntimeError as error:  # UnsupportedError among them
                report.failed[what] = reason_of(error)
                yield f"{what}: failed"
                continue
            yield f"{what}: timed" + "".join(f", {name} is WRONG" for name in wrong(row))
        banks.clear()


@torch.inference_mode()
def timed(
    model: str, shape: Shape, banks: dict[str, nn.Module], tokens: int, device: str, clock: str, rounds: int
) -> GpuExpertsRow:
    """One row, on the GPU or, with a faked clock, on the CPU."""
    runs = candidates(banks, shape, tokens, device)
    want = runs[BF16]().float()
    db = {name: _db(run().float(), want) for name, run in runs.items() if name != BF16}
    timings = time_interleaved(runs, clock=make_clock(clock), rounds=rounds, min_sample_s=0.002, warm_calls=2)
    infos = {
        name: cast(Any, bank).kernel_info(tokens * shape.slots)["up"] for name, bank in banks.items() if name != BF16
    }
    return GpuExpertsRow(
        model,
        str(shape),
        tokens,
        {name: timings.median_us(name) for name in runs},
        {name: timings.ratio(BF16, name) for name in runs},
        db,
        {name: f"{info.kernel.removeprefix('gemm_')}: {info.reason}" for name, info in infos.items()},
    )


def _db(got: Tensor, want: Tensor) -> float:
    return float(20 * torch.log10(want.norm() / (got - want).norm()))


def markdown(report: GpuExpertsReport) -> str:
    """A table for each bank."""
    parts = ["# Experts on a GPU", report.environment.line()]
    if report.rows:
        parts.append(
            f"Microseconds a call of a whole bank; in brackets how many times as fast as {BF16} through torch's "
            f"grouped product. `{ONE_BY_ONE}`: a call for each expert, whose rows the host knows without waiting. "
            "dB: signal over error. Kernels are those of the first projection in a call outside of a graph."
        )
    for model in dict.fromkeys(row.model for row in report.rows):
        rows = [row for row in report.rows if row.model == model]
        names = [name for name in rows[0].us if name != BF16]
        lines = [
            [row.tokens, f"{row.us[BF16]:.1f}", *(f"{row.us[n]:.1f} ({row.ratio[n]:.2f}x)" for n in names)]
            for row in rows
        ]
        told = [f"{n}: {min(row.db[n] for row in rows):.1f} dB" for n in names]
        ways = [f"{row.tokens} tokens, {name}: {how}" for row in rows for name, how in row.how.items()]
        parts.append(
            section(
                f"{model}: {rows[0].shape}",
                "\n\n".join((table(["tokens", BF16, *names], lines), "; ".join(told), bullets(ways))),
            )
        )
    parts.append(bullets(f"{what} failed: {why}" for what, why in report.failed.items()))
    return page([*parts, f"Command: `{report.environment.command}`"])


def main(argv: list[str] | None = None) -> int:
    """-> 0; 1 when a bank failed or gave something else; 2 without a GPU, or for wrong words."""
    return exit_code("bench.gpu_experts", _run, argv)


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_experts", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add(
        "--model",
        nargs="+",
        choices=[*MODELS, *SMALL],
        default=[*MODELS],
        metavar="NAME",
        help="default: all but small",
    )
    add("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="T", help=f"default: {TOKENS}")
    add("--rounds", type=int, default=7, help="interleaved rounds (default: 7)")
    add("--clock", choices=("cuda-graph", FAKED), default="cuda-graph", help="faked: a dry run")
    add("--out", metavar="DIR", help="default: bench/results/<gpu>")
    args = parser.parse_args(argv)
    check_counts(args, "tokens", "rounds")
    report = GpuExpertsReport(describe_environment(device_for(args.clock), clock=args.clock))
    out = Path(args.out or Path("bench/results") / folder_name(report.environment))
    follow(
        "bench.gpu_experts", measure(args.model, args.tokens, args.clock, args.rounds, report), report, markdown, out
    )
    return 0 if report.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
