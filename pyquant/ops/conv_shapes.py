"""Shape, dtype and refusal rule of the fused convolution, as in shapes.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyquant.core.dtypes import FLOATS, describe, dtype_name
from pyquant.core.patches import Patches
from pyquant.errors import ArgumentError
from pyquant.ops import check, linear_shapes


def qconv2d(
    x: Tensor,
    packed: Tensor,
    residual: Tensor | None,
    spec: Sequence[int],
    window: Sequence[int],
    out_dtype: torch.dtype | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
) -> Tensor:
    s, patches = linear_shapes.linear_spec(spec), Patches.from_ints(window)
    codes = (torch.int8,) if s.input == "static" else ()
    check.dtype_in("x", x, (*FLOATS, *codes) if x_scale is None else (torch.int8,))
    check.exact_dim("x", x, 4)
    linear_shapes.codes_params(s, x, x_scale, x_zero_point, [x.shape[0]])
    if s.k % patches.pixels:
        kernel = f"{patches.kernel_size[0]} x {patches.kernel_size[1]} taps"
        raise ArgumentError("window", kernel, f"a divisor of k = {s.k}")
    if s.n % patches.groups:
        raise ArgumentError("window", f"{patches.groups} groups", f"a divisor of n = {s.n}")
    channels = s.k // patches.pixels * patches.groups
    if x.shape[1] != channels:
        raise ArgumentError("x", describe(x), f"[B, {channels}, H, W]")
    size = patches.out_size(x.shape[2], x.shape[3])
    linear_shapes.packed_buffer(packed, s)
    check.same_device("packed", packed, x)
    check.vector("residual", residual, x, FLOATS, [x.shape[0], s.n, *size])
    if s.activation == "clamp" and not s.clamp_min <= s.clamp_max:
        raise ArgumentError("clamp_min", s.clamp_min, "at most clamp_max")
    if not x.dtype.is_floating_point:
        linear_shapes.codes_bound(s, x)
    dtype = torch.int8 if s.codes_out else x.dtype if x.dtype.is_floating_point else torch.float32
    if s.codes_out and out_dtype not in (None, torch.int8):
        raise ArgumentError("out_dtype", dtype_name(out_dtype), "int8")
    dtype = dtype if out_dtype is None else out_dtype
    check.dtype_among("out_dtype", dtype, (torch.int8,) if s.codes_out else FLOATS)
    if is_channels_last(x):
        return x.new_empty([x.shape[0], *size, s.n], dtype=dtype).permute(0, 3, 1, 2)
    return x.new_empty([x.shape[0], s.n, *size], dtype=dtype)


def is_channels_last(x: Tensor) -> bool:
    """Whether [B, C, H, W] lies as [B, H, W, C] and not also as [B, C, H, W]: the result then does, too."""
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
