"""The fake-quantise ops as typed Python functions: quantisation as training sees it, forward and backward.

Formulas and rounding: docs/numerics.md 10.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyquant.errors import UnsupportedError
from pyquant.ops import check, load, values
from pyquant.ops.translate import call

_ops = torch.ops.pyquant
_below_autograd = torch._C._AutoDispatchBelowAutograd


class _Fake(torch.autograd.Function):
    """What autograd.py registers for the op, at half the cost of a call: small activations notice."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with _below_autograd():
            y, mask = call(_ops.fake_quantize.default, *arguments)
        ctx.save_for_backward(mask)
        ctx.mark_non_differentiable(mask)
        ctx.set_materialize_grads(False)
        return y, mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, (mask,) = grads[0], ctx.saved_tensors
        if grad is None:
            return (None,) * 7
        if torch.is_grad_enabled():  # create_graph: the masked gradient has a derivative of its own
            grad_x = _ops.fake_quantize_backward.default(grad, mask)
        else:
            with _below_autograd():
                grad_x = _ops.fake_quantize_backward.default(grad, mask)
        return grad_x, None, None, None, None, None, None


class _FakeDynamic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        with _below_autograd():
            y, scale, zero_point = call(_ops.fake_quantize_dynamic.default, *arguments)
        ctx.mark_non_differentiable(scale, zero_point)
        ctx.set_materialize_grads(False)
        return y, scale, zero_point

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None, None


def _has_tangent(x: object) -> bool:
    is_forward = forward_ad._current_level >= 0 and isinstance(x, Tensor)
    return is_forward and forward_ad.unpack_dual(x).tangent is not None  # type: ignore[arg-type]


def _run(op: Any, function: Any, x: Tensor, *arguments: Any) -> Any:
    """The op, by the cheapest equivalent way; compilers and functorch get the op itself."""
    if not torch.compiler.is_compiling() and _has_tangent(x):
        raise UnsupportedError(
            "a forward-mode derivative through a fake quantiser, whose straight-through estimate is known for reverse "
            "mode (backward, torch.func.grad) alone: it would be none, in silence"
        )
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or not isinstance(x, Tensor):
        return call(op, x, *arguments)
    if x.requires_grad and torch.is_grad_enabled():
        return function.apply(x, *arguments)
    with _below_autograd():
        return call(op, x, *arguments)


def _check(x: Tensor, scale: Tensor) -> None:
    """Values of the operands. The compiled op looks at scales on the CPU itself, for a tenth of the price."""
    if values.checks_enabled() or not (load.native_available() and isinstance(scale, Tensor) and scale.is_cpu):
        values.scale_values("scale", scale)
        values.finite_values("x", x)


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    granularity: str = "per_tensor",
    group_size: int = 0,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor]:
    """dequantize(quantize(x)) in one pass, and which elements were not clipped. Differentiable in x.

    x, scale, zero_point   as for quantize.
    ->           y, dtype and shape of x, contiguous: the codes of `quantize`, times scale, rounded once. Infinity
                 saturates, NaN becomes 0 (set_checks(True) raises instead).
                 mask, uint8 [ceil(numel / 8)]: bit i % 8 of byte i / 8 (row-major) is 1 where the element was not
                 clipped; 0 for NaN.
    The gradient of x is that of y where the mask is 1, else 0; scale and zero_point get none
    (fake_quantize_lsq_backward computes it).
    Raises ArgumentError naming the argument; NonFiniteError for a scale that is not finite and positive.
    Source: docs/numerics.md 10.1.

    Example:
        >>> x = torch.tensor([0.3, -9.0, 0.7], requires_grad=True)
        >>> y, mask = fake_quantize(x, torch.tensor([0.5]), qmin=-7, qmax=7)
        >>> y.sum().backward()
        >>> y.tolist(), mask.tolist(), x.grad.tolist()
        ([0.5, -3.5, 0.5], [5], [1.0, 0.0, 1.0])
    """
    _check(x, scale)
    return _run(_ops.fake_quantize.default, _Fake, x, scale, zero_point, granularity, group_size, qmin, qmax)


def fake_quantize_out(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    granularity: str,
    group_size: int,
    qmin: int,
    qmax: int,
    y: Tensor,
    mask: Tensor,
) -> None:
    """fake_quantize into buffers that the caller keeps: a fresh large buffer costs more than the arithmetic.

    y      dtype and shape of x, contiguous.     mask   uint8 [ceil(numel / 8)], contiguous. Neither may overlap an
           operand, unless y is x itself.        Other arguments as fake_quantize. Not differentiable; the versions of
           both rise, so that backward through a graph that saved their old content raises.
    Raises ArgumentError naming the argument; NonFiniteError for a scale that is not finite and positive.
    Source: docs/numerics.md 10.1.

    Example:
        >>> x, mask = torch.tensor([0.3, 0.7]), torch.empty(1, dtype=torch.uint8)
        >>> y = torch.empty_like(x)
        >>> fake_quantize_out(x, torch.tensor([0.5]), None, "per_tensor", 0, -127, 127, y, mask)
        >>> y.tolist(), mask.tolist()
        ([0.5, 0.5], [3])
    """
    _check(x, scale)
    check.not_a_leaf("y", y)
    call(_ops.fake_quantize_out.default, x, scale, zero_point, granularity, group_size, qmin, qmax, y, mask)


