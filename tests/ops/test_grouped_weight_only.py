"""Float rows of many layers with integer weights in one call give what each layer gives by itself, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pyquant
from pyquant import ops

pytestmark = pytest.mark.skipif(not ops.native_available(), reason="the grouped product is compiled")

# N, K, bits, group size, affine, activation: groups that the kernels read as they stand, and others
SPECS = [
    (64, 32, 8, 0, False, "none"),
    (133, 100, 8, 20, True, "relu"),
    (65, 256, 4, 32, False, "none"),
    (200, 384, 4, 128, True, "gelu"),
    (7, 33, 4, 0, True, "none"),
    (70, 72, 4, 12, False, "silu"),
    (129, 300, 8, 0, True, "none"),
    (5, 0, 8, 0, False, "none"),
    (0, 16, 4, 0, False, "none"),
]
# few rows, decoded in registers; many, by panels; more than one pass over the weights
COUNTS = [[3], [0, 5, 1, 0, 17, 2], [1] * 9, [0, 0], [60, 1, 1, 90, 0, 33], [0, 530, 0], [8, 9, 0, 4]]


def made(spec: Any, layers: int, seed: int = 0) -> list[list[Tensor]]:
    """Weights, scales, zero points ([]: none) and biases of random layers."""
    n, k, bits, group, affine, _ = spec
    draw = torch.Generator().manual_seed(seed)
    shape, top = (n, k // group) if group else (n,), 8 if bits == 4 else 128
    codes = [torch.randint(-top, top, (n, k), generator=draw, dtype=torch.int8) for _ in range(layers)]
    scale = [torch.rand(shape, generator=draw) / 50 + 1e-3 for _ in range(layers)]
    zeros = [torch.randint(-top, top, shape, generator=draw, dtype=torch.int32) for _ in range(layers)]
    bias = [torch.randn(n, generator=draw) for _ in range(layers)]
    return [[ops.pack_int4(c) for c in codes] if bits == 4 else codes, scale, zeros if affine else [], bias]


def grouped(x: Tensor, operands: Any, counts: Any, spec: Any, rows: Tensor | None = None) -> Tensor:
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    how = (spec[2], spec[3], spec[5], 0.0, 0.0)
    y: Tensor = torch.ops.pyquant._grouped_weight_only.default(x, *operands, ends, *how, rows)
    return y


def one_by_one(x: Tensor, operands: Any, counts: Any, spec: Any) -> Tensor:
    parts = []
    for i, part in enumerate(x.split(counts)):
        w, scale, zero, bias = (of[i] if of else None for of in operands)
        parts.append(ops.weight_only_linear(part, w, scale, zero, bias, None, spec[2], spec[3], spec[5]))
    return torch.cat(parts)


@pytest.fixture(params=[1, 2, 7])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_gives_the_bits_of_the_layers(spec: Any, threads: int) -> None:
    for index, counts in enumerate(COUNTS):
        operands, draw = made(spec, len(counts), index), torch.Generator().manual_seed(index)
        if index % 2:
            operands[3] = []
        x = torch.randn(sum(counts), spec[1], generator=draw)
        x = x.to((torch.float32, torch.bfloat16, torch.float16)[index % 3])
        want = one_by_one(x, operands, counts, spec)
        got = grouped(x, operands, counts, spec)
        assert got.dtype == x.dtype
        assert torch.equal(got, want), (counts, threads)
        rows = torch.randint(0, max(len(x), 1), (sum(counts),), generator=draw)
        chosen = grouped(x, operands, counts, spec, rows)
        assert torch.equal(chosen, one_by_one(x[rows], operands, counts, spec)), (counts, threads)
        few = [*counts[:-1], 0]  # the last rows are of no layer
        beyond = grouped(x, operands, few, spec)
        assert torch.equal(beyond[: sum(few)], want[: sum(few)])
        assert torch.equal(beyond[sum(few) :], torch.zeros_like(want[sum(few) :]))


def test_it_is_the_product() -> None:
    """Not only what the single layers say: against float64."""
    spec, counts = (96, 128, 4, 32, True, "none"), [4, 0, 40, 1]
    (w, scale, zero, bias), x = made(spec, 4), torch.randn(45, 128)
    got, begin = grouped(x, [w, scale, zero, bias], counts, spec).double(), 0
    for i, count in enumerate(counts):
        part, codes = x[begin : begin + count].double(), ops.unpack_int4(w[i], 128).double()
        real = (codes - zero[i].double().repeat_interleave(32, 1)) * scale[i].double().repeat_interleave(32, 1)
        bound = 2 * 128 * 2**-24 * (part.abs() @ real.abs().t() + bias[i].double().abs()) + 1e-12
        assert bool(((got[begin : begin + count] - (part @ real.t() + bias[i].double())).abs() <= bound).all())
        begin += count


def test_strided_rows_and_weights_and_a_poisoned_row() -> None:
    spec, counts = (40, 32, 8, 0, False, "none"), [4, 12, 4]
    operands, wide = made(spec, 3), torch.randn(20, 64)
    x = wide[:, :32]
    want = grouped(x.contiguous(), operands, counts, spec)
    assert torch.equal(grouped(x, operands, counts, spec), want)
    spread = [[torch.cat([t, t], -1)[:, :32] for t in operands[0]], *operands[1:]]
    assert torch.equal(grouped(x, spread, counts, spec), want)
    wide[5, 7] = float("nan")
    got = grouped(x, operands, counts, spec)
    assert got[5].isnan().all()
    assert torch.equal(got[[*range(5), *range(6, 20)]], want[[*range(5), *range(6, 20)]])


def test_wrong_operands_are_refused_by_name() -> None:
    spec = (40, 32, 8, 0, True, "none")
    (w, scale, zero, bias), x = made(spec, 2), torch.randn(6, 32)
    good = [w, scale, zero, bias]

    def call(x: Tensor = x, counts: Any = (3, 3), rows: Tensor | None = None, **others: Any) -> Tensor:
        names = ("w", "w_scale", "w_zero_point", "bias")
        return grouped(x, [others.get(n, v) for n, v in zip(names, good, strict=True)], counts, spec, rows)

    assert call().shape == (6, 40)
    for argument, wrong in (
        ("w", {"w": [], "w_scale": [], "counts": ()}),
        ("w", {"w": [w[0], w[1][:39]]}),
        ("w", {"w": [w[0], w[1].float()]}),
        ("w_scale", {"w_scale": scale[:1]}),
        ("w_scale", {"w_scale": [scale[0], scale[1][:39]]}),
        ("w_zero_point", {"w_zero_point": zero[:1]}),
        ("w_zero_point", {"w_zero_point": [zero[0], zero[1] + 300]}),
        ("bias", {"bias": bias[:1]}),
        ("bias", {"bias": [bias[0], bias[1].half()]}),
        ("ends", {"counts": (7, -1)}),
        ("ends", {"counts": (3, 4)}),
        ("ends", {"counts": (3, 3, 0)}),
        ("rows", {"rows": torch.tensor([0, 1, 2, 3, 4, 6])}),
        ("rows", {"rows": torch.tensor([0, 1, 2, 3, 4, -1])}),
        ("rows", {"rows": torch.zeros(6, dtype=torch.int32)}),
        ("x", {"x": x[0]}),
        ("x", {"x": x.to(torch.int8)}),
    ):
        with pytest.raises((RuntimeError, pyquant.PyquantError), match=f"argument '{argument}'"):
            call(**wrong)  # type: ignore[arg-type]
