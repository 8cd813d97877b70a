"""The steps of short rows: the compiled search, the one in torch and a search with Python numbers agree to the bit."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyquant import ops
from pyquant.calibrate import short_rows
from pyquant.calibrate.methods.mse import _ratios, lowest
from pyquant.errors import PyquantError

LIMITS = ((-1, 1), (-2, 1), (-3, 3), (-7, 7), (-8, 7), (-15, 15), (-63, 63))
LENGTHS = (1, 2, 7, 15, 16, 17, 31, 32, 64, 100, 128, 255, 256)


def drawn(length: int, rows: int = 61) -> Tensor:
    """Rows of every magnitude that float32 holds, whole numbers (equal errors), zeros, signs, outliers."""
    generator = torch.Generator().manual_seed(length)
    exponents = torch.randint(-140, 100, (rows, 1), generator=generator)
    w = torch.randn(rows, length, generator=generator) * torch.exp2(exponents.double()).float()
    w[0] = 0.0
    w[1:20] = torch.randint(-9, 10, (19, length), generator=generator).float()
    w[20], w[21], w[22] = 1e-45, 3.4e38, w[22].sign()
    w[23, 0] = 1e-20
    w[24, -1] = w[24].abs().max() * 50
    return w


def ratios_of(length: int, qmax: int) -> Tensor:
    return _ratios(lowest(qmax, math.sqrt(length) / 2), torch.device("cpu"))


def compare(length: int, qmin: int, qmax: int) -> None:
    w, ratios = drawn(length), ratios_of(length, qmax)
    assert torch.equal(
        short_rows.least_squares_steps(w, qmin, qmax, ratios), short_rows.rounded_steps(w, qmin, qmax, ratios)
    )


@pytest.mark.parametrize("length", LENGTHS)
def test_the_compiled_search_has_the_bits_of_torch(length: int) -> None:
    if not ops.native_available():
        pytest.skip(f"compiled library not in use: {ops.why_not_native()}")
    for limits in LIMITS:
        compare(length, *limits)


def by_hand(row: list[float], qmin: int, qmax: int, ratios: list[float]) -> float:
    """As docs/calibration.md 2.4 says it, in numbers of float64, which are exact enough for the best of all steps."""
    largest = max(map(abs, row))
    if largest == 0:
        return 0.0
    first = largest / qmax

    def codes(step: float) -> list[int]:
        return [min(max(round(w / step), qmin), qmax) for w in row]

    def error(step: float) -> float:
        return sum((q * step - w) ** 2 for q, w in zip(codes(step), row, strict=True))

    kept = sorted((first * r for r in ratios), key=error)[:3]
    width = 1 / ratios[1] - 1
    close = [min(step * (1 + width * i / 8), first) for step in kept for i in range(-8, 9)]
    best = sorted(close, key=error)[:2]
    for i, step in enumerate(best):
        for _ in range(3):
            q = codes(best[i])
            if any(q) and sum(a * b for a, b in zip(q, row, strict=True)) > 0:
                best[i] = min(sum(a * b for a, b in zip(q, row, strict=True)) / sum(a * a for a in q), first)
        assert error(best[i]) <= error(step) * (1 + 1e-9)
    return error(min(best, key=error))


@pytest.mark.parametrize("search", [short_rows.least_squares_steps, short_rows.rounded_steps])
@pytest.mark.parametrize("length", [5, 32, 128])
@pytest.mark.parametrize(("qmin", "qmax"), [(-7, 7), (-8, 7), (-1, 1)])
def test_errors_are_those_of_a_search_with_python_numbers(search: object, length: int, qmin: int, qmax: int) -> None:
    w = torch.randn(12, length, generator=torch.Generator().manual_seed(3))
    ratios = ratios_of(length, qmax)
    steps = search(w, qmin, qmax, ratios)  # type: ignore[operator]
    codes = (w.double() / steps).round().clamp(qmin, qmax)
    got = (codes * steps - w).square().sum(1)
    want = [by_hand(row, qmin, qmax, ratios.tolist()) for row in w.tolist()]
    assert torch.allclose(got, torch.tensor(want, dtype=torch.float64), rtol=1e-5)


def test_every_instruction_set_has_the_same_bits() -> None:
    if not ops.native_available():
        pytest.skip(f"compiled library not in use: {ops.why_not_native()}")
    program = "import test_short_rows as t; [t.compare(n, *to) for n in (1, 31, 128, 256) for to in t.LIMITS]"
    for isa in ("scalar", "avx2", "avx512_vnni", "avx512_bf16", "amx_int8"):
        folders = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
        environment = {**os.environ, "PYQUANT_CPU_ISA": isa, "PYTHONPATH": folders}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (isa, done.stderr)


def test_what_the_library_cannot_read_is_refused() -> None:
    if not ops.native_available():
        pytest.skip(f"compiled library not in use: {ops.why_not_native()}")
    op, w, ratios = torch.ops.pyquant._least_squares_steps, torch.ones(4, 8), torch.ones(4, dtype=torch.float64)
    for bad, argument in (
        ((w.double(), -7, 7, ratios), "rows"),
        ((w[0], -7, 7, ratios), "rows"),
        ((torch.ones(4, 257), -7, 7, ratios), "rows"),
        ((torch.ones(4, 0), -7, 7, ratios), "rows"),
        ((w.T, -7, 7, ratios), "rows"),
        ((w, 0, 7, ratios), "qmin"),
        ((w, -7, 2**40, ratios), "qmax"),
        ((w, -7, 7, ratios.float()), "ratios"),
        ((w, -7, 7, ratios[:2]), "ratios"),
        ((w, -7, 7, torch.ones(513, dtype=torch.float64)), "ratios"),
    ):
        with pytest.raises((RuntimeError, PyquantError), match=f"argument '{argument}'"):
            op(*bad)
    for odd in (math.nan, math.inf):  # nothing is promised but an answer
        assert op(torch.full((2, 5), odd), -7, 7, ratios).shape == (2, 1)
    assert op(w, -7, 7, ratios * 0).shape == (4, 1)
    assert op(torch.ones(0, 8), -7, 7, ratios).shape == (0, 1)
