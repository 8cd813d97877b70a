"""Weights to codes and back: the one place where modules quantise a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from pyquant import numerics, ops
from pyquant.calibrate import weight_qparams
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS, CodeType, describe
from pyquant.core.names import GIVEN_CALIBRATOR
from pyquant.core.registry import data_calibrators
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, NonFiniteError, SchemeError
from pyquant.numerics.passes import at_once

_AT_ONCE: Final = 1 << 22  # weights that are float32 together: 16 MiB


def float_type(given: object, own: torch.dtype) -> torch.dtype:
    """The floating type that an argument `dtype` names; None: `own`. Raises ArgumentError."""
    if given is None:
        return own
    if not isinstance(given, torch.dtype) or not given.is_floating_point:
        raise ArgumentError("dtype", arguments.shown(given), "a floating torch.dtype, or None")
    return given


def check_group_size(scheme: TensorScheme, in_features: int) -> None:
    """Raise SchemeError where the scheme's group size does not divide in_features."""
    if scheme.group_size is not None and in_features % scheme.group_size != 0:
        raise SchemeError("group_size", scheme.group_size, f"a divisor of in_features = {in_features}, or None")


def stored(codes: Tensor, t: CodeType) -> Tensor:
    """int8 codes [..., K] as a state_dict holds them: t.storage [..., t.columns(K)]."""
    return ops.pack_int4(codes) if t.is_packed else codes


def codes_of(storage: Tensor, columns: int, t: CodeType) -> Tensor:
    """The inverse of stored; columns: K."""
    return ops.unpack_int4(storage, columns) if t.is_packed else storage


def multiplied(weight: Tensor, scale: Tensor, scheme: TensorScheme, columns: int) -> tuple[Tensor, Tensor, int]:
    """What an integer product takes of weights as a state_dict spells them: codes in the memory of scheme.product_type,
    their scale, and how many along K share one (0: all). Of two-level scales the steps go into the codes."""
    if not scheme.two_level:
        return weight, scale, scheme.group_size or 0
    codes = codes_of(weight, columns, scheme.code_type)
    return *numerics.one_level(codes, scale, numerics.largest_step(*scheme.code_range)), 0


def packed_operands(
    weight: Tensor, scale: Tensor, scheme: TensorScheme, columns: int, spec: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """What pack_linear takes of them for a spec: kernels of GPUs multiply codes and steps themselves."""
    if keeps_steps(spec):
        return weight, scale
    return multiplied(weight, scale, scheme, columns)[:2]


def keeps_steps(spec: Sequence[int]) -> bool:
    """Whether a packed buffer holds 4-bit codes and their steps, not the products of both."""
    return ops.LinearSpec.from_ints(spec).two_level


def of_packed(codes: Tensor, scale: Tensor, scheme: TensorScheme, spec: Sequence[int]) -> Tensor:
    """The inverse of packed_operands: weights as a state_dict spells them, of the codes that unpack_linear gives."""
    if not scheme.two_level or keeps_steps(spec):
        return codes
    steps = numerics.largest_step(*scheme.code_range)
    return stored(numerics.codes_of_products(codes, scale, steps), scheme.code_type)


def quantise_weight(weight: Tensor, scheme: TensorScheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes of a weight matrix, its scales found by the scheme's calibrator.

    weight  float32, float16 or bfloat16 [N, K], finite; widened to float32, some rows at a time.
    ->      codes int8 [N, K]; scale float32 and (affine schemes only) zero point int32, [N] or [N, K / group_size].
            A per-tensor scale is held once per channel, N equal numbers.
    Raises SchemeError for a group size that does not divide K and for the calibrator 'fixed', NonFiniteError,
    ArgumentError for a dtype or rank. Source: docs/numerics.md 2.
    """
    if weight.dtype not in FLOATS or weight.dim() != 2:
        raise ArgumentError("weight", describe(weight), "float32, float16 or bfloat16 [out_features, in_features]")
    check_group_size(scheme, weight.shape[1])
    if scheme.calibrator == GIVEN_CALIBRATOR:
        allowed = f"{', '.join(data_calibrators())}; from_codes takes scales that are given"
        raise SchemeError("weights.calibrator", repr(scheme.calibrator), allowed)
    weight = weight.detach()
    common: tuple[Tensor, Tensor] | None = None
    if scheme.granularity == "per_tensor" and weight.numel() and not weight.is_meta:
        check_finite(weight)
        scale, zero_point = (held.expand(weight.shape[0]).clone() for held in weight_qparams(weight, scheme))
        common = scale, zero_point
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    found: list[tuple[Tensor, Tensor]] = []
    for rows, to in zip(row_parts(weight), row_parts(codes), strict=True):
        given = None if common is None else (common[0][: len(rows)], common[1][: len(rows)])
        try:
            part, *qparams = _quantise_rows(rows.to(torch.float32), scheme, given)
        except NonFiniteError:  # of a part, whose places are not those of the weight
            raise _not_finite(weight) from None
        to.copy_(part)
        found.append((qparams[0], qparams[1]))
    scale, zero_point = common or (torch.cat([f[0] for f in found]), torch.cat([f[1] for f in found]))
    return codes, scale, None if scheme.symmetric else zero_point


def row_parts(matrix: Tensor) -> Sequence[Tensor]:
    """Rows that are widened together, of a tensor of at least one dimension: it may be most of what memory holds."""
    columns = matrix.numel() // max(1, matrix.shape[0])
    return matrix.split(max(1, at_once(matrix.device, _AT_ONCE) // max(1, columns)))


def _quantise_rows(
    real: Tensor, scheme: TensorScheme, given: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zero points of float32 [rows, K]; given: the latter two. Raises NonFiniteError."""
    grouped = ("per_group", scheme.group_size) if scheme.group_size is not None else ("per_channel", 0)
    if given is None and ((scheme.calibrator == "max" and not scheme.two_level) or not real.numel() or real.is_meta):
        codes, scale, zero_point = ops.quantize_dynamic(real, *grouped, scheme.symmetric, *scheme.code_range)
        if not scale.is_meta and not bool(scale.isfinite().all()):
            raise _not_finite(real)
        return codes, scale, zero_point
    scale, zero_point = given or weight_qparams(real, scheme)
    return ops.quantize(real, scale, zero_point, *grouped, *scheme.code_range), scale, zero_point


def check_finite(weight: Tensor) -> None:
    """Raise NonFiniteError naming the first place of a weight matrix where there is NaN or infinity."""
    if not is_finite(weight):
        raise _not_finite(weight)


def is_finite(weight: Tensor) -> bool:
    """Whether a matrix holds neither NaN nor infinity; of one without numbers it is believed."""
    return weight.is_meta or all(bool(rows.isfinite().all()) for rows in row_parts(weight))


def _not_finite(weight: Tensor) -> NonFiniteError:
    row, column = (~weight.isfinite()).nonzero()[0].tolist()
    return NonFiniteError("weight", f"{weight[row, column].item()} at [{row}, {column}]", "finite values")


def dequantise_weight(codes: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: TensorScheme) -> Tensor:
    """float32 [N, K] of int8 codes: scale * (code - zero_point), one rounding."""
    if scheme.group_size is not None:
        return ops.dequantize(codes, scale, zero_point, "per_group", scheme.group_size)
    return ops.dequantize(codes, scale, zero_point, "per_channel")
