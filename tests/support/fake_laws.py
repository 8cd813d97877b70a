"""Laws of the fake quantisers, for any implementation: the specification, the CPU's kernels, the GPU's.

Reference: brute.py, float64 step by step, elements and bits in plain numpy loops' order.
"""

from __future__ import annotations

from typing import Any

import accept
import brute
import laws
import numpy as np
import problems
import torch
from problems import Draw, Values
from torch import Tensor

SIZES = ((1, 1), (3, 7), (5, 48), (2, 129), (9, 100), (1, 2100))
DTYPES = problems.FLOATS


def group_of(granularity: str, cols: int, draw: Draw) -> int:
    """A group size that divides cols, or 0 where there are no groups."""
    if granularity != "per_group":
        return 0
    return draw.choice([g for g in (1, 3, 4, 7, 16, 25, 32, 43, 100, 128, 2100) if cols % g == 0])


def given(draw: Draw, x: Tensor, granularity: str, group: int, spread: float = 1.0) -> tuple[Any, ...]:
    """Scale, zero point, granularity, group, qmin and qmax for x: a good share of normal elements clips."""
    symmetric, qmin, qmax = draw.choice(laws.RANGES)
    _, shape = brute.blocks(tuple(x.shape), granularity, group)
    scale = (0.5 + draw.uniform(*shape)) * (spread / qmax)
    zero_point = None if symmetric else draw.codes(qmin, qmax, *shape)
    return scale, zero_point, granularity, group, qmin, qmax


def inside(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, granularity: str, group: int, qmin: int, qmax: int
) -> np.ndarray:
    """Which elements are not clipped, from the definition in real codes rather than from shifted limits."""
    index, _ = brute.blocks(tuple(x.shape), granularity, group)
    zero = 0 if zero_point is None else zero_point.numpy().reshape(-1).astype(np.int64)[index]
    with np.errstate(all="ignore"):
        steps = np.rint(brute.f32(brute.wide(x) * brute.f32(1 / brute.wide(scale).reshape(-1)[index])))
        return (steps + zero >= qmin) & (steps + zero <= qmax)


def packed(bits: np.ndarray) -> Tensor:
    return torch.from_numpy(np.packbits(bits.reshape(-1), bitorder="little"))


def forward(impl: Any, x: Tensor, arguments: tuple[Any, ...], what: str) -> None:
    """y is the code of the reference, dequantised once; the mask says what the clamp did not touch."""
    y, mask = impl.fake_quantize(x, *arguments)
    scale, zero_point, granularity, group = arguments[:4]
    codes = brute.quantize(x, *arguments)
    want = brute.dequantize(codes, scale, zero_point, granularity, group, x.dtype)
    accept.t1(y, want, what=f"y of {what}", waiver=laws.CATALOGUE)
    accept.t0(mask, packed(inside(x, *arguments)), what=f"mask of {what}", waiver=laws.CATALOGUE)


def catalogue(impl: Any, values: Values, granularity: str, seed: int) -> None:
    """Ties, NaN, infinities, subnormals, huge and tiny numbers under static scales and their own."""
    draw = Draw(seed, "fake", values.name, granularity)
    rows, cols = draw.choice(SIZES)
    x = values.tensor(rows, cols, draw.choice(DTYPES), seed)
    group = group_of(granularity, cols, draw)
    what = f"{values.name} {x.dtype} [{rows}, {cols}] {granularity} group={group} seed={seed}"
    scale, zero_point, *rest = given(draw, x, granularity, group)
    if draw.chance(0.5):
        scale = torch.full_like(scale, draw.choice(problems.STATIC_SCALES))
    forward(impl, x, (scale, zero_point, *rest), what)
    symmetric, qmin, qmax = draw.choice(laws.RANGES)
    y, s, z = impl.fake_quantize_dynamic(x, granularity, group, symmetric, qmin, qmax)
    codes, scale, zero_point = brute.quantize_dynamic(x, granularity, group, symmetric, qmin, qmax)
    accept.t1(s, scale, what=f"scale of {what}", waiver=laws.CATALOGUE)
    accept.t0(z, zero_point, what=f"zero point of {what}", waiver=laws.CATALOGUE)
    real = brute.dequantize(codes, scale, zero_point, granularity, group, x.dtype)
    accept.t1(y, real, what=f"dynamic y of {what}", waiver=laws.CATALOGUE)


