"""The fused convolution: its typed call, and what it means in terms of the other ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyquant.core import arguments
from pyquant.core.image_layout import laid_out
from pyquant.core.patches import Patches
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.ops import conv_shapes, linear_shapes, rows_layout
from pyquant.ops.translate import call

_ops = torch.ops.pyquant


def _wire(argument: str, values: Sequence[int], maker: str) -> list[int]:
    if not isinstance(values, (list, tuple)):
        raise ArgumentError(argument, arguments.shown(values), f"integers as {maker}.to_ints() gives")
    return list(values)


def qconv2d(
    x: Tensor,
    packed: Tensor,
    residual: Tensor | None = None,
    spec: Sequence[int] = (),
    window: Sequence[int] = (),
    out_dtype: torch.dtype | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
) -> Tensor:
    """A whole quantised convolution: quantise the images (or take codes), multiply integers, ordered epilogue.

    x          float32, float16, bfloat16 [B, C, H, W], with one scale for all images (static inputs) or one an image
               (dynamic inputs); or int8 codes, of the static scale or of x_scale.
    packed     uint8 buffer of pack_linear with the same spec: k = kernel height * kernel width * C / groups, in that
               order.
    residual   float [B, N, H', W'] or None.     out_dtype   as in qlinear; int8 where the spec says codes_out.
    window     integers of Patches.to_ints(): kernel, stride, padding (top, bottom, left, right), dilation, and groups,
               which divide C and N.
    x_scale, x_zero_point   float32 and int32 [B]: what came with int8 codes of a spec with dynamic inputs;
               x_zero_point only where the inputs are affine, None: 0. The codes must lie within the spec's limits.
    ->         [B, N, H', W'], channels_last where x is. An image that holds NaN or infinity gives NaN throughout when
               quantised dynamically.
    No matrix of patches exists: the kernels read the codes of each image through the window; on CUDA where it divides
    channels by 16, or has groups.
    Raises ArgumentError, UnsupportedError. Source: docs/numerics.md 11.

    Example:
        >>> from pyquant.ops import LinearSpec, layout_for, pack_linear
        >>> spec = LinearSpec(n=2, k=9, layout=layout_for(torch.device("cpu"))).to_ints()
        >>> packed = pack_linear(torch.ones(2, 9, dtype=torch.int8), torch.ones(2), spec)
        >>> window = Patches((3, 3), padding=(1, 1, 1, 1)).to_ints()
        >>> qconv2d(torch.ones(1, 1, 2, 2), packed, None, spec, window).flatten().tolist()
        [4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0]
    """
    words, shape = _wire("spec", spec, "LinearSpec"), _wire("window", window, "Patches")
    return call(_ops.qconv2d.default, x, packed, residual, words, shape, out_dtype, x_scale, x_zero_point)


def by_patches(
    x: Tensor,
    packed: Tensor,
    residual: Tensor | None,
    spec: Sequence[int],
    window: Sequence[int],
    out_dtype: torch.dtype | None = None,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
    in_groups: Callable[..., Tensor] | None = None,
) -> Tensor:
    """qconv2d of ops that are there anyway: codes, patches, qlinear. For devices without a kernel of its own.

    in_groups  (groups, rows [groups, rows, K], and the other operands of qlinear) -> [rows, N]; None: one group only.
    """
    out = conv_shapes.qconv2d(x, packed, residual, spec, window, out_dtype, x_scale, x_zero_point)
    s, patches = linear_shapes.linear_spec(spec), Patches.from_ints(window)
    if patches.groups > 1 and (in_groups is None or x.is_cuda):
        why = f"qconv2d: {patches.groups} groups; it takes 1 on {x.device}: keep such layers in floating point there"
        raise UnsupportedError(f"no kernel for a convolution in groups on {x.device}", [why])
    last, limits, zero_point = conv_shapes.is_channels_last(x), (s.x_qmin, s.x_qmax), x_zero_point
    # codes keep the memory layout of the image: what moves later is one byte an element
    lying = x.permute(0, 2, 3, 1) if last else x
    if s.input == "static":
        parts = rows_layout.parts(s, packed)
        zero_point = parts.x_zero_point
        if x.dtype.is_floating_point:
            lying = _ops.quantize(lying, parts.x_scale, zero_point, "per_tensor", 0, *limits)
    elif x_scale is None:
        flat = lying.reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3])  # a range knows no order
        codes, x_scale, zero_point = _ops.quantize_dynamic(flat, "per_token", 0, s.x_symmetric, *limits)
        lying, zero_point = codes.reshape(lying.shape), None if s.x_symmetric else zero_point
    rows = patches.gather(lying if last else lying.permute(0, 2, 3, 1), zero_point)
    batch, n, height, width = out.shape
    if residual is not None:
        residual = residual.permute(0, 2, 3, 1).reshape(batch * height * width, n)
    per_row: list[Tensor | None] = [None, None]
    if s.input != "static":
        given = (x_scale, zero_point)
        per_row = [None if v is None else v.reshape(-1, 1).expand(batch, height * width).reshape(-1) for v in given]
    operands = (packed, residual, list(spec), out.dtype, *per_row)
    if patches.groups > 1 and in_groups is not None:
        y = in_groups(patches.groups, patches.rows_of_groups(rows), *operands)
    else:
        y = _ops.qlinear(rows, *operands)
    y = y.reshape(batch, height, width, n).permute(0, 3, 1, 2)
    return y if last else laid_out(y, False)  # type: ignore[no-any-return]
