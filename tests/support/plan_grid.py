"""What the plan's tests and pins ask about: pretended GPUs, operand types, sizes; and walks over neighbouring sizes."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cards import CARDS
from pyquant.core.patches import Patches
from pyquant.ops.plan import image_rows

# A100, A40, L40S, H200, B200, RTX 5090: multiprocessors, the peak of the memory bus in GB/s and shared memory of a
# block in KiB, from their data sheets.
DEVICES: dict[int, dict[str, Any]] = {
    sm: {"sm": sm, "sm_count": count, "dram_gbps": gbps, "shared_bytes": kib << 10}
    | ({"name": "NVIDIA GeForce RTX 5090", "clock_mhz": 2407} if sm == 120 else {})
    for sm, count, gbps, kib in (
        (80, 108, 2039, 163),
        (86, 84, 696, 99),
        (89, 142, 864, 99),
        (90, 132, 4800, 227),
        (100, 148, 8000, 227),
        (120, 170, 1792, 99),
    )
}
# Every pair of operand types that a layer can ask for.
PAIRS: dict[str, dict[str, Any]] = {
    "s8s8": {},
    "u8s8": {"x": "u8"},
    "s8s4": {"w": "s4"},
    "s8s4 group": {"w": "s4", "group_size": 128},
    "s8s4 blocked": {"w": "s4", "w_layout": "blocked128"},
    "s8s4 blocked group": {"w": "s4", "w_layout": "blocked128", "group_size": 128},
    "s8s4 steps": {"w": "s4", "step_size": 128},
    "s8s4 blocked steps": {"w": "s4", "w_layout": "blocked128", "step_size": 128},
    "s4s4": {"x": "s4", "w": "s4"},
    "s4s4 packed": {"x": "s4", "w": "s4", "x_packed": True},
    "f16f16": {"x": "f16", "w": "f16"},
    "bf16bf16": {"x": "bf16", "w": "bf16"},
    "f16s8": {"x": "f16", "w": "s8"},
    "bf16s8": {"x": "bf16", "w": "s8"},
    "f16s4 group": {"x": "f16", "w": "s4", "group_size": 128},
    "bf16s4 group": {"x": "bf16", "w": "s4", "group_size": 128},
}
# Products of many experts, which share the M rows.
EXPERTS: dict[str, dict[str, Any]] = {
    "s8s8 experts": {"experts": 64},
    "s8s8 few experts": {"experts": 8},
    "s8s4 experts": {"w": "s4", "experts": 64},
    "s8s4 few experts": {"w": "s4", "experts": 8},
    "s8s4 blocked experts": {"w": "s4", "w_layout": "blocked128", "experts": 64},
    "s8s4 blocked few experts": {"w": "s4", "w_layout": "blocked128", "experts": 8},
    "s8s4 group experts": {"w": "s4", "group_size": 128, "experts": 64},
    "s8s4 blocked group experts": {"w": "s4", "w_layout": "blocked128", "group_size": 128, "experts": 64},
    "s8s4 blocked group few experts": {"w": "s4", "w_layout": "blocked128", "group_size": 128, "experts": 8},
    "s8s4 blocked step experts": {"w": "s4", "w_layout": "blocked128", "step_size": 128, "experts": 64},
    "s8s4 blocked step few experts": {"w": "s4", "w_layout": "blocked128", "step_size": 128, "experts": 8},
    "bf16s8 experts": {"x": "bf16", "w": "s8", "experts": 64},
    "bf16s8 few experts": {"x": "bf16", "w": "s8", "experts": 8},
    "bf16s4 group experts": {"x": "bf16", "w": "s4", "group_size": 128, "experts": 64},
    "bf16s4 group few experts": {"x": "bf16", "w": "s4", "group_size": 128, "experts": 8},
}
# Convolutions of ResNet-50 and a stem: pixels of a side, channels, output channels, kernel, stride.
CONVS = (
    (56, 64, 64, 3, 1),
    (28, 128, 128, 3, 1),
    (14, 256, 256, 3, 1),
    (7, 512, 512, 3, 1),
    (56, 128, 128, 3, 2),
    (56, 256, 512, 1, 2),
    (224, 3, 64, 7, 2),
)
BATCHES = (1, 8, 64, 256)
# N and K of the walks over M and K.
WIDTHS = (256, 1024, 4096, 8192, 11008, 28672)
DEPTHS = (256, 1024, 4096, 8192)
# N and K of more walks over M: of real layers, then drawn, every magnitude alike.
LAYER_WIDTHS = (768, 1536, 3072, 5120, 6144, 10240, 14336, 57344)
LAYER_DEPTHS = (768, 1536, 3072, 5120, 14336, 28672)
DRAWN = 32
MS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 96, 128, 129, 256, 512, 1024, 4096, 16384)
SHAPES = ((4096, 4096), (28672, 8192), (1024, 4096), (256, 256))  # N, K of the pinned choices
CARD_PAIRS = ("s8s8", "s8s4", "s8s4 group", "s4s4 packed", "f16s8", "f16s4 group")
CARD_SHAPES = ((4096, 4096), (14336, 4096))
CARD_MS = (1, 16, 64, 256, 2048, 8192)
STEP = 1.3  # the largest accepted ratio between neighbours
FALL = 0.9  # a larger problem may be predicted to take this part of its neighbour's time


@dataclass(frozen=True)
class Cliff:
    """A step of the predicted time above STEP from one size to the next, at the worst of a device's problems."""

    sm: int
    pair: str
    size: str
    at: int
    ratio: float
    problem: str
    before: str
    after: str

    @property
    def where(self) -> str:
        return f"{self.pair}: {self.size} = {self.at} on sm{self.sm}"

    def __str__(self) -> str:
        return f"{self.where}: {self.ratio:.2f} times at {self.problem}, {self.before} -> {self.after}"