def fake_quantize_dynamic(
    x: Tensor,
    granularity: str = "per_channel",
    group_size: int = 0,
    symmetric: bool = True,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same under scales made from the data in the same visit. Nothing is clipped, so the gradient passes unchanged.

    x            float32, float16 or bfloat16 [..., K].
    ->           y, dtype and shape of x, contiguous; scale float32 and zero_point int32 as quantize_dynamic gives them:
                 [1] (per_tensor), x.shape[:-1] (per_token, per_channel) or x.shape[:-1] + [K / group_size]. Elements
                 that share a scale with a NaN or infinity become NaN.
    Raises ArgumentError. Source: docs/numerics.md 10.2.

    Example:
        >>> y, scale, zero_point = fake_quantize_dynamic(torch.tensor([[7.0, 1.2]]), qmin=-7, qmax=7)
        >>> y.tolist(), scale.tolist()
        ([[7.0, 1.0]], [1.0])
    """
    return _run(_ops.fake_quantize_dynamic.default, _FakeDynamic, x, granularity, group_size, symmetric, qmin, qmax)


def fake_quantize_dynamic_out(
    x: Tensor,
    granularity: str,
    group_size: int,
    symmetric: bool,
    qmin: int,
    qmax: int,
    y: Tensor,
    scale: Tensor,
    zero_point: Tensor,
) -> None:
    """fake_quantize_dynamic into buffers that the caller keeps, for weights that change every step.

    y      dtype and shape of x.     scale, zero_point   float32 and int32, the shape that fake_quantize_dynamic gives.
           All contiguous; none may overlap an operand, unless y is x itself. Not differentiable.
    Raises ArgumentError. Source: docs/numerics.md 10.2.

    Example:
        >>> x, scale, zero_point = torch.tensor([[7.0, 1.2]]), torch.empty(1), torch.empty(1, dtype=torch.int32)
        >>> y = torch.empty_like(x)
        >>> fake_quantize_dynamic_out(x, "per_channel", 0, True, -7, 7, y, scale, zero_point)
        >>> y.tolist()
        [[7.0, 1.0]]
    """
    for name, buffer in (("y", y), ("scale", scale)):
        check.not_a_leaf(name, buffer)
    call(
        _ops.fake_quantize_dynamic_out.default, x, granularity, group_size, symmetric, qmin, qmax, y, scale, zero_point
    )


def fake_quantize_backward(grad: Tensor, mask: Tensor) -> Tensor:
    """The straight-through gradient: grad where the mask of fake_quantize is 1, else 0, in one pass.

    grad   float32, float16 or bfloat16, the shape of x.     mask   uint8 [ceil(numel / 8)].
    ->     dtype and shape of grad, contiguous.
    Raises ArgumentError. Source: docs/numerics.md 10.3.

    Example:
        >>> fake_quantize_backward(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5], dtype=torch.uint8)).tolist()
        [1.0, 0.0, 3.0]
    """
    return call(_ops.fake_quantize_backward.default, grad, mask)


def fake_quantize_backward_(grad: Tensor, mask: Tensor) -> None:
    """fake_quantize_backward in place, for a gradient with one owner: only what is clipped is written.

    grad   float32, float16 or bfloat16, contiguous.     mask   uint8 [ceil(numel / 8)].
    Raises ArgumentError. Source: docs/numerics.md 10.3.

    Example:
        >>> grad = torch.tensor([1.0, 2.0, 3.0])
        >>> fake_quantize_backward_(grad, torch.tensor([5], dtype=torch.uint8))
        >>> grad.tolist()
        [1.0, 0.0, 3.0]
    """
    check.not_a_leaf("grad", grad)
    call(_ops.fake_quantize_backward_.default, grad, mask)


def fake_quantize_lsq_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    granularity: str = "per_tensor",
    group_size: int = 0,
    qmin: int = -127,
    qmax: int = 127,
) -> tuple[Tensor, Tensor]:
    """Gradients of fake_quantize with a learned scale (LSQ), of x and of the scale, in one pass.

    grad         dtype and shape of x.     x, scale, zero_point   as for fake_quantize.
    ->           grad_x, dtype and shape of x: grad where x is not clipped, else 0.
                 grad_scale, float32, shape of scale: the sum of grad * d, d = rint(v) - v with v = x / scale inside the
                 code range, qmin - zero_point or qmax - zero_point outside. The same bits for every number of threads
                 and every device. The gradient scale 1 / sqrt(N * qmax) of the paper is the caller's.
    Raises ArgumentError; NonFiniteError for a scale that is not finite and positive.
    Source: Esser et al., "Learned Step Size Quantization", arXiv 1902.08153; docs/numerics.md 10.4.

    Example:
        >>> x, grad = torch.tensor([0.75, 9.0]), torch.tensor([1.0, 2.0])
        >>> [g.tolist() for g in fake_quantize_lsq_backward(grad, x, torch.tensor([1.0]), qmin=-7, qmax=7)]
        [[1.0, 0.0], [14.25]]
    """
    _check(x, scale)
    return call(
        _ops.fake_quantize_lsq_backward.default, grad, x, scale, zero_point, granularity, group_size, qmin, qmax
    )
