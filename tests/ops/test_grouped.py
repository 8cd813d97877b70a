"""The grouped product: rows of many layers in one call give what each layer gives by itself, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import pyquant
from pyquant import ops

pytestmark = pytest.mark.skipif(not ops.native_available(), reason="the grouped product is compiled")

# N, K, bits, group size, inputs, symmetric
SPECS = [
    (64, 32, 8, 0, "dynamic", True),
    (133, 100, 8, 0, "dynamic", False),
    (65, 64, 4, 16, "dynamic", True),
    (7, 33, 4, 0, "dynamic", False),
    (130, 48, 8, 16, "static", False),
    (200, 64, 4, 0, "static", True),
    (5, 0, 8, 0, "dynamic", True),
    (0, 16, 8, 0, "dynamic", True),
]
COUNTS = [[3], [0, 5, 1, 0, 17, 2], [1] * 9, [0, 0], [60, 1, 1, 90, 0, 33]]


def made(spec: ops.LinearSpec, layers: int, seed: int) -> list[Tensor]:
    """Packed buffers of random layers."""
    draw = torch.Generator().manual_seed(seed)
    groups = spec.k // spec.group_size if spec.group_size else 1
    top = 7 if spec.w_bits == 4 else 127
    found = []
    for _ in range(layers):
        codes = torch.randint(-top, top + 1, (spec.n, spec.k), generator=draw, dtype=torch.int8)
        scale = torch.rand(spec.n, groups, generator=draw) / 50 + 1e-3
        is_static = spec.input == "static"
        found.append(
            ops.pack_linear(
                ops.pack_int4(codes) if spec.w_bits == 4 else codes,
                scale if spec.group_size else scale[:, 0].contiguous(),
                spec.to_ints(),
                torch.randn(spec.n, generator=draw),
                torch.rand(1, generator=draw) / 20 + 0.01 if is_static else None,
                torch.tensor([3], dtype=torch.int32) if is_static and not spec.x_symmetric else None,
            )
        )
    return found


def grouped(x: Tensor, packed: Any, counts: Any, spec: ops.LinearSpec, *more: Any, rows: Any = None) -> Tensor:
    """more: scale, zero point, type of the result."""
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    y: Tensor = torch.ops.pyquant._grouped_linear.default(x, packed, ends, spec.to_ints(), rows, *more)
    return y


@pytest.mark.parametrize("case", SPECS, ids=str)
def test_it_gives_the_bits_of_the_layers(case: Any) -> None:
    n, k, bits, group, inputs, symmetric = case
    low = -127 if symmetric else -128
    spec = ops.LinearSpec(
        *(n, k, bits, group, inputs, low, 127, symmetric),
        activation="relu" if n == 133 else "none",
        has_bias=True,
        layout="cpu_blocked",
    )
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for index, counts in enumerate(COUNTS):
                packed = made(spec, len(counts), index)
                x = torch.randn(sum(counts), k, generator=torch.Generator().manual_seed(index))
                x = x.to((torch.float32, torch.bfloat16, torch.float16)[index % 3])
                parts = zip(x.split(counts), packed, strict=True)
                want = torch.cat([ops.qlinear(part, buffer, None, spec.to_ints()) for part, buffer in parts])
                assert torch.equal(grouped(x, packed, counts, spec), want), (case, counts, threads)
                draw = torch.Generator().manual_seed(index)
                rows = torch.randint(0, max(len(x), 1), (sum(counts),), generator=draw)
                parts = zip(x[rows].split(counts), packed, strict=True)
                chosen = torch.cat([ops.qlinear(part, buffer, None, spec.to_ints()) for part, buffer in parts])
                assert torch.equal(grouped(x, packed, counts, spec, rows=rows), chosen), (case, counts, threads)
                few = [*counts[:-1], 0]  # the last rows are of no layer
                beyond = grouped(x, packed, few, spec)
                assert torch.equal(beyond[: sum(few)], want[: sum(few)])
                assert torch.equal(beyond[sum(few) :], torch.zeros_like(want[sum(few) :]))
                if inputs == "dynamic" and k:
                    codes, scale, zero = ops.quantize_dynamic(x, "per_token", 0, symmetric, low, 127)
                    given = (scale, None if symmetric else zero, x.dtype)
                    assert torch.equal(grouped(codes, packed, counts, spec, *given), want), (case, counts, threads)
    finally:
        torch.set_num_threads(before)


def test_strided_rows_and_a_poisoned_row() -> None:
    spec = ops.LinearSpec(40, 32, has_bias=True, layout="cpu_blocked")
    packed, wide = made(spec, 3, 0), torch.randn(12, 64)
    x = wide[:, :32]
    want = grouped(x.contiguous(), packed, [4, 4, 4], spec)
    assert torch.equal(grouped(x, packed, [4, 4, 4], spec), want)
    wide[5, 7] = float("inf")
    got = grouped(x, packed, [4, 4, 4], spec)
    assert got[5].isnan().all()
    assert torch.equal(got[[*range(5), *range(6, 12)]], want[[*range(5), *range(6, 12)]])


def test_wrong_operands_are_refused_by_name() -> None:
    spec = ops.LinearSpec(40, 32, has_bias=True, layout="cpu_blocked")
    packed, x = made(spec, 2, 0), torch.randn(6, 32)
    codes = torch.zeros(6, 32, dtype=torch.int8)
    ones, zeros = torch.ones(6), torch.zeros(6, dtype=torch.int32)
    for argument, call in (
        ("ends", lambda: grouped(x, packed[:1], [3, 3], spec)),
        ("packed", lambda: grouped(x, [], [], spec)),
        ("packed", lambda: grouped(x, [packed[0], packed[1][:-1]], [3, 3], spec)),
        ("packed", lambda: grouped(x, [packed[0], packed[1].float()], [3, 3], spec)),
        ("ends", lambda: grouped(x, packed, [7, -1], spec)),
        ("ends", lambda: grouped(x, packed, [3, 4], spec)),
        ("ends", lambda: grouped(x, packed, [3, 3, 0], spec)),
        ("rows", lambda: grouped(x, packed, [3, 3], spec, rows=torch.tensor([0, 1, 2, 3, 4, 6]))),
        ("rows", lambda: grouped(x, packed, [3, 3], spec, rows=torch.tensor([0, 1, 2, 3, 4, -1]))),
        ("rows", lambda: grouped(x, packed, [3, 3], spec, rows=torch.zeros(6, dtype=torch.int32))),
        ("rows", lambda: grouped(codes, packed, [3, 3], spec, torch.ones(6), rows=torch.arange(6))),
        ("kernel", lambda: grouped(x, packed, [3, 3], spec, None, None, None, "gemm_simt_any")),
        ("x", lambda: grouped(x[0], packed, [3, 3], spec)),
        ("x", lambda: grouped(x[:, :31], packed, [3, 3], spec)),
        ("x", lambda: grouped(codes, packed, [3, 3], spec)),
        ("x_scale", lambda: grouped(codes, packed, [3, 3], spec, torch.ones(5))),
        (
            "x_zero_point",
            lambda: grouped(codes, packed, [3, 3], spec, ones, zeros),
        ),
        ("spec", lambda: grouped(x, packed, [3, 3], replace(spec, codes_out=True))),
    ):
        with pytest.raises((RuntimeError, pyquant.PyquantError), match=f"argument '{argument}'"):
            call()
