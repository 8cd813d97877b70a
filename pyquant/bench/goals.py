"""The goals of the GPU kernels, each a ratio to a named peer of the same run, and what a set of rows says about them.

A goal that a run cannot answer is "not measured", never passed: also when our own candidate did not run at a shape
where the peer did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyquant.bench.kernels.layers import CHAIN_APART, CHAIN_CODES, codes_name, layer_name
from pyquant.bench.kernels.others import BNB_4BIT, HUMMING_W4A8, HUMMING_W4A16
from pyquant.bench.kernels.rows import CHOSEN, VLLM
from pyquant.bench.kernels.torch_own import INT4PACK, INT_MM, LINEAR_BF16, MM_BF16, SCALED_MM
from pyquant.bench.model_shapes import MODELS
from pyquant.measure.timing import geometric_mean
from pyquant.results.bench import GemmRow, Verdict

Where = Callable[[int, int, int], bool]

W8A8_CODES, W4A8_CODES = codes_name("W8A8"), codes_name("W4A8(group_size=None)")
W4A16, W8A8_DYNAMIC = layer_name("W4A16(group_size=128)"), layer_name("W8A8Dynamic")
BF16 = layer_name("FP16(dtype=bfloat16)")


@dataclass(frozen=True)
class Goal:
    """ours: candidates of which the fastest counts; where: the shapes (m, k, n); worst: the least ratio, not a mean."""

    number: str
    name: str
    ours: tuple[str, ...]
    peer: str
    floor: float
    stretch: float
    where: Where
    worst: bool = False


def _llama70(m: int, k: int, n: int) -> bool:
    return m >= 2048 and (k, n) in MODELS["llama-3-70b"]


def _wide(low: int, high: int, least: int = 4096 * 4096) -> Where:
    return lambda m, k, n: low <= m <= high and k * n >= least


_BIG, _EVERY = 1 << 30, 8192 * 8192
_DECODE = _wide(1, 16, 64_000_000)

GOALS: tuple[Goal, ...] = (
    Goal("1", "W8A8 with scales and bias, M >= 2048, Llama-70B", (W8A8_CODES,), MM_BF16, 1.60, 1.75, _llama70),
    Goal("2", "the same", (W8A8_CODES,), INT_MM, 1.25, 1.5, _llama70),
    Goal("3", "the same", (W8A8_CODES,), SCALED_MM, 0.97, 1.05, _llama70),
    Goal("4", "W8A8, M = 16..512, N = 4096..8192", (CHOSEN,), VLLM, 1.2, 1.45,
         lambda m, k, n: 16 <= m <= 512 and 4096 <= n <= 8192),
    Goal("5", "W8A8 decode, M = 1..16, weights >= 64 MB", (W8A8_CODES,), MM_BF16, 1.6, 1.85, _DECODE),
    Goal("6", "W4A16 g128, M = 1..16, >= 8192 x 8192", (W4A16,), MM_BF16, 2.5, 3.2, _wide(1, 16, _EVERY)),
    Goal("7", "the same", (W4A16,), HUMMING_W4A16, 1.05, 1.25, _wide(1, 16, _EVERY)),
    Goal("8a", "W4A16 g128, M = 64", (W4A16,), MM_BF16, 1.6, 2.2, _wide(64, 64)),
    Goal("8b", "W4A16 g128, M = 256", (W4A16,), MM_BF16, 0.95, 1.1, _wide(256, 256)),
    Goal("8c", "W4A16 g128, M = 4096", (W4A16,), MM_BF16, 0.85, 0.95, _wide(4096, 4096)),
    Goal("9", "W4A8 per channel, M = 64..256", (W4A8_CODES,), MM_BF16, 1.9, 2.3, _wide(64, 256)),
    Goal("10", "the same", (W4A8_CODES,), HUMMING_W4A8, 1.05, 1.3, _wide(64, 256)),
    Goal("11", "W4A8 per channel, M >= 2048", (W4A8_CODES,), W8A8_CODES, 0.85, 0.95, _wide(2048, _BIG)),
    Goal("12a", "W4A16 g128, M = 16", (W4A16,), INT4PACK, 1.3, 2.0, _wide(16, 16)),
    Goal("12b", "the same", (W4A16,), BNB_4BIT, 3.0, 6.0, _wide(16, 16)),
    Goal("13", "two GEMMs with int8 between them, M >= 1024", (CHAIN_CODES,), CHAIN_APART, 1.10, 1.2,
         _wide(1024, _BIG)),
    Goal("14", "QLinear W8A8Dynamic from bf16 to bf16, M >= 2048", (W8A8_DYNAMIC,), LINEAR_BF16, 1.45, 1.65,
         _wide(2048, _BIG)),
    Goal("15", "never slower: the better of W8A8Dynamic and the bf16 layer, worst shape", (W8A8_DYNAMIC, BF16),
         LINEAR_BF16, 0.97, 1.0, lambda m, k, n: True, worst=True),
)  # fmt: skip


def verdicts(rows: Sequence[GemmRow]) -> list[Verdict]:
    """A line for every goal, and for two that are no ratio: 5b, the share of the copy bandwidth, and 17, exact bits.

    Ratios are median time of the peer over median time of ours, geometric mean over the shapes where both ran.
    """
    us = {(row.m, row.k, row.n, row.candidate): row.median_us for row in rows}
    found = [*(_verdict(goal, rows, us) for goal in GOALS), _bandwidth(rows), _bits(rows)]
    return sorted(found, key=lambda verdict: int(verdict.goal.rstrip("abc")))


def _verdict(goal: Goal, rows: Sequence[GemmRow], us: dict[tuple[int, int, int, str], float]) -> Verdict:
    shapes = [s for s in dict.fromkeys((row.m, row.k, row.n) for row in rows) if goal.where(*s)]
    peers = [s for s in shapes if (*s, goal.peer) in us]
    ratios, missing = [], 0
    for shape in peers:
        keys = [(*shape, name) for name in goal.ours]
        times = [us[key] for key in keys if key in us]
        peer = (*shape, goal.peer)
        if times:
            ratios.append(us[peer] / min(times))
        else:
            missing += 1
    measured: float | None = None
    if not shapes:
        note = "no shape of this goal was measured"
    elif not peers:
        note = "the peer did not run"
    elif missing:
        note = f"ours did not run at {missing} of {len(peers)} shapes"
    else:
        measured = min(ratios) if goal.worst else geometric_mean(ratios)
        note = f"{'worst' if goal.worst else 'geometric mean'} of {len(ratios)} shapes"
        note += f"; the peer ran at {len(peers)} of {len(shapes)}" if len(peers) < len(shapes) else ""
    count = 0 if measured is None else len(ratios)
    return Verdict(goal.number, goal.name, goal.peer, measured, goal.floor, goal.stretch, count, note)


def _bandwidth(rows: Sequence[GemmRow]) -> Verdict:
    shares = [
        row.of_floor
        for row in rows
        if row.candidate == W8A8_CODES and _DECODE(row.m, row.k, row.n) and row.of_floor and row.floor_kind == "bytes"
    ]
    measured = geometric_mean(shares) if shares else None
    note = f"geometric mean of {len(shares)} shapes" if shares else "no shape of this goal was measured with its floor"
    return Verdict(
        "5b", "the same as 5: share of the copy bandwidth", "copy, same run", measured, 0.75, 0.85, len(shares), note
    )


def _bits(rows: Sequence[GemmRow]) -> Verdict:
    checked = [row for row in rows if row.exact is not None]
    wrong = sum(row.exact is False for row in checked)
    measured = None if not checked else 1.0 - wrong / len(checked)
    note = f"{wrong} of {len(checked)} results differ" if checked else "nothing with an exact contract was measured"
    return Verdict(
        "17", "integer results equal the specification", "exact reference", measured, 1.0, 1.0, len(checked), note
    )