@functools.cache
def steps(native: Any, sm: int, pair: str) -> tuple[list[Cliff], list[str]]:
    """(cliffs, falls) of a device and a pair of types. falls: where a larger problem is predicted to take less time
    than its neighbour, by more than 10 %, which happens where K is divided into other shares."""
    worst: dict[tuple[str, int], Cliff] = {}
    falls = []
    types = asked(native, DEVICES[sm], pair)
    for problem, size, values in _walks():
        found = native.sweep({**problem, **types, "out": "f16"}, DEVICES[sm], size, values)
        for value, before, after in zip(values[1:], found, found[1:]):
            if before[0] is None or after[0] is None:
                continue
            ratio = after[1] / before[1]
            if ratio < FALL:
                at = " ".join(f"{k.upper()} {v}" for k, v in problem.items() if k != size)
                falls.append(
                    f"{ratio:.2f} times at {at}, {size.upper()} = {value}: {_short(before)} -> {_short(after)}"
                )
            if ratio > max(STEP, worst[size, value].ratio if (size, value) in worst else 0.0):
                text = " ".join(f"{k.upper()} {v}" for k, v in problem.items() if k != size)
                worst[size, value] = Cliff(sm, pair, size.upper(), value, ratio, text, _short(before), _short(after))
    return sorted(worst.values(), key=lambda c: (c.size, c.at)), falls


def cliffs(native: Any, sm: int, pair: str) -> list[Cliff]:
    """The cliffs of a device and a pair of types, by size and place."""
    return steps(native, sm, pair)[0]


def falls(native: Any, sm: int, pair: str) -> list[str]:
    """The falls of a device and a pair of types, the deepest first."""
    return sorted(steps(native, sm, pair)[1])


def asked(native: Any, device: dict[str, Any], pair: str) -> dict[str, Any]:
    """What a layer with operands of `pair` asks of the plan. Activations two to a byte that only the byte-wise kernel
    reads are laid out a byte each before (csrc/plan/route.cpp)."""
    problem = (PAIRS | EXPERTS)[pair]
    if problem.get("x_packed"):
        as_they_lie = native.sweep({"n": 4096, "k": 4096, **problem, "out": "f16"}, device, "m", [128])
        if as_they_lie[0][0] == "gemm_simt_any":
            return {key: value for key, value in problem.items() if key != "x_packed"}
    return problem


def drawn(count: int, seed: int) -> list[tuple[int, int]]:
    """N, a multiple of 16 from 128 to 32768, and K, of 128 from 256 to 32768."""
    coin = random.Random(seed)
    return [(16 * round(2 ** (3 + 8 * coin.random())), 128 * round(2 ** (1 + 7 * coin.random()))) for _ in range(count)]


def _walks() -> Iterator[tuple[dict[str, int], str, list[int]]]:
    for n in WIDTHS:
        for k in DEPTHS:
            yield {"m": 1, "n": n, "k": k}, "m", list(range(1, 131))
        for m in (1, 16, 64, 128, 512):
            # K in steps that every layout takes, groups of 128 among them, and that are small beside K itself.
            yield {"m": m, "n": n, "k": 512}, "k", list(range(512, 8193, 128))
    for n, k in (*itertools.product(LAYER_WIDTHS, LAYER_DEPTHS), *drawn(DRAWN, 1)):
        yield {"m": 1, "n": n, "k": k}, "m", list(range(1, 131))


def _short(choice: tuple[str, float]) -> str:
    return choice[0].removeprefix("gemm_")


