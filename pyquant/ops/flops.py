"""What torch.utils.flop_counter counts of the products here: as many operations as the float layer's, 2 M N K."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from math import prod
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from pyquant.core.dtypes import PRODUCTS
from pyquant.ops.spec import LinearSpec

_COUNTER: Final = "torch.utils.flop_counter"


def register() -> None:
    """Add the formulas to torch's table: now where somebody has imported it, else as soon as somebody does.

    To import it for everybody would import triton where there is one, and warn where a CUDA build of torch has none.
    """
    if (counter := sys.modules.get(_COUNTER)) is not None:
        _add_to(counter)
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    """Lets the module be found as ever, and adds the formulas after it ran."""

    _is_asking = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _COUNTER or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _add_to(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)

            loader.exec_module = exec_module
        return spec


def _add_to(counter: Any) -> None:
    ops = torch.ops.pyquant
    by_columns = ("weight_only_linear", "_weight_only", "float_linear", "_grouped_weight_only")
    for formula, names in (
        (_of_rows, ("qlinear", "_grouped_linear")),
        (_of_images, ("qconv2d",)),
        (_of_columns, by_columns),
        (_of_codes, ("gemm", *PRODUCTS)),
    ):
        packets = [getattr(ops, name) for name in names]
        counter.register_flop_formula([one for one in packets if one not in counter.flop_registry], get_raw=True)(
            formula
        )


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
