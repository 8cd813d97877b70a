"""Buffers of packed layers in the layouts of CUDA: codes come back as they went in, and lie where the kernels look."""

from __future__ import annotations

import problems
import pytest
import torch
from steps import draw_steps, natural_steps, pack_blocked_steps, products

from pyquant import numerics, ops
from pyquant.errors import ArgumentError
from pyquant.ops import plan, rows_layout

SIZES = [(1, 1), (7, 5), (24, 64), (128, 128), (129, 130), (64, 300), (0, 16), (16, 0)]
A_GPU = plan.Device(sm=90, sm_count=132, shared_bytes=232448, l2_bytes=62914560)


@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize(("bits", "layout"), [(8, "rows"), (4, "rows"), (4, rows_layout.BLOCKED)])
def test_codes_come_back_as_they_went_in(n: int, k: int, bits: int, layout: str) -> None:
    draw = problems.Draw(problems.BASE_SEED, "rows layout", n, k, bits)
    codes = problems.codes(draw, "s4" if bits == 4 else "s8", "uniform", n, k)
    w, w_scale, bias = numerics.pack_int4(codes) if bits == 4 else codes, problems.scales(draw, n), draw.normal(n)
    spec = ops.LinearSpec(n, k, bits, has_bias=True, layout=layout)
    packed = rows_layout.pack(spec, w, w_scale, bias, None, None, None, None)
    assert packed.numel() == rows_layout.packed_bytes(spec)
    assert torch.equal(rows_layout.unpack(spec, packed), w)
    parts = rows_layout.parts(spec, packed)
    assert torch.equal(parts.w_scale, w_scale)
    assert torch.equal(parts.bias, bias)


