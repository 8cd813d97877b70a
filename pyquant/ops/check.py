"""The vocabulary of argument checks: every refusal names argument, value and what is allowed.

csrc/bind/check.h is the same vocabulary for the compiled ops; tests/ops/test_contract.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pyquant.core.dtypes import FLOATS, describe, dtype_name
from pyquant.core.names import ACTIVATIONS
from pyquant.errors import ArgumentError

MAX_SIZE = 2**31  # sizes below it are what layouts and indices can hold: no product of them leaves 64 bits


def one_of(argument: str, value: object, allowed: Iterable[object]) -> None:
    values = tuple(allowed)
    if value not in values:
        raise ArgumentError(argument, repr(value), " or ".join(map(repr, values)))


def dtype_among(argument: str, dtype: torch.dtype, dtypes: Sequence[torch.dtype], when: str = "") -> None:
    """A dtype argument, not a tensor's."""
    if dtype not in dtypes:
        raise ArgumentError(argument, dtype_name(dtype), " or ".join(map(dtype_name, dtypes)) + when)


def activation(name: object, clamp_min: float, clamp_max: float) -> None:
    """One of ACTIVATIONS, with its limits."""
    one_of("activation", name, ACTIVATIONS)
    if name == "clamp" and not clamp_min <= clamp_max:
        raise ArgumentError("clamp_min", clamp_min, "at most clamp_max")


def strided(argument: str, tensor: Tensor | None) -> None:
    if tensor is None:  # torch passes None for a Tensor argument on to the implementation
        raise ArgumentError(argument, "None", "a tensor")
    if tensor.layout != torch.strided:
        raise ArgumentError(argument, f"layout {tensor.layout}", "a dense (strided) tensor")


def dtype_in(argument: str, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    strided(argument, tensor)
    if tensor.dtype not in dtypes:
        raise ArgumentError(argument, describe(tensor), " or ".join(dtype_name(d) for d in dtypes))


def same_device(argument: str, tensor: Tensor, other: Tensor, other_argument: str = "x") -> None:
    if tensor.device != other.device:
        where = f"device {other.device}, where argument '{other_argument}' is"
        raise ArgumentError(argument, f"device {tensor.device}", where)


def min_dim(argument: str, tensor: Tensor, dim: int) -> None:
    if tensor.dim() < dim:
        raise ArgumentError(argument, describe(tensor), f"at least {dim} dimension(s)")


def rows_of_floats(argument: str, tensor: Tensor) -> None:
    dtype_in(argument, tensor, FLOATS)
    min_dim(argument, tensor, 1)


def exact_dim(argument: str, tensor: Tensor, dim: int) -> None:
    if tensor.dim() != dim:
        raise ArgumentError(argument, describe(tensor), f"{dim} dimensions")


def shape_is(argument: str, tensor: Tensor, shape: Sequence[int]) -> None:
    if list(tensor.shape) != list(shape):
        raise ArgumentError(argument, describe(tensor), f"shape {list(shape)}")


def operand(
    argument: str, tensor: Tensor, other: Tensor, dtypes: torch.dtype | Sequence[torch.dtype], shape: Sequence[int]
) -> None:
    """A tensor of one of the types and the exact shape on the device of `other`."""
    dtype_in(argument, tensor, (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes)
    same_device(argument, tensor, other)
    shape_is(argument, tensor, shape)


def vector(
    argument: str,
    tensor: Tensor | None,
    other: Tensor,
    dtypes: torch.dtype | Sequence[torch.dtype],
    shape: Sequence[int],
) -> None:
    """An operand that may be absent."""
    if tensor is not None:
        operand(argument, tensor, other, dtypes, shape)


def scalar_or(argument: str, tensor: Tensor | None, other: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """An operand that may be absent, and is a single number ([] or [1]) or of the exact shape given."""
    if tensor is None:
        return
    dtype_in(argument, tensor, (dtype,))
    same_device(argument, tensor, other)
    if list(tensor.shape) not in ([], [1], list(shape)):
        also = "" if list(shape) in ([], [1]) else f" or {list(shape)}"
        raise ArgumentError(argument, describe(tensor), f"shape [] or [1]{also}")


def buffer(argument: str, tensor: Tensor, like: Tensor) -> None:
    """An operand that is written: the dtype, shape and device of `like`, in one contiguous piece."""
    operand(argument, tensor, like, like.dtype, like.shape)
    if not tensor.is_contiguous():
        raise ArgumentError(argument, f"strides {list(tensor.stride())}", "a contiguous tensor")


def apart(argument: str, written: Tensor, other_argument: str, other: Tensor | None, same: bool = False) -> None:
    """A buffer that is written shares no byte with another operand; same: it may be that operand as a whole."""
    if other is None or written.numel() == 0 or other.numel() == 0 or written.device.type == "meta":
        return
    (a, a_end), (b, b_end) = _bytes(written), _bytes(other)
    if a_end <= b or b_end <= a:
        return
    whole = a == b and written.dtype == other.dtype and written.shape == other.shape
    if same and whole and written.is_contiguous() and other.is_contiguous():
        return
    own = f"memory of its own, or the whole of '{other_argument}'" if same else "memory of its own"
    raise ArgumentError(argument, f"memory that argument '{other_argument}' shares", own)


def _bytes(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def not_a_leaf(argument: str, tensor: Tensor) -> None:
    """A buffer that is written is no parameter whose gradient autograd is to find."""
    if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise ArgumentError(argument, "a leaf that requires grad", "a buffer: detach() it, or torch.no_grad()")


def code_range(qmin: int, qmax: int, names: tuple[str, str] = ("qmin", "qmax")) -> None:
    if not -128 <= qmin <= 127:
        raise ArgumentError(names[0], qmin, "-128 to 127")
    if not qmin < qmax <= 127:
        raise ArgumentError(names[1], qmax, f"{qmin + 1} to 127")


def group(group_size: int, k: int) -> None:
    """group_size 0 (not grouped) or a divisor of K; where K is 0 everything divides it, so there is a limit as well."""
    if not 0 <= group_size < MAX_SIZE or (group_size > 0 and k % group_size != 0):
        raise ArgumentError("group_size", group_size, f"0, or a positive divisor of K = {k}")
