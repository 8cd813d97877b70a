"""Backward formulas of the ops that have a derivative.

Codes have none, nor has a scale that is made with them: the norm_quantize ops pass on the gradient of their sum and
nothing else. `qlinear` is trained through straight-through estimation in pyquant.nn, which knows the float weights;
here are the ops that are smooth in their float arguments: weight_only_linear, float_linear, and dequantize (linear in
its scale); and the fake quantisers, whose derivative is the straight-through estimate: the gradient of what was not
clipped, unchanged. Their scale gets none: a learned one calls fake_quantize_lsq_backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pyquant import numerics
from pyquant.core.dtypes import code_type
from pyquant.numerics.activation import ACTIVATIONS


def activation_gradient(
    pre: Tensor, grad: Tensor, activation: str, clamp_min: float = 0.0, clamp_max: float = 0.0
) -> Tensor:
    """grad * activation'(pre), float32: the derivative of torch's own activation, in ops that a compiler can trace."""
    entry = ACTIVATIONS[activation]
    return entry.gradient(grad, pre, *entry.limits(clamp_min, clamp_max))


def _linear_backward(
    ctx: Any, grad: Tensor, x: Tensor, w: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, w, bias and residual of y = activation(x @ w.T + bias) + residual, products only where they are
    asked for: a weight of codes has no gradient, and in a model with adapters few weights need one. Saved tensors are
    given: under checkpointing they can be asked for once."""
    needs_x, needs_w = ctx.needs_input_grad[:2]
    g = grad.float()
    residual = grad.to(ctx.residual_dtype) if ctx.residual_dtype is not None else None
    if ctx.fused[0] != "none":
        pre = F.linear(x.float(), w.float(), bias)
        g = activation_gradient(pre, g, *ctx.fused)
    rows = rows_of(g)
    grad_x = (g @ w.float()).to(x.dtype) if needs_x else None
    grad_w = rows.T @ rows_of(x).float() if needs_w else None
    return grad_x, grad_w, rows.sum(0) if bias is not None else None, residual


def rows_of(x: Tensor) -> Tensor:
    """[..., K] as a matrix [rows, K], also where rows or K are none."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _float_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, residual, *ctx.fused, _ = inputs  # activation, clamp_min, clamp_max
    ctx.save_for_backward(x, w, bias)
    ctx.residual_dtype = None if residual is None else residual.dtype


def _float_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, w, bias = ctx.saved_tensors
    grad_x, grad_w, grad_bias, grad_residual = _linear_backward(ctx, grad, x, w, bias)
    return grad_x, None if grad_w is None else grad_w.to(w.dtype), grad_bias, grad_residual, *(None,) * 4


def _weight_only_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, residual, ctx.w_bits, ctx.group_size, activation, clamp_min, clamp_max, _ = inputs
    ctx.save_for_backward(*tensors)  # x, w, w_scale, w_zero_point, bias: a write to any of them before then is noticed
    ctx.fused = activation, clamp_min, clamp_max
    ctx.residual_dtype = None if residual is None else residual.dtype


def _weight_only_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, w, w_scale, w_zero_point, bias = ctx.saved_tensors
    codes = numerics.unpack(w, x.shape[-1], code_type(ctx.w_bits))
    granularity = "per_group" if ctx.group_size else "per_channel"
    real = numerics.dequantize(codes, w_scale, w_zero_point, granularity, ctx.group_size)
    grad_x, _, grad_bias, grad_residual = _linear_backward(ctx, grad, x, real, bias)
    return grad_x, None, None, None, grad_bias, grad_residual, *(None,) * 6


def _dequantize_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, scale, zero_point, granularity, group_size, _ = inputs
    ctx.save_for_backward(q, scale, zero_point)
    ctx.granularity, ctx.group_size = granularity, group_size


def _dequantize_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, scale, zero_point = ctx.saved_tensors
    steps = numerics.dequantize(q, torch.ones_like(scale), zero_point, ctx.granularity, ctx.group_size)
    product = grad.float() * steps
    if ctx.granularity == "per_tensor":
        grad_scale = product.sum().reshape(scale.shape)
    elif ctx.granularity == "per_group":
        grad_scale = product.unflatten(-1, (-1, ctx.group_size)).sum(-1)
    else:
        grad_scale = product.sum(-1)
    return None, grad_scale, None, None, None, None


def _codes_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.input_count = len(inputs)
    ctx.mark_non_differentiable(*output[:3])


def _codes_backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """The sum of the add_ ops passes its gradient to x and residual; the other ops never get here."""
    given = (grads[3], grads[3]) if len(grads) == 4 else ()
    return (*given, *(None,) * (ctx.input_count - len(given)))


def _hadamard_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.block, ctx.scale = inputs[1:]


def _hadamard_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return numerics.hadamard_backward(grad, ctx.block, ctx.scale), None, None


def _fake_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _fake_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    grad_x = torch.ops.pyquant.fake_quantize_backward(grad, ctx.saved_tensors[0])
    return grad_x, None, None, None, None, None, None


def _fake_dynamic_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])


def _fake_dynamic_backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    return grad, None, None, None, None, None


def _mask_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _mask_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.pyquant.fake_quantize_backward(grad, ctx.saved_tensors[0]), None


def register(library: torch.library.Library) -> None:
    """Attach every formula of this file to its op."""
    for name, backward, setup in (
        ("float_linear", _float_backward, _float_setup),
        ("weight_only_linear", _weight_only_backward, _weight_only_setup),
        ("dequantize", _dequantize_backward, _dequantize_setup),
        ("fake_quantize", _fake_backward, _fake_setup),
        ("fake_quantize_dynamic", _fake_dynamic_backward, _fake_dynamic_setup),
        ("fake_quantize_backward", _mask_backward, _mask_setup),
        ("rms_norm_quantize", _codes_backward, _codes_setup),
        ("layer_norm_quantize", _codes_backward, _codes_setup),
        ("add_rms_norm_quantize", _codes_backward, _codes_setup),
        ("add_layer_norm_quantize", _codes_backward, _codes_setup),
        ("silu_mul_quantize", _codes_backward, _codes_setup),
        ("activation_mul_quantize", _codes_backward, _codes_setup),
        ("hadamard_quantize", _codes_backward, _codes_setup),
        ("hadamard_transform", _hadamard_backward, _hadamard_setup),
    ):
        torch.library.register_autograd(f"pyquant::{name}", backward, setup_context=setup, lib=library)
