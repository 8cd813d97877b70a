"""The columns of a weight matrix, rounded one after the other so that each makes up for the errors of those before."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from pyquant.calibrate import weight_qparams
from pyquant.core import arguments
from pyquant.core.dtypes import describe
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.numerics.qparams import scale_recip
from pyquant.ptq.improve.ldl import Ldl, ldl_of

_BLOCK: Final = 128  # columns whose errors are gathered before the rest of the matrix sees them (the paper's B)
_PART: Final = 16  # and before the rest of their block does


@torch.no_grad()
def gptq_codes(
    weight: Tensor,
    scheme: TensorScheme | QScheme,
    inputs: Tensor | None = None,
    *,
    hessian: Tensor | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    damp: float = 0.01,
    act_order: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes of one weight matrix by GPTQ, for what a layer's inputs look like.

    weight      float32, float16 or bfloat16 [N, K], finite.
    scheme      of the weights: a TensorScheme, or the QScheme that has it.
    inputs      float [..., K]: examples of what the layer multiplies with the weights, rounded where it will be.
    hessian     float [K, K] in the place of inputs: the sum of x x^T over such rows x, any positive factor.
    scale, zero_point   float32 > 0 and int32, [1], [N] or [N, K / group_size], in the place of those that the scheme's
                calibrator finds. zero_point: of affine schemes.
    damp        added to the Hessian's diagonal, as a share of its mean, above 0.
    act_order   columns with the largest diagonal first. Groups stay where they are: no order is needed at run time.
    ->          int8 [N, K]; scale float32 and zero point int32 (None: symmetric) of the scheme's shape, as
                QLinear.from_codes takes them.
    Computed in float64 on the weight's device. Raises ArgumentError for shapes and types, SchemeError for a group size
    that does not divide K, NonFiniteError.
    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
    arXiv 2210.17323, algorithm 1.

    Example:
        >>> from pyquant import W4A16, gptq_codes
        >>> weight, inputs = torch.randn(8, 16), torch.randn(100, 16)
        >>> codes, scale, zero_point = gptq_codes(weight, W4A16(group_size=None), inputs)
        >>> codes.shape, scale.shape, zero_point
        (torch.Size([8, 16]), torch.Size([8]), None)
    """
    if isinstance(scheme, QScheme):
        scheme = scheme.weights
    if not isinstance(scheme, TensorScheme):
        raise ArgumentError("scheme", arguments.shown(scheme), "a TensorScheme or a QScheme")
    if scheme.bits > 8:
        raise ArgumentError("scheme", f"{scheme.bits} bits", "codes of at most 8 bits")
    if (inputs is None) == (hessian is None):
        raise ArgumentError("inputs", "both or neither of inputs and hessian", "one of the two")
    arguments.number("damp", damp, 0, above=True)
    arguments.flag("act_order", act_order)
    if scale is None:
        if zero_point is not None:
            raise ArgumentError("zero_point", describe(zero_point), "None without scale")
        scale, zero_point = weight_qparams(weight, scheme)  # names a wrong weight
    else:
        _check_scale(weight, scheme, scale, zero_point)
    k = weight.shape[1]
    moments = hessian
    if inputs is not None:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.shape[-1:] != (k,):
            raise ArgumentError(
                "inputs", describe(inputs), f"a float tensor [..., {k}]: weight is {list(weight.shape)}"
            )
        rows = inputs.detach().reshape(-1, k).to(weight.device, torch.float64)
        moments = rows.t() @ rows
    if not isinstance(moments, Tensor) or not moments.is_floating_point() or moments.shape != (k, k):
        raise ArgumentError("hessian", describe(moments), f"a float tensor [{k}, {k}]: weight is {list(weight.shape)}")
    if not bool(moments.isfinite().all()):
        raise NonFiniteError("inputs" if hessian is None else "hessian", "NaN or infinity", "finite numbers")
    if hessian is not None:
        _check_moments(hessian)
    zero = None if scheme.symmetric else zero_point
    steps, zeros = scale, zero
    if scale.dim() < 2 and scale.numel() == 1:
        steps = scale.reshape(1).expand(weight.shape[0])
        zeros = None if zero is None else zero.reshape(1).expand(weight.shape[0])
    qmin, qmax = scheme.code_range
    moments = moments.detach().to(weight.device)
    try:
        codes = column_codes(weight, moments, steps, zeros, qmin=qmin, qmax=qmax, damp=damp, act_order=act_order)
    except ArgumentError:
        if hessian is not None:
            _check_eigenvalues(hessian)
        raise
    return codes, scale, zero


_MOMENTS: Final = "the sum of x x^T over inputs x: symmetric, without negative eigenvalues"


def _check_moments(hessian: Tensor) -> None:
    """Raise ArgumentError for what is not symmetric, but for rounding; triangles would be of one half of it."""
    exact = hessian.detach().double()
    if exact.numel() and float((exact - exact.t()).abs().max()) > 1e-3 * float(exact.abs().max()):
        raise ArgumentError("hessian", "a matrix that is not symmetric", _MOMENTS)


def _check_eigenvalues(hessian: Tensor) -> None:
    """Raise ArgumentError where an eigenvalue is negative beyond rounding; slow: the triangles come first."""
    values = torch.linalg.eigvalsh(hessian.detach().double())
    if float(values[0]) < -1e-3 * float(values.abs().max()):
        raise ArgumentError("hessian", f"a matrix with the eigenvalue {float(values[0]):.3g}", _MOMENTS)