def test_blocked_codes_lie_where_the_kernels_look() -> None:
    """The map of csrc/core/blocked128.h, code by code."""
    n, k = 150, 270
    codes = problems.codes(problems.Draw(problems.BASE_SEED, "blocked"), "s4", "uniform", n, k)
    blocks = rows_layout.blocked128(codes)
    want = torch.zeros(2 * 3 * 8192, dtype=torch.int64)
    for channel in range(n):
        for code in range(k):
            c, d = channel % 128, code % 128
            at = (channel // 128 * 3 + code // 128) * 8192 + (c // 64 * 2 + d // 64) * 2048
            at += (c // 16 % 4 * 32 + c % 8 * 4 + d // 4 % 4) * 16 + d // 16 % 4 * 4 + d % 4
            want[at] |= (int(codes[channel, code]) & 15) << (4 * (c // 8 % 2))
    assert torch.equal(blocks.to(torch.int64), want)
    assert torch.equal(rows_layout.from_blocked128(blocks, n, k), codes)


@pytest.mark.parametrize(("n", "k", "group"), [(1, 64, 64), (24, 192, 64), (129, 384, 128), (7, 576, 192), (0, 64, 64)])
@pytest.mark.parametrize("layout", ["rows", rows_layout.BLOCKED])
def test_steps_come_back_and_lie_where_the_kernels_look(n: int, k: int, group: int, layout: str) -> None:
    codes, step = draw_steps(problems.Draw(problems.BASE_SEED, "steps", n, k), n, k, group)
    step[:, :1] = 1
    base = torch.linspace(1, 2, n).bfloat16().float()
    spec = ops.LinearSpec(n, k, 4, group, layout=layout, two_level=True)
    packed = rows_layout.pack(spec, numerics.pack_int4(codes), base[:, None] * step, None, None, None, None, None)
    assert packed.numel() == rows_layout.packed_bytes(spec)
    parts, at = rows_layout.parts(spec, packed), rows_layout.sections(spec)
    assert torch.equal(numerics.unpack_int4(parts.codes, k), codes)
    assert torch.equal(parts.w_scale, base)
    assert parts.w_step is not None
    assert torch.equal(parts.w_step, step)
    sums = packed[at.w_sum : at.w_sum + 4 * n].view(torch.int32)
    assert torch.equal(sums, products(codes, step).sum(1, dtype=torch.int32))
    if layout == rows_layout.BLOCKED:
        blocks, want = (b.view(-1, 8448)[:, 8192:] for b in (packed[: at.w_step], pack_blocked_steps(codes, step)[0]))
        there = want != 0xC5
        assert torch.equal(blocks[there], want[there])
    else:
        want = natural_steps(step)
        there = want != 0xC5
        assert torch.equal(packed[at.w_step : at.w_step + want.numel()].view_as(want)[there], want[there])


@pytest.mark.parametrize("wrong", ["no base", "beyond int8"])
def test_steps_that_are_none_are_refused(wrong: str) -> None:
    codes = torch.full((3, 64), -8, dtype=torch.int8)
    scale = torch.tensor([[1.0, 15.0], [2.0, 4.0], [1.0, 16.0 if wrong == "beyond int8" else 1.01]])
    spec = ops.LinearSpec(3, 64, 4, 32, layout="rows", two_level=True)
    with pytest.raises(ArgumentError) as caught:
        rows_layout.pack(spec, numerics.pack_int4(codes), scale, None, None, None, None, None)
    assert caught.value.argument == "w_scale"


def test_only_int4_weights_have_blocks() -> None:
    packed = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(ArgumentError) as caught:
        ops.unpack_linear(packed, ops.LinearSpec(4, 8, 8, layout=rows_layout.BLOCKED).to_ints())
    assert caught.value.argument == "spec"


def test_the_layout_follows_the_kernels_that_the_plan_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks where every number of rows has a kernel for them and they are faster on the whole; else plain rows."""
    times = {"rows": 10.0, rows_layout.BLOCKED: 10.0}
    refusing: set[tuple[str, int]] = set()

    def select(spec: ops.LinearSpec, m: int, out: torch.dtype, device: plan.Device) -> plan.Selection:
        return plan.Selection(None if (spec.layout, m) in refusing else "a kernel", times[spec.layout], ())

    monkeypatch.setattr(plan, "select", select)
    monkeypatch.setattr(plan, "_native", lambda: None)
    layout = plan.weight_layout.__wrapped__
    four, eight = ops.LinearSpec(256, 256, 4), ops.LinearSpec(256, 256, 8)
    assert layout(four, A_GPU) == "rows"
    times[rows_layout.BLOCKED] = 9.0
    assert layout(four, A_GPU) == rows_layout.BLOCKED
    assert layout(eight, A_GPU) == "rows"
    refusing.add((rows_layout.BLOCKED, 4096))
    assert layout(four, A_GPU) == "rows"


def test_a_bank_lies_as_one_launch_wants_it_unless_calls_for_each_are_much_quicker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule: calls for each have to be half as quick again; of two launches, or two ways of calls, the quicker."""
    us = {(layout, together): 100.0 for layout in ("rows", rows_layout.BLOCKED) for together in (False, True)}
    lacks: set[tuple[str, bool]] = set()
    asked: list[tuple[int, int]] = []

    def select(spec: ops.LinearSpec, m: int, out: torch.dtype, device: plan.Device, experts: int = 0) -> plan.Selection:
        asked.append((m, experts))
        which = spec.layout, experts > 0
        return plan.Selection(None if which in lacks else "a kernel", us[which], ())

    best = ["rows"]
    monkeypatch.setattr(plan, "select", select)
    monkeypatch.setattr(plan, "weight_layout", lambda spec, device: best[0])
    layout, spec = plan.bank_layout.__wrapped__, ops.LinearSpec(256, 256, 4, 128)
    assert layout(spec, A_GPU, 8) == "rows"
    assert not asked
    best[0] = rows_layout.BLOCKED
    assert layout(spec, A_GPU, 0) == layout(spec, A_GPU, 1) == rows_layout.BLOCKED
    assert not asked
    assert layout(spec, A_GPU, 64) == "rows"  # as quick
    us[rows_layout.BLOCKED, True] = 99.0
    assert layout(spec, A_GPU, 64) == rows_layout.BLOCKED
    assert asked[:2] == [(8, 64), (8, 64)]
    lacks.add((rows_layout.BLOCKED, True))  # then 8, 64, 64 and 64 of 64 layers are called
    us["rows", True] = 64.0**0.75 * 8**0.25 * 1.5 * 10
    us[rows_layout.BLOCKED, False] = 9.0
    assert layout(spec, A_GPU, 64) == rows_layout.BLOCKED
    us[rows_layout.BLOCKED, False] = 10.0  # and waiting
    assert layout(spec, A_GPU, 64) == "rows"
    lacks.add(("rows", True))
    assert layout(spec, A_GPU, 64) == rows_layout.BLOCKED
    lacks.add((rows_layout.BLOCKED, False))
    assert layout(spec, A_GPU, 64) == "rows"
