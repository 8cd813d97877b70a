"""Layers with group scales of two levels on CUDA: codes and steps there give the bits of the CPU's 8-bit products."""

from __future__ import annotations

from typing import Any

import accept
import problems
import pytest
import torch
from cuda_ops import CudaOps
from steps import draw_steps, products
from torch import Tensor

from pyquant import ops
from pyquant.errors import ArgumentError
from pyquant.ops import rows_layout

CPU_LAYOUT = ops.layout_for(torch.device("cpu"))
SIZES = [(1, 1, 8, 8), (3, 5, 96, 32), (17, 77, 192, 64), (33, 130, 384, 128), (2, 40, 384, 192), (65, 24, 60, 4)]


@pytest.fixture
def plain_device(there: CudaOps) -> CudaOps:
    return there


@pytest.fixture
def device(anywhere: CudaOps) -> CudaOps:
    return anywhere


def _layer(
    n: int, k: int, group: int, layout: str = "rows", **options: Any
) -> tuple[tuple[Tensor, Tensor, ops.LinearSpec], tuple[Tensor, Tensor, ops.LinearSpec], dict[str, Any]]:
    """(w, w_scale, spec) of both levels for the device, of the products for the CPU, and what both have."""
    draw = problems.Draw(problems.BASE_SEED, "two levels", n, k, group, sorted(options.items()))
    codes, step = draw_steps(draw, n, k, group)
    # base * step is exact; a step of 1 in every row makes the base the one that the kernels read off
    step[:, :1] = 1
    base = torch.exp2(draw.codes(-9, -4, n).float()) * 1.25
    there = ops.LinearSpec(n, k, 4, group, layout=layout, two_level=True, **options)
    here = ops.LinearSpec(n, k, 8, layout=CPU_LAYOUT, **options)
    shared: dict[str, Any] = {"bias": draw.normal(n) if options.get("has_bias") else None}
    if options.get("input") == "static":
        shared |= {"x_scale": torch.tensor([0.02]), "x_zero_point": torch.tensor([5], dtype=torch.int32)}
    if options.get("codes_out"):
        shared["out_scale"] = problems.scales(draw, 1) * 64
    scale = base[:, None] * step
    return (ops.pack_int4(codes), scale, there), (products(codes, step), base, here), shared


OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic": {"has_bias": True, "activation": "silu"},
    "affine": {"x_symmetric": False, "x_qmin": -128},
    "static": {"input": "static", "x_qmin": -128, "x_symmetric": False, "has_bias": True, "codes_out": True},
}
LAYOUTS = ["rows", rows_layout.BLOCKED]


def _takes(layout: str, group: int) -> bool:
    return layout == "rows" or group % rows_layout.STEP_CODES == 0


def _served(device: CudaOps, spec: ops.LinearSpec, m: int, out: torch.dtype) -> bool:
    """Whether a compiled kernel of the device reads the layout: 'rows' always has one."""
    if spec.layout == "rows":
        return True
    native = pytest.importorskip("pyquant._native")
    facts = native.device_info(0)
    return ops.plan.select(spec, m, out, ops.plan.Device(**facts)).kernel is not None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(("m", "n", "k", "group"), SIZES)
def test_layers_have_the_bits_of_the_cpu(
    device: CudaOps, m: int, n: int, k: int, group: int, kind: str, layout: str
) -> None:
    if not _takes(layout, group):
        pytest.skip("steps of blocks are for 64 codes")
    there, here, operands = _layer(n, k, group, layout, **OPTIONS[kind])
    dtype = problems.FLOATS[(m + n) % 3]
    if not _served(device, there[2], m, torch.int8 if there[2].codes_out else dtype):
        pytest.skip("no kernel of this build reads the blocks")
    packed = device.pack_linear(there[0], there[1], there[2].to_ints(), **operands)
    assert torch.equal(device.unpack_linear(packed, there[2].to_ints()), there[0])
    reference = ops.pack_linear(here[0], here[1], here[2].to_ints(), **operands)
    x = problems.Draw(problems.BASE_SEED, "rows", m, k).normal(m, k).to(dtype)
    residual = None if there[2].codes_out else torch.linspace(-1, 1, m * n).reshape(m, n).to(dtype)
    want = ops.qlinear(x, reference, residual, here[2].to_ints())
    got = device.qlinear(x, packed, residual, there[2].to_ints())
    rule = accept.t1 if want.is_floating_point() else accept.t0
    rule(got, want, what=f"{kind} {layout} {m}x{n}x{k} / {group}", waiver="small ones have few values")


@pytest.mark.parametrize(("m", "n", "k"), [(0, 16, 64), (5, 0, 64), (5, 16, 0)])
def test_zero_sizes(device: CudaOps, m: int, n: int, k: int) -> None:
    there, here, operands = _layer(n, k, 32, has_bias=True)
    packed = device.pack_linear(there[0], there[1], there[2].to_ints(), **operands)
    reference = ops.pack_linear(here[0], here[1], here[2].to_ints(), **operands)
    x = torch.ones(m, k)
    want = ops.qlinear(x, reference, None, here[2].to_ints())
    accept.t1(device.qlinear(x, packed, None, there[2].to_ints()), want, waiver="empty by design")


def test_planted_faults_are_seen(plain_device: CudaOps) -> None:
    """Other steps, a step of the next group or channel, no steps: each gives another result."""
    there, here, operands = _layer(40, 192, 64, has_bias=True)
    w, scale, spec = there
    x = problems.Draw(problems.BASE_SEED, "faults").normal(9, 192)
    reference = ops.pack_linear(here[0], here[1], here[2].to_ints(), **operands)
    want = ops.qlinear(x, reference, None, here[2].to_ints())
    at = rows_layout.sections(spec)
    for fault in ("none", "next group", "next channel", "ones"):
        packed = plain_device.pack_linear(w, scale, spec.to_ints(), **operands)
        section = packed[at.w_step : at.w_step + 64 * 3].view(3, 64)
        if fault != "none":
            section.copy_({"next group": section.roll(1, 0), "next channel": section.roll(4, 1)}.get(fault, 1))
        got = plain_device.qlinear(x, packed, None, spec.to_ints())
        assert torch.equal(got, want) == (fault == "none"), fault


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"w_bits": 8}, "8 bits"),
        ({"group_size": 0}, "group_size 0"),
        ({"layout": "cpu_blocked"}, "two levels"),
        ({"group_size": 32, "layout": rows_layout.BLOCKED}, "group_size 32"),
    ],
)
def test_specs_that_mean_nothing_are_refused(plain_device: CudaOps, change: dict[str, Any], got: str) -> None:
    _, _, spec = _layer(16, 64, 64)[0]
    words = ops.LinearSpec(**(vars(spec) | change)).to_ints()
    with pytest.raises(ArgumentError, match=rf"'spec': got .*{got}"):
        plain_device.qlinear(torch.ones(1, 64), torch.zeros(64, dtype=torch.uint8), None, words)
    with pytest.raises(ArgumentError, match=rf"'spec': got .*{got}"):
        plain_device.unpack_linear(torch.zeros(64, dtype=torch.uint8), words)
