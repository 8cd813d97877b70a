"""The goals of layers on a GPU by the plan's cost model instead of a clock: which it meets, and what holds the others.

    python -m bench.modelled [--docs docs/kernels.md]

Nothing is measured and no GPU is needed: the cards are those of bench.cards.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from bench.cards import CARDS, Card
from bench.markers import put
from bench.shared import geometric_mean
from pyquant import _native, scheme_from_name
from pyquant.bench.model_shapes import KN, MODELS
from pyquant.ops import layer_time, plan
from pyquant.report.render import table

LAYERS: Final[tuple[KN, ...]] = (*MODELS["llama-3-8b"], *MODELS["llama-3-70b"])
LARGE: Final[tuple[KN, ...]] = tuple((k, n) for k, n in LAYERS if k * n >= 8192 * 8192)
# Host time of a remembered choice, `python -m bench.choose`: 60 to 90 ns, here counted as if nothing hid it.
CHOICE_US: Final = 0.1
SLACK: Final = 1.03  # pyquant.auto_'s tolerance: for the same time integers take less memory


@dataclass(frozen=True)
class Bar:
    """A goal: bf16's time over a layer's, `floor` at least.

    scheme    of the layer.   whole  floats in and out: the launch that quantises them counted; else codes come in.
    ms        rows; shapes (K, N): every pair of the two is asked.
    """

    name: str
    card: str
    scheme: str
    whole: bool
    ms: tuple[int, ...]
    shapes: tuple[KN, ...]
    floor: float


@dataclass(frozen=True)
class Case:
    """One size of a bar. row: of the kernel table; '': the framework multiplies dequantised weights. terms: what the
    product's time is spent on, microseconds; arithmetic, loads and memory overlap."""

    m: int
    k: int
    n: int
    ours_us: float
    bf16_us: float
    row: str
    terms: dict[str, float]

    @property
    def gain(self) -> float:
        return self.bf16_us / self.ours_us


@dataclass(frozen=True)
class Verdict:
    """A bar with what the model says of it; the worst of its cases decides."""

    bar: Bar
    cases: tuple[Case, ...]

    @property
    def mean(self) -> float:
        return geometric_mean([case.gain for case in self.cases])

    @property
    def worst(self) -> Case:
        return min(self.cases, key=lambda case: case.gain)

    @property
    def is_met(self) -> bool:
        return self.worst.gain >= self.bar.floor


_H200, _ADA = "NVIDIA H200", "NVIDIA GeForce RTX 4090"
_MANY = (2048, 4096, 8192)
_DEPTH = tuple((k, n) for k, n in LAYERS if k == 4096)
_WEIGHT_ONLY = "W4A16(group_size=128)"
BARS: Final = (
    Bar("W8A8, codes in, K 4096, M >= 2048", _H200, "W8A8", False, _MANY, _DEPTH, 1.60),
    Bar("W8A8Dynamic, whole layer, M >= 2048", _H200, "W8A8Dynamic", True, _MANY, LAYERS, 1.45),
    Bar("W4A8, codes in, M 64", _H200, "W4A8(group_size=None)", False, (64,), LAYERS, 1.9),
    Bar("W4A16 g128, M 1", _H200, _WEIGHT_ONLY, True, (1,), LAYERS, 2.5),
    Bar("W4A16 g128, M 1 to 16, from 8192 x 8192 on", _H200, _WEIGHT_ONLY, True, (1, 2, 4, 8, 16), LARGE, 2.5),
    Bar("W4A16 g128, M 64", _H200, _WEIGHT_ONLY, True, (64,), LAYERS, 1.6),
    Bar("W4A16 g128, M 256", _H200, _WEIGHT_ONLY, True, (256,), LAYERS, 0.95),
    Bar("W4A16 g128, M 4096", _H200, _WEIGHT_ONLY, True, (4096,), LAYERS, 0.85),
    Bar("W8A8, codes in, M >= 2048", _ADA, "W8A8", False, _MANY, LAYERS, 2.5),
    Bar("W8A8Dynamic, whole layer, M >= 2048", _ADA, "W8A8Dynamic", True, _MANY, LAYERS, 2.5),
)

