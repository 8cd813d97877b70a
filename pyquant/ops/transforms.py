"""What torch.vmap and torch.autocast make of the ops: rules of their own, so that both cost no more than a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyquant.ops.schema import SCHEMAS, UNDIFFERENTIATED

# op -> its arguments that have one row for each row of the result: a batch is only more rows
_BY_ROWS: dict[str, tuple[str, ...]] = {
    "qlinear": ("x", "residual", "x_scale", "x_zero_point"),
    "weight_only_linear": ("x", "residual"),
    "float_linear": ("x", "residual"),
    "silu_mul_quantize": ("x",),
    "activation_mul_quantize": ("x", "up"),
    "hadamard_quantize": ("x",),
    "hadamard_transform": ("x",),
}
_BY_ROWS |= {name: _BY_ROWS[twin] for name, twin in UNDIFFERENTIATED.items()}
_AUTOCAST = ("qlinear", "weight_only_linear", *UNDIFFERENTIATED)


def register(library: torch.library.Library) -> None:
    """Attach the rules to every op that writes nothing."""
    for name in (*SCHEMAS, *UNDIFFERENTIATED):
        op = getattr(torch.ops.pyquant, name).default
        if not op._schema.is_mutable:
            torch.library.register_vmap(f"pyquant::{name}", _batched(name, op), lib=library)
    for name in _AUTOCAST:
        for key in ("AutocastCPU", "AutocastCUDA"):
            library.impl(name, _in_autocast(getattr(torch.ops.pyquant, name).default), key, with_keyset=True)


# ---- vmap


def _batched(name: str, op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]

    def rule(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        batched = {names[i] for i, arg in enumerate(args) if isinstance(arg, Tensor) and in_dims[i] is not None}
        given = dict(zip(names, args, strict=False))
        dims = dict(zip(names, in_dims, strict=False))
        if batched <= _row_arguments(name, given):
            rows = {n for n in _row_arguments(name, given) if isinstance(given[n], Tensor)}
            lead = {n: _lead(given[n], dims[n], info.batch_size) for n in rows}
            out = op(**{**given, **lead})
            return out, 0 if isinstance(out, Tensor) else (0,) * len(out)
        return _one_by_one(op, info.batch_size, in_dims, args)

    return rule


def _row_arguments(name: str, given: dict[str, Any]) -> set[str]:
    if name in _BY_ROWS:
        return set(_BY_ROWS[name]) & given.keys()
    granularity = given.get("granularity")
    if name == "quantize_dynamic" and granularity == "per_token":
        return {"x"}
    if name == "quantize" and granularity == "per_tensor":
        return {"x"}
    if name == "dequantize" and granularity == "per_token":
        return {"q", "scale", "zero_point"} & given.keys()
    return set()


def _lead(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The batch in front."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _one_by_one(op: Any, size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """A batch of weights is a batch of problems: one call each."""
    results = []
    for k in range(size):
        one = [
            arg.select(dim, k) if isinstance(arg, Tensor) and dim is not None else arg
            for arg, dim in zip(args, in_dims, strict=True)
        ]
        results.append(op(*one))
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(part) for part in zip(*results, strict=True)), (0,) * len(results[0])


# ---- autocast


def _in_autocast(op: Any) -> Callable[..., Any]:
    """As nn.Linear: the input is cast to autocast's type, which the result then has."""
    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
        torch._C.DispatchKey.AutocastCUDA
    )

    def kernel(keyset: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        cast = autocast(x)  # before the guard, under which no region is open
        with torch._C._ExcludeDispatchKeyGuard(off):
            return op(cast, *args, **kwargs)

    return kernel


def autocast(x: Tensor) -> Tensor:
    """x in the type of the autocast region on its device; x itself outside of one, or where it holds codes."""
    kind = x.device.type
    if (
        kind not in ("cpu", "cuda")
        or not torch.is_autocast_enabled(kind)
        or x.dtype not in (torch.float32, torch.float16, torch.bfloat16)
    ):
        return x
    return x.to(torch.get_autocast_dtype(kind))