def _check_scale(weight: Tensor, scheme: TensorScheme, scale: Tensor, zero_point: Tensor | None) -> None:
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() != 2:
        raise ArgumentError("weight", describe(weight), "a float tensor [N, K]")
    shape = scheme.scale_shape(weight.shape)
    allowed = f"float32 {list(shape)}, finite and above 0"
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.numel() != torch.Size(shape).numel():
        raise ArgumentError("scale", describe(scale), allowed)
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ArgumentError("scale", "numbers that are not finite or not above 0", allowed)
    if scheme.symmetric and zero_point is not None:
        raise ArgumentError("zero_point", describe(zero_point), "None: the scheme is symmetric")
    is_whole = isinstance(zero_point, Tensor) and zero_point.dtype == torch.int32 and zero_point.shape == scale.shape
    if not scheme.symmetric and not is_whole:
        raise ArgumentError("zero_point", describe(zero_point), f"int32 {list(scale.shape)}, like scale")


@torch.no_grad()
def column_codes(
    weight: Tensor,
    moments: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    qmin: int,
    qmax: int,
    damp: float = 0.01,
    act_order: bool = False,
) -> Tensor:
    """Codes of one weight matrix: column by column, each column's error made up for by those that follow.

    weight      float [N, K].     moments   float [K, K]: X^T X of the layer's inputs X [M, K], any factor.
    scale       float32 [N] or [N, K / group_size], > 0.     zero_point   int32, shape of scale, or None for 0.
    ->          int8 [N, K] in [qmin, qmax]. Inputs that are always zero leave their column to plain rounding.
    Computed in float64. Raises ArgumentError for shapes that do not fit, NonFiniteError for moments with NaN.
    Source: Frantar et al., arXiv 2210.17323, algorithm 1.

    Example:
        >>> column_codes(torch.tensor([[0.6, 0.6]]), torch.ones(2, 2), torch.ones(1), qmin=-7, qmax=7).tolist()
        [[1, 0]]
    """
    n, k = weight.shape
    groups = 1 if scale.dim() == 1 else scale.shape[1]
    if moments.shape != (k, k) or scale.shape[0] != n or k % groups != 0:
        got = f"moments {list(moments.shape)}, scale {list(scale.shape)}"
        raise ArgumentError("moments", got, f"[{k}, {k}], and [{n}] or [{n}, groups]: weight is [{n}, {k}]")
    ldl = ldl_of(moments.double(), damp, act_order=act_order)
    return codes_by(weight, ldl, scale, zero_point, qmin=qmin, qmax=qmax)


@torch.no_grad()
def codes_by(
    weight: Tensor, ldl: Ldl, scale: Tensor, zero_point: Tensor | None = None, *, qmin: int, qmax: int
) -> Tensor:
    """The same, where the moments' triangles are known. What is rounded in column j is W_j + the sum over the columns i
    before it of L_ji (W_i - rounded W_i): the paper's algorithm without its inverse and its division of errors.

    Columns are rows of memory here, and a step is a handful of operations on one of them; what earlier blocks add to a
    block is one product, and what earlier columns of a block add to a part of it another (the paper's lazy updates).
    """
    (n, k), count = weight.shape, 1 if scale.dim() == 1 else scale.shape[1]
    left = weight.t().index_select(0, ldl.order).double()  # [K, N]: W, and W - rounded W once a column is done
    by_group = scale.reshape(n, count).t().contiguous()  # [groups, N], as what follows
    recip, minus = scale_recip(by_group).unbind(0), by_group.double().neg().unbind(0)
    low: list[Any] = [qmin] * count
    high: list[Any] = [qmax] * count
    zeros = None if zero_point is None else zero_point.reshape(n, count).t().contiguous()
    if zeros is not None:  # the clamp acts before the zero point is added, as docs/numerics.md 2.2 says
        low, high = (list((end - zeros).float().unbind(0)) for end in (qmin, qmax))
    groups = ldl.order // (k // count)
    group_of, columns = groups.tolist(), left.unbind(0)
    codes = torch.empty(k, n, dtype=torch.int8, device=weight.device)
    steps = torch.empty(min(_BLOCK, k), n, dtype=torch.float32, device=weight.device)  # codes less their zero points
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        block = torch.addmm(left[start:stop], ldl.lower[start:stop, :start], left[:start])
        for first in range(start, stop, _PART):
            last = min(first + _PART, stop)
            if first > start:
                block[first - start : last - start].addmm_(ldl.lower[first:last, start:first], left[start:first])
            for j in range(first, last):
                column, step, group = block[j - start], steps[j - start], group_of[j]
                if j > first:
                    column.addmv_(left[first:j].t(), ldl.lower[j, first:j])
                step.copy_(column).mul_(recip[group]).round_().clamp_(low[group], high[group])
                columns[j].addcmul_(step, minus[group])
        whole = steps[: stop - start].nan_to_num(0.0).to(torch.int32)
        codes[start:stop] = whole if zeros is None else whole + zeros[groups[start:stop]]
    found = torch.empty(n, k, dtype=torch.int8, device=weight.device)
    found[:, ldl.order] = codes.t()
    return found