def normal(impl: Any, granularity: str, seed: int) -> None:
    """Numbers of which a share clips, every dtype and a tail of every length of a vector."""
    draw = Draw(seed, "fake normal", granularity)
    for dtype in DTYPES:
        rows, cols = draw.integer(1, 6), draw.integer(1, 150)
        x = draw.normal(rows, cols).to(dtype)
        group = group_of(granularity, cols, draw)
        forward(impl, x, given(draw, x, granularity, group), f"[{rows}, {cols}] {dtype} {granularity} seed={seed}")


def backward(impl: Any, granularity: str, seed: int) -> None:
    """Masked gradients bit for bit; the gradient of the scale within its roundings of a float64 sum, and bit for bit
    that of the specification."""
    draw = Draw(seed, "fake backward", granularity)
    for dtype in DTYPES:
        rows, cols = draw.choice(((3, 50), (1, 1), (2, 2100), (40, 64), (5, 129)))
        x, grad = draw.normal(rows, cols).to(dtype), draw.normal(rows, cols).to(dtype)
        group = group_of(granularity, cols, draw)
        arguments = given(draw, x, granularity, group)
        what = f"[{rows}, {cols}] {dtype} {granularity} group={group} seed={seed}"
        keep = inside(x, *arguments)
        masked = torch.where(torch.from_numpy(keep), grad, torch.zeros((), dtype=dtype))
        accept.t1(impl.fake_quantize_backward(grad, packed(keep)), masked, what=what, waiver="few elements")
        grad_x, grad_scale = impl.fake_quantize_lsq_backward(grad, x, *arguments)
        accept.t1(grad_x, masked, what=what, waiver="few elements")
        scale_gradient(grad_scale, grad, x, arguments, what)


def scale_gradient(got: Tensor, grad: Tensor, x: Tensor, arguments: tuple[Any, ...], what: str) -> None:
    """Against the derivative of the straight-through form s * (v + constant), computed in float64."""
    scale, zero_point, granularity, group, qmin, qmax = arguments
    index, _ = brute.blocks(tuple(x.shape), granularity, group)
    zero = 0 if zero_point is None else zero_point.numpy().reshape(-1).astype(np.int64)[index]
    v = brute.f32(brute.wide(x) * brute.f32(1 / brute.wide(scale).reshape(-1)[index]))
    clipped = np.clip(np.rint(v), qmin - zero, qmax - zero)
    slope = np.where(inside(x, *arguments), np.rint(v) - v, clipped)
    terms = brute.wide(grad) * slope
    count = scale.numel()
    want = np.bincount(index.reshape(-1), terms.reshape(-1), minlength=count)
    size = np.bincount(index.reshape(-1), np.abs(terms).reshape(-1), minlength=count)
    # A term rounds twice (slope, product), and a sum passes 16 + 6 additions per level of 1 024 elements.
    error = np.abs(brute.wide(got).reshape(-1) - want)
    assert got.shape == scale.shape
    assert bool((error <= size * 50 * 2.0**-24).all()), f"{what}: grad_scale off by {error.max()} of {size.max()}"


def sums(impl: Any, seed: int) -> None:
    """The order of the additions, one by one in float64 rounded to float32."""
    draw = Draw(seed, "blocks")
    for k in (0, 1, 2, 63, 64, 65, 1000, 1024, 1025, 2100, 5000):
        v = draw.normal(2, k) * 10 ** (4 * draw.uniform(2, k))
        want = torch.stack([torch.tensor(one_sum(row)) for row in brute.wide(v)]).to(torch.float32)
        accept.t1(impl.sum_in_blocks(v), want, what=f"K = {k}", waiver="two sums")


def one_sum(v: np.ndarray) -> float:
    while True:
        blocks = [v[i : i + 1024] for i in range(0, max(len(v), 1), 1024)]
        results = []
        for block in blocks:
            lanes = [0.0] * 64
            for i, value in enumerate(block):
                lanes[i % 64] = float(brute.f32(lanes[i % 64] + value))
            while len(lanes) > 1:
                lanes = [float(brute.f32(a + b)) for a, b in zip(lanes[::2], lanes[1::2], strict=True)]
            results.append(lanes[0])
        if len(results) == 1:
            return results[0]
        v = np.array(results)
