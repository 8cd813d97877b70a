"""References that share nothing with the code under test: int64 sums, float64 steps rounded to float32 one by one.

Why float64 is exact enough: a float32 product fits in 48 bits; a quotient, sum or difference of float32 numbers that is
rounded to 53 bits and then to 24 equals the one rounded at once (53 >= 2 * 24 + 2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray


def wide(t: Tensor) -> Array:
    """A float tensor as float64."""
    return t.detach().to(torch.float64).numpy()


def f32(x: Array) -> Array:
    """float64 rounded to float32 (half to even), held in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


def back(x: Array, dtype: torch.dtype = torch.float32) -> Tensor:
    """float64 that holds float32 values, rounded once more to a tensor of `dtype` (half to even, by integer steps)."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.ascontiguousarray(x, dtype=np.float64).astype(np.float32)
        if dtype == torch.float32:
            return torch.from_numpy(single)
        if dtype == torch.float16:
            return torch.from_numpy(single.astype(np.float16))
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = np.where(np.isnan(single), 0x7FC0, rounded).astype(np.uint16)
    return torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16)


# ---- quantisation


def scale_of_amax(amax: float, qmax: int) -> float:
    if not np.isfinite(amax):
        return np.nan
    return 1.0 if amax < 2.0**-100 else float(f32(np.float64(amax) / qmax))


def qparams_of_range(low: float, high: float, qmin: int, qmax: int) -> tuple[float, int]:
    if not (np.isfinite(low) and np.isfinite(high)):
        return np.nan, 0
    low, high, steps = min(low, 0.0), max(high, 0.0), qmax - qmin
    if max(high, -low) < 2.0**-100:
        return 1.0, qmin
    scale = float(f32(f32(np.float64(high) / steps) - f32(np.float64(low) / steps)))
    codes_below = float(np.rint(f32(low * f32(1 / np.float64(scale)))))
    return scale, int(min(max(qmin - codes_below, qmin), qmax))


def codes(x: Array, scale: Array, zero_point: Array, qmin: int, qmax: int) -> Array:
    """int64 codes; every argument broadcastable."""
    with np.errstate(all="ignore"):
        recip = f32(1 / np.asarray(scale, dtype=np.float64))
        steps = np.rint(f32(x * recip))
        code = np.clip(steps + zero_point, qmin, qmax)
    return np.where(np.isnan(steps), zero_point, code).astype(np.int64)


def blocks(shape: tuple[int, ...], granularity: str, group_size: int) -> tuple[Array, tuple[int, ...]]:
    """Which scale every element of a tensor uses, as indices of the flattened scales, and their shape."""
    rows, k = int(np.prod(shape[:-1])), shape[-1] if shape else 1
    if granularity == "per_tensor":
        return np.zeros(shape, dtype=np.int64), (1,)
    row = np.repeat(np.arange(rows), k).reshape(shape)
    if granularity != "per_group":
        return row, tuple(shape[:-1])
    groups = k // group_size
    column = np.broadcast_to(np.arange(k) // group_size, shape)
    return row * groups + column, (*shape[:-1], groups)


def quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, granularity: str, group_size: int, qmin: int, qmax: int
) -> Tensor:
    index, _ = blocks(tuple(x.shape), granularity, group_size)
    s = wide(scale).reshape(-1)[index]
    z = np.zeros_like(index) if zero_point is None else zero_point.numpy().reshape(-1).astype(np.int64)[index]
    return torch.from_numpy(codes(wide(x), s, z, qmin, qmax).astype(np.int8))


def quantize_dynamic(
    x: Tensor, granularity: str, group_size: int, symmetric: bool, qmin: int, qmax: int
) -> tuple[Tensor, Tensor, Tensor]:
    index, shape = blocks(tuple(x.shape), granularity, group_size)
    data, count = wide(x), int(np.prod(shape))
    scale, zero_point = np.ones(count), np.zeros(count, dtype=np.int64)
    for i in range(count):
        part = data[index == i]
        if symmetric:
            scale[i] = scale_of_amax(float(np.abs(part).max()) if part.size else 0.0, qmax)
        else:
            ends = (float(part.min()), float(part.max())) if part.size else (0.0, 0.0)
            scale[i], zero_point[i] = qparams_of_range(*ends, qmin, qmax)
    q = codes(data, scale[index], zero_point[index], qmin, qmax).astype(np.int8)
    return torch.from_numpy(q), back(scale).reshape(shape), torch.from_numpy(zero_point.astype(np.int32)).reshape(shape)


def dequantize(
    q: Tensor, scale: Tensor, zero_point: Tensor | None, granularity: str, group_size: int, out_dtype: torch.dtype
) -> Tensor:
    index, _ = blocks(tuple(q.shape), granularity, group_size)
    z = 0 if zero_point is None else zero_point.numpy().reshape(-1).astype(np.int64)[index]
    with np.errstate(all="ignore"):
        return back(f32((q.numpy().astype(np.int64) - z) * wide(scale).reshape(-1)[index]), out_dtype)


# ---- products


def accumulate(x: Tensor, w: Tensor, x_zero_point: Tensor | None) -> Array:
    """int64 [M, N]: sum_k (x - zero_point) * w, the zero point taken from the codes before they are multiplied."""
    shifted = x.numpy().astype(np.int64)
    if x_zero_point is not None:
        shifted = shifted - x_zero_point.numpy().astype(np.int64).reshape(-1, 1)
    weights = w.numpy().astype(np.int64).T
    if shifted.size * weights.shape[1] <= 2**20:
        return shifted @ weights
    return (shifted.astype(np.float64) @ weights.astype(np.float64)).astype(np.int64)  # exact: |sum| < 2^53


def _activated(t: Array, activation: str, clamp_min: float, clamp_max: float) -> Array:
    if activation == "none":
        return t
    if activation == "relu":
        return np.where(t < 0, 0.0, t)
    if activation == "clamp":
        low, high = float(np.float32(clamp_min)), float(np.float32(clamp_max))
        return np.where(t < low, low, np.where(t > high, high, t))
    from pyquant.numerics import activation as curves  # held against the true functions by its own exhaustive test

    curve = {"gelu": curves.gelu_erf, "gelu_tanh": curves.gelu_tanh, "silu": curves.silu}[activation]
    return wide(curve(back(t)))


def gemm(x: Tensor, w_codes: Tensor, call: dict[str, Any]) -> Tensor:
    """The result of a GEMM problem (2-D x), every step of the epilogue rounded on its own."""
    get = call.get
    zero_point, group_size = get("x_zero_point"), get("group_size", 0)
    if get("out_dtype") == torch.int32:
        return torch.from_numpy(accumulate(x, w_codes, zero_point).astype(np.int32))
    w_scale = 1.0 if get("w_scale") is None else wide(get("w_scale"))
    x_scale = None if get("x_scale") is None else wide(get("x_scale"))
    per_token = x_scale is not None and x_scale.ndim > 0
    with np.errstate(all="ignore"):
        if group_size:
            t = np.zeros((x.shape[0], w_codes.shape[0]))
            for g in range(x.shape[1] // group_size):
                part = slice(g * group_size, (g + 1) * group_size)
                acc = accumulate(x[:, part], w_codes[:, part], zero_point)
                t = f32(t + f32(f32(acc) * w_scale[:, g]))
            t = t if x_scale is None else f32(t * (x_scale[:, None] if per_token else x_scale))
        else:
            t = f32(accumulate(x, w_codes, zero_point))
            if x_scale is None or per_token:
                t = f32(t * w_scale)
                t = t if x_scale is None else f32(t * x_scale[:, None])
            else:
                t = f32(t * f32(x_scale * w_scale))
        if get("bias") is not None:
            t = f32(t + wide(get("bias")))
        t = _activated(t, get("activation", "none"), get("clamp_min", 0.0), get("clamp_max", 0.0))
        if get("residual") is not None:
            t = f32(t + wide(get("residual")))
        if get("out_dtype") != torch.int8:
            return back(t, get("out_dtype", torch.float32))
        zero = 0 if get("out_zero_point") is None else int(get("out_zero_point"))
        q = codes(t, wide(get("out_scale")).reshape(()), zero, get("out_qmin", -127), get("out_qmax", 127))
    return torch.from_numpy(q.astype(np.int8))


def exact_value(x: Tensor, w_codes: Tensor, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """float64 value and magnitude (for T2 and T3) of scale * acc + bias without any rounding of steps."""
    acc = accumulate(x, w_codes, call.get("x_zero_point")).astype(np.float64)
    scaled = acc * (wide(call["x_scale"])[:, None] * wide(call["w_scale"]))
    bias = wide(call["bias"]) if call.get("bias") is not None else np.zeros(w_codes.shape[0])
    return torch.from_numpy(scaled + bias), torch.from_numpy(np.abs(scaled) + np.abs(bias))


# ---- norm before quantisation


def sum_in_lanes(x: Array) -> Array:
    """float64 that holds float32, [rows, K] -> [rows, 1]: 2048 lanes, each ascending, then neighbours pairwise."""
    lanes = np.zeros((x.shape[0], 2048))
    for first in range(0, x.shape[1], 2048):
        chunk = x[:, first : first + 2048]
        lanes[:, : chunk.shape[1]] = f32(lanes[:, : chunk.shape[1]] + chunk)
    while lanes.shape[1] > 1:
        lanes = f32(lanes[:, 0::2] + lanes[:, 1::2])
    return lanes


def hadamard(x: Tensor, block: int) -> Tensor:
    """[rows, c * block] -> float32, every sum of two one float64 operation rounded to float32."""
    base = {1: 1, 3: 12, 5: 20, 7: 28}[block // (block & -block)]
    twos = block // base
    signs = np.array([-1.0 if (j & j >> 1).bit_count() % 2 else 1.0 for j in range(block)])
    t = (wide(x).reshape(-1, block) * signs).reshape(-1, base, twos)
    with np.errstate(all="ignore"):
        if base > 1:
            matrix = paley(base)
            columns = []
            for b in range(base):
                total = matrix[0, b] * t[:, 0]
                for a in range(1, base):
                    total = f32(total + matrix[a, b] * t[:, a])
                columns.append(total)
            t = np.stack(columns, 1)
        step = twos // 2
        while step > 0:
            pairs = t.reshape(-1, base, twos // (2 * step), 2, step)
            a, b = pairs[:, :, :, 0], pairs[:, :, :, 1]
            t = np.stack((f32(a + b), f32(a - b)), 3).reshape(-1, base, twos)
            step //= 2
        return back(f32(t.reshape(x.shape) * f32(np.float64(1 / np.sqrt(float(block))))))


def paley(order: int) -> Array:
    """The Hadamard matrices of order 12, 20 and 28 as docs/numerics.md 15 writes them."""
    q = {12: 11, 20: 19, 28: 13}[order]
    squares = {i * i % q for i in range(1, q)}
    chi = np.array([[0 if i == j else 1 if (i - j) % q in squares else -1 for j in range(q)] for i in range(q)])
    if q % 4 == 3:
        matrix = np.ones((order, order))
        matrix[1:, 0] = -1
        matrix[1:, 1:] = chi + np.eye(q)
        return matrix
    conference = np.ones((q + 1, q + 1)) - np.eye(q + 1)
    conference[1:, 1:] = chi
    plain, diagonal = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
    return np.kron(conference, plain) + np.kron(np.eye(q + 1), diagonal)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, subtract_mean: bool) -> Tensor:
    """[rows, K] -> float32, every step one float64 operation rounded to float32."""
    t = wide(x)
    count = f32(np.float64(x.shape[1]))
    with np.errstate(all="ignore"):
        if subtract_mean:
            t = f32(t - f32(sum_in_lanes(t) / count))
        shifted = f32(f32(sum_in_lanes(f32(t * t)) / count) + f32(np.float64(eps)))
        factor = np.where(shifted < np.inf, f32(1 / f32(np.sqrt(shifted))), np.nan)
        t = f32(t * factor)
        if weight is not None:
            t = f32(t * wide(weight))
        if bias is not None:
            t = f32(t + wide(bias))
    return back(t)
