"""What torch.utils.flop_counter counts of the products here: as many operations as the float layer's, 2 M N K."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter

from pyquant.core.dtypes import PRODUCTS
from pyquant.ops.spec import LinearSpec


def register() -> None:
    """Add the formulas to torch's table."""
    ops = torch.ops.pyquant
    by_columns = ("weight_only_linear", "_weight_only", "float_linear", "_grouped_weight_only")
    for formula, names in (
        (_of_rows, ("qlinear", "_grouped_linear")),
        (_of_images, ("qconv2d",)),
        (_of_columns, by_columns),
        (_of_codes, ("gemm", *PRODUCTS)),
    ):
        packets = [getattr(ops, name) for name in names]
        flop_counter.register_flop_formula([one for one in packets if one not in _known()], get_raw=True)(formula)


def _known() -> dict[Any, Any]:
    return flop_counter.flop_registry


def _spec_of(args: tuple[Any, ...], given: dict[str, Any]) -> LinearSpec:
    """The layer's description: the one list of integers among the operands."""
    lists = [arg for arg in (*args, given.get("spec")) if isinstance(arg, (list, tuple)) and arg]
    return LinearSpec.from_ints(list(next(one for one in lists if isinstance(one[0], int))))


def _of_rows(*args: Any, out_val: Tensor, **given: Any) -> int:
    spec = _spec_of(args, given)
    return 2 * prod(out_val.shape[:-1]) * spec.n * spec.k


def _of_images(*args: Any, out_val: Tensor, **given: Any) -> int:
    return 2 * out_val.numel() * _spec_of(args, given).k


def _of_columns(x: Tensor, *args: Any, out_val: Tensor, **given: Any) -> int:
    return 2 * out_val.numel() * x.shape[-1]


def _of_codes(x: Tensor, w: Tensor, *args: Any, out_val: Tensor, **given: Any) -> int:
    both_packed = x.dtype == w.dtype == torch.uint8 and x.shape[-1] == w.shape[-1]
    return 2 * out_val.numel() * x.shape[-1] * (2 if both_packed else 1)
