"""The gradient of an integer layer: straight through the rounding of its input.

Rounding has no useful derivative; it is taken as 1 where the input lies inside the range of codes and 0 where a static
range clips it (a dynamic range clips nothing). The product then has the derivative of a Linear with the dequantised
weights. Source: Bengio, Leonard, Courville 2013, arXiv:1308.3432.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pyquant.ops.autograd import activation_gradient

if TYPE_CHECKING:
    from pyquant.nn.linear_call import LinearCall
    from pyquant.nn.qconv import QConv2d

_qlinear = torch.ops.pyquant.qlinear.default


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, storage: Tensor, spec: tuple[int, ...], weight: Tensor,
        bias: Tensor | None, limits: tuple[Tensor, Tensor] | None, fused: tuple[str, float, float],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.limits, ctx.fused = bias, limits, fused
        ctx.residual_dtype = None if residual is None else residual.dtype
        y: Tensor = _qlinear(x, storage, residual, spec)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = grad.float()
        if ctx.fused[0] != "none":
            g = activation_gradient(F.linear(x.float(), weight, ctx.bias), g, *ctx.fused)
        grad_x = g @ weight
        if ctx.limits is not None:
            low, high = ctx.limits
            grad_x = grad_x * ((x.float() >= low) & (x.float() <= high))
        grad_residual = None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype)
        return grad_x.to(x.dtype), grad_residual, None, None, None, None, None, None


class _Convolution(torch.autograd.Function):
    """The same for a convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, layer: QConv2d) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.residual_dtype = layer, None if residual is None else residual.dtype
        y: Tensor = layer._convolve(x, residual)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: QConv2d = ctx.layer
        x, fused = ctx.saved_tensors[0], (layer.activation, *layer.clamp)
        weight = layer.patches.image(layer.dequantised_weight(), layer.in_channels)
        with torch.enable_grad():
            real = x.detach().float().requires_grad_()
            y = layer.patches.convolve(real, weight, layer.bias)
        g = grad.float()
        if fused[0] != "none":
            g = activation_gradient(y.detach(), g, *fused)
        (grad_x,) = torch.autograd.grad(y, real, g)
        limits = _limits(layer)
        if limits is not None:
            grad_x = grad_x * ((real >= limits[0]) & (real <= limits[1]))
        return grad_x.to(x.dtype), None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype), None


def apply(layer: LinearCall, x: Tensor, residual: Tensor | None) -> Tensor:
    """layer(x, residual) with gradients for x and residual."""
    limits = _limits(layer)
    storage = layer.storage
    fused = (layer.activation, *layer.clamp)
    weight = layer.dequantised_weight()
    y: Tensor = _StraightThrough.apply(x, residual, storage, layer._spec, weight, layer.bias, limits, fused)  # type: ignore[no-untyped-call]
    return y


def apply_convolution(layer: QConv2d, x: Tensor, residual: Tensor | None) -> Tensor:
    """layer(x, residual) of a convolution, with gradients for x and residual."""
    y: Tensor = _Convolution.apply(x, residual, layer)  # type: ignore[no-untyped-call]
    return y


def _limits(layer: LinearCall) -> tuple[Tensor, Tensor] | None:
    """The real numbers at which a static range begins to clip."""
    if layer.scheme.inputs is None or layer.input_scale is None:
        return None
    qmin, qmax = layer.scheme.inputs.code_range
    zero_point = 0 if layer.input_zero_point is None else layer.input_zero_point
    return layer.input_scale * (qmin - zero_point), layer.input_scale * (qmax - zero_point)