def choices(native: Any, device: dict[str, Any], pair: str, n: int, k: int, ms: Sequence[int] = MS) -> str:
    """'1-16 decode_..., 17-96 sm80_...': the row for each M, runs of the same row together."""
    problem = {"n": n, "k": k, **asked(native, device, pair), "out": "f16"}
    # Experts of few rows each do not round integer weights under floats (csrc/plan/route.cpp).
    few = [m for m in ms if m <= 16 * problem["experts"]] if "bf16" in pair and "experts" in problem else []
    found = native.sweep(problem | {"exact_weights": True}, device, "m", few) if few else []
    found += native.sweep(problem, device, "m", list(ms[len(few) :]))
    runs: list[tuple[int, int, str]] = []
    for m, (name, _) in zip(ms, found):
        short = "nothing" if name is None else name.removeprefix("gemm_")
        if runs and runs[-1][2] == short:
            runs[-1] = (runs[-1][0], m, short)
        else:
            runs.append((m, m, short))
    return ", ".join(f"{a}-{b} {name}" if a != b else f"{a} {name}" for a, b, name in runs)


def conv_problem(batch: int, size: int, channels: int, n: int, kernel: int, stride: int) -> dict[str, Any]:
    """What a convolution over square images, padded by half of its kernel, asks of the plan."""
    patches = Patches.make(kernel, stride)
    full = size + kernel // 2 * 2
    image = image_rows(patches, full, full, channels)
    m, k = batch * image["out_height"] * image["out_width"], channels * kernel * kernel
    align = math.gcd(16, channels)
    return {"m": m, "n": n, "k": k, "ldx": channels, "x_align": align, "x": "s8", "out": "f16", "image": image}


def conv_choices(native: Any, device: dict[str, Any], conv: tuple[int, int, int, int, int]) -> str:
    """'batch 1 given sm80_s8s8_conv_...': the form of the images and the row, for each batch."""
    found = (native.route("conv", conv_problem(b, *conv), device, only_compiled=False)[:2] for b in BATCHES)
    return ", ".join(f"batch {b} {form} {_short((name, 0))}" for b, (form, name) in zip(BATCHES, found))


def lines(native: Any) -> Iterator[str]:
    """The lines of tests/plan/pinned.txt: choice (the row for every M of MS), conv (form and row for every batch of
    BATCHES), card (rows for cards by name, on a smaller grid), cliff (predicted steps above STEP between neighbouring
    M or K), fall (predicted times that shrink below FALL as a size grows), unreached (selectable rows that no problem
    of a wide grid gets)."""
    for sm in DEVICES:
        for pair in PAIRS | EXPERTS:
            for n, k in SHAPES:
                yield f"choice sm{sm} {pair} N {n} K {k}: {choices(native, DEVICES[sm], pair, n, k)}"
    for sm in DEVICES:
        for conv in CONVS:
            size, channels, n, kernel, stride = conv
            what = f"{kernel}x{kernel}/{stride} {channels} to {n} of {size}x{size}"
            yield f"conv sm{sm} {what}: {conv_choices(native, DEVICES[sm], conv)}"
    for card in CARDS:
        for pair in CARD_PAIRS:
            for n, k in CARD_SHAPES:
                yield f"card {card.name} {pair} N {n} K {k}: {choices(native, card.device, pair, n, k, CARD_MS)}"
    for sm in DEVICES:
        for pair in PAIRS:
            for cliff in cliffs(native, sm, pair):
                yield f"cliff {cliff}"
    for sm in DEVICES:
        for pair in PAIRS:
            if found := falls(native, sm, pair):
                yield f"fall {pair} on sm{sm}: {len(found)}, the deepest {found[0]}"
    for name in unreached(native):
        yield f"unreached {name}"


def unreached(native: Any) -> list[str]:
    """Selectable rows that no problem of a wide grid gets."""
    wanted = {row["name"] for row in native.kernel_table() if row["selectable"]}
    for sm in DEVICES:
        for sm_count in (DEVICES[sm]["sm_count"], 40):
            device = {**DEVICES[sm], "sm_count": sm_count}
            for pair in (PAIRS | EXPERTS).values():
                for out in ("f16", "f32", "s8"):
                    for n in (48, 640, *WIDTHS):
                        for k in (128, 640, *DEPTHS):
                            problem = {"n": n, "k": k, **pair, "out": out}
                            ms = [1, 8, 16, 24, 32, 48, 64, 80, 96, 128, 144, 160, 192, 256, 384, 512, 1024, 4096]
                            wanted -= {name for name, _ in native.sweep(problem, device, "m", ms)}
            for conv in CONVS:
                for batch in (*BATCHES, 2, 4, 16, 32, 128):
                    wanted -= {native.route("conv", conv_problem(batch, *conv), device, only_compiled=False)[1]}
    any_pair = {"m": 4, "n": 64, "k": 64, "x_align": 1, "out": "f32"}
    wanted -= {native.select(any_pair, DEVICES[90], only_compiled=False)[0]}
    return sorted(wanted)
