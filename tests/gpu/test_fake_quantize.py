"""Fake quantisation on the device: the bits of the specification in every mode of the simulator, and what is moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accept
import fake_laws
import laws
import problems
import pytest
import simulator
import torch
from cuda_ops import CudaOps
from problems import BASE_SEED, Draw

from pyquant import numerics
from pyquant.errors import ArgumentError


def same(got: Any, want: Any, what: str) -> None:
    for g, w in zip(got, want, strict=True):
        rule = accept.t1 if w.is_floating_point() else accept.t0
        rule(g, w, what=what, waiver="compared with the specification")


def compare(anywhere: CudaOps, x: torch.Tensor, grad: torch.Tensor, arguments: tuple[Any, ...], what: str) -> None:
    y, mask = numerics.fake_quantize(x, *arguments)
    same(anywhere.fake_quantize(x, *arguments), (y, mask), what)
    same((anywhere.fake_quantize_backward(grad, mask),), (numerics.fake_quantize_backward(grad, mask),), what)
    same(
        anywhere.fake_quantize_lsq_backward(grad, x, *arguments),
        numerics.fake_quantize_lsq_backward(grad, x, *arguments),
        what,
    )
    granularity, group, qmin, qmax = arguments[2:]
    for symmetric in (True, False):
        dynamic = (granularity, group, symmetric, qmin, qmax)
        same(anywhere.fake_quantize_dynamic(x, *dynamic), numerics.fake_quantize_dynamic(x, *dynamic), what)


# Rows that fill vectors, that end inside of one, of a byte of the mask, of a block of sums; zero sizes.
SIZES = ((0, 5), (3, 0), (1, 1), (5, 3), (7, 100), (3, 33), (2, 64), (9, 96), (1, 2100), (2, 1300))


@pytest.mark.parametrize("granularity", laws.GRANULARITIES)
@pytest.mark.parametrize("dtype", problems.FLOATS, ids=str)
def test_bits_of_the_specification(anywhere: CudaOps, dtype: torch.dtype, granularity: str) -> None:
    draw = Draw(BASE_SEED, "gpu fake", granularity, str(dtype))
    for rows, cols in SIZES:
        x, grad = draw.normal(rows, cols).to(dtype), draw.normal(rows, cols).to(dtype)
        group = fake_laws.group_of(granularity, cols, draw) if cols else int(granularity == "per_group")
        arguments = fake_laws.given(draw, x, granularity, group)
        compare(anywhere, x, grad, arguments, f"[{rows}, {cols}] group={group} {dtype}")


@pytest.mark.parametrize("granularity", laws.GRANULARITIES)
def test_the_catalogue(there: CudaOps, granularity: str) -> None:
    for values in problems.VALUES:
        fake_laws.catalogue(there, values, granularity, BASE_SEED)


@pytest.mark.parametrize("layout", problems.layouts(), ids=lambda v: v.name)
def test_any_layout(there: CudaOps, layout: problems.Layout) -> None:
    if layout.min_dim == 0 and layout.name == "scalar":
        pytest.skip("no rows")
    draw = Draw(BASE_SEED, "gpu fake layout")
    with torch.no_grad():
        x = layout.build(draw.normal(6, 16)).detach()
    dense = torch.Tensor(x).contiguous()
    scale = torch.full(dense.shape[:-1], 1.0 / 127)
    for granularity, s in (("per_tensor", torch.tensor([0.01])), ("per_channel", scale)):
        same(there.fake_quantize(x, s, None, granularity), numerics.fake_quantize(dense, s, None, granularity), "given")
        same(
            there.fake_quantize_lsq_backward(x, x, s, None, granularity),
            numerics.fake_quantize_lsq_backward(dense, dense, s, None, granularity),
            "learned",
        )
        same(there.fake_quantize_dynamic(x, granularity), numerics.fake_quantize_dynamic(dense, granularity), "dynamic")
    _, mask = numerics.fake_quantize(dense, torch.tensor([0.01]))
    same((there.fake_quantize_backward(x, mask),), (numerics.fake_quantize_backward(dense, mask),), "backward")


def test_many_blocks_of_a_sum(there: CudaOps) -> None:
    """Two levels of partial sums, and a third where one scale belongs to more than a million elements."""
    draw = Draw(BASE_SEED, "gpu sums")
    for rows, cols, granularity in ((3, 5000, "per_channel"), (1, 1_050_000, "per_tensor")):
        x, grad = draw.normal(rows, cols), draw.normal(rows, cols)
        arguments = fake_laws.given(draw, x, granularity, 0)
        same(
            there.fake_quantize_lsq_backward(grad, x, *arguments),
            numerics.fake_quantize_lsq_backward(grad, x, *arguments),
            f"{rows} x {cols}",
        )


@pytest.mark.parametrize("dtype", problems.FLOATS, ids=str)
def test_kept_buffers_and_gradients_in_place(anywhere: CudaOps, dtype: torch.dtype) -> None:
    draw = Draw(BASE_SEED, "gpu kept")
    x, grad, scale = draw.normal(5, 40).to(dtype), draw.normal(5, 40).to(dtype), torch.tensor([0.005])
    y, mask = anywhere.put(torch.zeros(5, 40, dtype=dtype)), anywhere.put(torch.zeros(25, dtype=torch.uint8))
    own, zero = anywhere.put(torch.zeros(5)), anywhere.put(torch.zeros(5, dtype=torch.int32))
    # put() copies: what is on the device already is called without it
    library = torch.ops.pyquant_sim if anywhere.is_simulator else torch.ops.pyquant
    library.fake_quantize_out(anywhere.put(x), anywhere.put(scale), None, "per_tensor", 0, -127, 127, y, mask)
    anywhere.finish()
    want = numerics.fake_quantize(x, scale)
    same((anywhere.get(y), anywhere.get(mask)), want, "given")
    masked = anywhere.put(grad)
    library.fake_quantize_backward_(masked, mask)
    anywhere.finish()
    same((anywhere.get(masked),), (numerics.fake_quantize_backward(grad, want[1]),), "in place")
    library.fake_quantize_dynamic_out(anywhere.put(x), "per_channel", 0, False, -128, 127, y, own, zero)
    anywhere.finish()
    got = tuple(anywhere.get(t) for t in (y, own, zero))
    same(got, numerics.fake_quantize_dynamic(x, "per_channel", 0, False, -128, 127), "dynamic")


@pytest.mark.parametrize(
    ("name", "argument", "call"),
    [
        ("fake_quantize", "x", (torch.ones(2, 8).double(), torch.ones(1))),
        ("fake_quantize", "scale", (torch.ones(2, 8), torch.ones(3))),
        ("fake_quantize", "qmax", (torch.ones(2, 8), torch.ones(1), None, "per_tensor", 0, 5, 5)),
        ("fake_quantize_dynamic", "group_size", (torch.ones(2, 8), "per_group", 3)),
        ("fake_quantize_backward", "mask", (torch.ones(2, 8), torch.ones(3, dtype=torch.uint8))),
        ("fake_quantize_lsq_backward", "grad", (torch.ones(2, 7), torch.ones(2, 8), torch.ones(1))),
    ],
)
def test_refusals_name_the_argument(there: CudaOps, name: str, argument: str, call: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        getattr(there, name)(*call)
    assert caught.value.argument == argument


@pytest.mark.parametrize("dtype", problems.FLOATS, ids=str)
def test_memory_is_touched_once_and_in_whole_sectors(there: CudaOps, dtype: torch.dtype, tmp_path: Path) -> None:
    if not there.is_simulator:
        pytest.skip("the simulator counts; a GPU's profiler is another tool")
    rows, cols, size = 4, 4096, dtype.itemsize
    x = there.put(Draw(BASE_SEED, "gpu fake traffic").normal(rows, cols).to(dtype))
    scale, bits = there.put(torch.full((rows,), 0.01)), rows * cols // 8
    one, groups = rows * cols * size, there.put(torch.full((rows, cols // 128), 0.01))
    library = torch.ops.pyquant_sim
    _, mask = library.fake_quantize(x, there.put(torch.tensor([0.01])))
    there.finish()
    given = (None, "per_channel", 0, -127, 127)
    launches: dict[str, tuple[Any, int, int, int]] = {  # launch, bytes in, bytes out, launches of it
        "given": (lambda: library.fake_quantize(x, scale, *given), one, one + bits, 1),
        "groups": (lambda: library.fake_quantize(x, groups, None, "per_group", 128, -7, 7), one, one + bits, 1),
        "rows": (lambda: library.fake_quantize_dynamic(x, "per_channel"), one, one, 1),
        "own groups": (lambda: library.fake_quantize_dynamic(x, "per_group", 128), one, one, 1),
        "tensor": (lambda: library.fake_quantize_dynamic(x, "per_tensor"), 2 * one, one, 2),
        "backward": (lambda: library.fake_quantize_backward(x, mask), one + bits, one, 1),
        "learned": (lambda: library.fake_quantize_lsq_backward(x, x, scale, *given), 2 * one, one, 2),
    }
    for name, (launch, bytes_in, bytes_out, count) in launches.items():
        path = tmp_path / f"{name}.json"
        simulator.runtime.ptxsim_config(b"PTXSIM_STATS", str(path).encode())
        launch()
        there.finish()
        simulator.runtime.ptxsim_config(b"PTXSIM_STATS", None)
        counters = json.loads(path.read_text())[-count:]
        for kind, least in (("global_load", bytes_in), ("global_store", bytes_out)):
            asked = sum(c[kind]["bytes"] for c in counters)
            touched = 32 * sum(c[kind]["sectors"] for c in counters)
            assert least <= asked <= 1.15 * least + (1 << 13), f"{name} {kind}: {asked} bytes of {least}"
            assert touched <= least / 0.9 + (1 << 14), f"{name} {kind}: sectors of {touched} bytes for {least}"