# What a term of the model is reckoned from, by the unit that multiplies where that matters.
_FROM: Final = {
    "launch": "kLaunchUs (csrc/plan/cost.h): an empty launch, which both sides pay",
    "latency": "latency_us (csrc/plan/chip.cpp), which both sides pay",
    "stores": "kStraightSteps, kSwappedSteps (csrc/plan/cost.cpp): counted instructions an output",
    "sums": "the way through memory by which blocks that share K meet (csrc/plan/cost.cpp)",
    "loads": "l2_bytes and port_bytes (csrc/plan/chip.cpp), of decode rows kCopiedBytes (csrc/plan/decode_cost.cpp)",
    "memory": "the card's memory bus",
    "arithmetic decode": "widening (csrc/plan/cost_parts.h), kLanes of it a clock",
    "arithmetic mma": "mma_macs, mma_float_macs (csrc/plan/chip.cpp): mma.sync, half of wgmma's rate; of weight-only "
    "rows weight_only_steps (csrc/plan/cost.cpp) as much",
    "arithmetic wgmma": "wgmma_macs (csrc/plan/chip.cpp)",
    "framework": "kPassUs and the memory bus: weights dequantised for the framework's product",
}
_ENGINES: Final = {row["name"]: row["engine"] for row in _native.kernel_table()}


def case_of(card: Card, scheme: str, whole: bool, k: int, n: int, m: int) -> Case:
    """A size, in the quicker layout of its weights, whatever this build has compiled."""
    entry, problem, int4_range = layer_time.product_of(
        scheme_from_name(scheme), n, k, m, torch.bfloat16, plan.Device(**card.device)
    )
    if not whole:
        problem |= {"x": "s8"}
    asked = [problem | {"w_layout": layout} for layout in ("natural", "blocked128")[: 2 if problem["w"] == "s4" else 1]]
    us, _, row, chosen = min(
        ((*_native.layer_time(entry, one, card.device, False, int4_range, False), one) for one in asked),
        key=lambda found: float(found[0]),
    )
    # the product of a whole layer reads codes
    product = chosen | ({"x": "s8"} if entry == "linear" else {})
    terms = _native.cost_terms(row, product, card.device) if row else {}
    return Case(m, k, n, us, _native.framework_time(m, n, k, "bf16", card.device)[0], row or "", terms)


def verdict(bar: Bar) -> Verdict:
    """All sizes of a bar."""
    card = next(card for card in CARDS if card.name == bar.card)
    return Verdict(bar, tuple(case_of(card, bar.scheme, bar.whole, k, n, m) for k, n in bar.shapes for m in bar.ms))


def held_by(case: Case) -> str:
    """The largest of a case's terms, and the constant that it is reckoned from."""
    if not case.row:
        return _FROM["framework"]
    term = max(case.terms, key=lambda name: case.terms[name])
    key = f"arithmetic {_ENGINES[case.row]}" if term == "arithmetic" else term
    fixed = case.terms["launch"] + case.terms["latency"]
    return f"{term}, {case.terms[term]:.1f} of {case.ours_us:.1f} us ({fixed:.1f} launch and latency): {_FROM[key]}"


@dataclass(frozen=True)
class Worst:
    """The least ratio of auto mode on a grid."""

    gain: float
    scheme: str
    m: int
    k: int
    n: int


def auto_worst(card: Card, schemes: Sequence[str], shapes: Sequence[KN], ms: Sequence[int]) -> Worst:
    """bf16's time over that of what pyquant.auto_ leaves: integers at most SLACK times as slow, else bf16 itself; the
    choice of an integer row counted."""
    found = []
    for scheme in schemes:
        for k, n in shapes:
            for m in ms:
                case = case_of(card, scheme, True, k, n, m)
                is_taken = case.ours_us <= case.bf16_us * SLACK
                gain = case.bf16_us / (case.ours_us + CHOICE_US) if is_taken else 1.0
                found.append(Worst(gain, scheme, m, k, n))
    return min(found, key=lambda worst: worst.gain)


def text(verdicts: Sequence[Verdict]) -> str:
    """The table as Markdown."""
    rows: list[list[Any]] = []
    for v in verdicts:
        worst = v.worst
        said = "met" if v.is_met else f"missed by {100 * (1 - worst.gain / v.bar.floor):.0f} %"
        if not v.is_met and v.mean >= v.bar.floor:
            said += ", met on the mean"
        rows.append(
            [
                v.bar.card.removeprefix("NVIDIA ").removeprefix("GeForce "),
                v.bar.name,
                f"{v.bar.floor:.2f}",
                f"{v.mean:.2f}",
                f"{worst.gain:.2f} (M {worst.m}, K {worst.k}, N {worst.n})",
                said,
                "" if v.is_met else held_by(worst),
            ]
        )
    header = ["card", "layer beside bf16", "goal", "mean", "worst", "", "at the worst most is"]
    return table(header, rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.modelled", description=__doc__)
    parser.add_argument("--docs", metavar="FILE", help="put the table between the markers of this Markdown file")
    args = parser.parse_args(argv)
    print(shown := text([verdict(bar) for bar in BARS]))
    if args.docs:
        put(Path(args.docs), "modelled", shown)
    return 0


if __name__ == "__main__":
    main()
