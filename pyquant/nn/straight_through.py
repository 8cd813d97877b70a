"""The gradient of an integer layer: straight through the rounding of its input.

Rounding has no useful derivative; it is taken as 1 where the input is inside the range of codes and 0 where a static
range clips it (a dynamic range clips nothing). The product then has the derivative of a Linear with the dequantised
weights. Source: Bengio, Leonard, Courville 2013, arXiv:1308.3432.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from pyquant.numerics.activation import ACTIVATIONS
from pyquant.ops.autograd import activation_gradient

if TYPE_CHECKING:
    from pyquant.core.patches import Patches
    from pyquant.nn.linear_call import LinearCall


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        residual: Tensor | None,
        storage: Tensor,
        weight: Tensor | None,
        scale: Tensor | None,
        zero_point: Tensor | None,
        bias: Tensor | None,
        low: Tensor | None,
        high: Tensor | None,
        layer: LinearCall,
    ) -> Tensor:
        return layer._run(x, residual, storage)  # an operand: vmap may have made a batch of it

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, residual, *numbers, layer = inputs
        ctx.save_for_backward(x, *numbers)
        ctx.save_for_forward(x, *numbers)
        ctx.form, ctx.fused = layer._form, (layer.activation, *layer.clamp)
        ctx.residual_dtype, ctx.out_dtype = None if residual is None else residual.dtype, output.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, low, high = _saved(ctx)
        g, patches = _through_activation(ctx, grad.float(), x, weight, bias), ctx.form.patches
        back = g @ weight if patches is None else patches.convolve_backward(g, weight, x.shape)
        grad_x = _inside(back, x, low, high)
        grad_residual = None if ctx.residual_dtype is None else grad.to(ctx.residual_dtype)
        return grad_x.to(x.dtype), grad_residual, *(None,) * 8


class _WithTangents(_StraightThrough):
    """With forward mode; a separate class, as torch.compile refuses functions that have a jvp."""

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, residual: Tensor | None, *others: Any) -> Tensor:
        x, weight, bias, low, high = _saved(ctx)
        moved = torch.zeros_like(x, dtype=torch.float32) if tangent is None else tangent.float()
        t = _product(_inside(moved, x, low, high), weight, None, ctx.form.patches)
        t = _through_activation(ctx, t, x, weight, bias)
        return (t if residual is None else t + residual.float()).to(ctx.out_dtype)


def _saved(ctx: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """x, the real weights, the bias and the limits of x. Weights are dequantised here: of a forward whose derivative
    nobody asks for, as of every call outside of torch.no_grad, they would be nearly all of the time."""
    x, storage, weight, scale, zero_point, bias, low, high = ctx.saved_tensors
    real = ctx.form.real(storage, scale, zero_point, torch.float32) if weight is None else weight
    return x, real, bias, low, high


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, patches: Patches | None) -> Tensor:
    return F.linear(x, weight, bias) if patches is None else patches.convolve(x, weight, bias)


def _through_activation(ctx: Any, change: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if ctx.fused[0] == "none":
        return change
    return activation_gradient(_product(x.float(), weight, bias, ctx.form.patches), change, *ctx.fused)


def _inside(change: Tensor, x: Tensor, low: Tensor | None, high: Tensor | None) -> Tensor:
    """The change where a static range does not clip x, else 0."""
    return change if low is None or high is None else change * ((x.float() >= low) & (x.float() <= high))


def apply(layer: LinearCall, x: Tensor, residual: Tensor | None) -> Tensor:
    """layer(x, residual) with gradients for x and residual."""
    function = _StraightThrough if forward_ad._current_level < 0 else _WithTangents
    # Dynamo refuses much in a backward; and what a compiled forward does not need is not computed in it.
    weight = layer._real(torch.float32) if torch.compiler.is_compiling() else None
    scaled = layer.weight_scale_, layer.weight_zero_point_
    numbers = (layer.storage, weight, *scaled, layer.bias_, *limits(layer))
    y: Tensor = function.apply(x, residual, *numbers, layer)  # type: ignore[no-untyped-call]
    return y


def is_transformed() -> bool:
    """Whether the call runs inside of torch.func or forward-mode differentiation, which know no op of ours."""
    if forward_ad._current_level >= 0:
        return True
    # what compilers trace has an answer to the other question whether there is a stack or not
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def smooth(layer: LinearCall, x: Tensor, residual: Tensor | None) -> Tensor:
    """A layer with floating-point products, in torch's own operations: they have every derivative."""
    y = _product(x.float(), layer._real(torch.float32), layer.bias_, layer._form.patches)
    activation = ACTIVATIONS[layer.activation]
    y = activation.plain(y, *activation.limits(*layer.clamp))
    return (y if residual is None else y + residual.float()).to(x.dtype)


def limits(layer: LinearCall) -> tuple[Tensor | None, Tensor | None]:
    """The real numbers at which a static range begins to clip."""
    if layer.scheme.inputs is None or layer.input_scale_ is None:
        return None, None
    qmin, qmax = layer.scheme.inputs.code_range
    zero_point = 0 if layer.input_zero_point_ is None else layer.input_zero_point_
    return layer.input_scale_ * (qmin - zero_point), layer.input_scale_ * (qmax - zero_point)
