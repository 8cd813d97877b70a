"""Random calls of every op, legal and not, for a build with sanitizers: test_sanitizers.py runs it in a fresh process.

Arguments: number of calls, seed. A report of a sanitizer ends the process; otherwise it prints what was run.

A call starts from a legal one (support/op_samples.py) of a random size and is changed in up to three places: operands
of other types, layouts and lengths, extreme integers, packed buffers and specs of random bytes.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections import Counter
from typing import Any

import problems
import torch
from op_samples import WRITTEN, samples
from ops.test_contract import BAD_TENSORS
from torch import Tensor

from pyquant import ops
from pyquant.errors import PyquantError

INTEGERS = (-(2**63), -(2**31) - 1, -129, -128, -1, 0, 1, 2, 3, 4, 7, 8, 127, 128, 255, 2**31, 2**62, 2**63 - 1)
REFUSED = (
    PyquantError,
    RuntimeError,
    NotImplementedError,
    TypeError,
    ValueError,
    IndexError,
    OverflowError,
    MemoryError,
)
MOST = 1 << 24  # elements of one operand: extreme sizes are asked for by integers, not by memory
SIZES: tuple[tuple[int, int, int], ...] = (
    *((3, 5, 8), (1, 16, 64), (0, 4, 7), (5, 0, 8), (4, 3, 0), (17, 130, 96)),
    (6, 32, 1),  # of a convolution in groups: one channel each
)
LARGE = (33, 1040, 2080)  # above the packer's grain: work for more than one thread


def changed(draw: problems.Draw, value: Any) -> Any:
    if isinstance(value, Tensor):
        kind = draw.integer(0, 3)
        if kind == 0:
            return draw.choice(BAD_TENSORS)[1](value)
        if kind == 1:
            layout = draw.choice([layout for layout in problems.LAYOUTS if layout.takes(value)] or [None])
            return layout.build(value) if layout else value
        if kind == 2 and value.numel() and not value.is_floating_point():
            return torch.randint(-128, 128, value.shape, generator=draw.generator).to(value.dtype)
        if value.is_floating_point() and value.numel():
            spoiled = value.clone()
            spoiled.reshape(-1)[draw.integer(0, value.numel() - 1)] = draw.choice(
                (float("nan"), float("inf"), -0.0, 1e-45, 3.4e38, -1.0)
            )
            return spoiled
        return value[..., : value.shape[-1] // 2] if value.dim() else value
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice(INTEGERS)
    if isinstance(value, float):
        return draw.choice((0.0, -1.0, 1e30, float("nan"), float("inf")))
    if isinstance(value, str):
        return draw.choice(
            ("", "per_tensor", "per_token", "per_channel", "per_group", "gelu", "silu", "relu", "clamp", "x")
        )
    if isinstance(value, (list, tuple)) and value:
        other = list(value)
        other[draw.integer(0, len(other) - 1)] = draw.choice(INTEGERS)
        return other[: draw.integer(0, len(other))] if draw.chance(0.1) else other
    return value


def outcome(seed: int, index: int, cases: dict[tuple[int, int, int], dict[str, tuple[Any, ...]]]) -> str:
    draw = problems.Draw(seed, "random call", index)
    name = draw.choice(sorted(cases[SIZES[0]]))
    size = LARGE if draw.chance(0.01) else draw.choice(SIZES)
    args = list(cases[size][name])
    for position in WRITTEN.get(name, ()):
        args[position] = args[position].clone()
    # each place once: what has been changed may be sparse, no tensor or of four dimensions, and take no other change
    for position in {draw.integer(0, len(args) - 1) for _ in range(draw.integer(0, 3))}:
        args[position] = changed(draw, args[position])
    if any(isinstance(a, Tensor) and a.numel() > MOST for a in args):
        return "too large"
    try:
        getattr(torch.ops.pyquant, name).default(*args)
    except REFUSED:
        return "refused"
    return "executed"


def own(m: int, n: int, k: int) -> dict[str, tuple[Any, ...]]:
    """Calls of the compiled library's own ops that have no twin in Python."""
    rows, ratios = torch.randn(m * n, min(max(k, 1), 256)), torch.exp2(-torch.arange(40, dtype=torch.float64) / 16)
    return {"_least_squares_steps": (rows, -7, 7, ratios), "_fingerprint": (rows,)}


def main(calls: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    assert ops.native_available(), ops.why_not_native()
    torch.manual_seed(seed)
    cases = {size: samples(*size) | own(*size) for size in (*SIZES, LARGE)}
    found: Counter[str] = Counter()
    for index in itertools.islice(itertools.count(), calls):
        torch.set_num_threads((1, 2, 3)[index // 50 % 3])
        found[outcome(seed, index, cases)] += 1
    print(dict(found))
    assert found["executed"] > calls // 5, "most calls were refused: nothing was tested"
    assert found["refused"] > calls // 10, "no call was wrong: nothing was tested"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
