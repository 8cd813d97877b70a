"""The tensors that a QLinear consists of, by scheme: names, dtypes, shapes, and the check of each value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pyquant import numerics
from pyquant.core.dtypes import CodeType, describe, dtype_name
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn.weights import check_group_size, codes_of, row_parts
from pyquant.ops import values

NUMBERS = (
    "weight_scale",
    "weight_zero_point",
    "bias",
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
)


def held(name: str) -> str:
    """The buffer that holds one of NUMBERS."""
    return f"{name}_"


@dataclass(frozen=True)
class Slot:
    """What one tensor of the state must be."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    code_range: tuple[int, int] | None = None  # limits of codes or zero points
    code_type: CodeType | None = None  # of weight codes
    steps: int = 0  # of two-level scales: the most whole steps of its row's base that one has

    @property
    def text(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


def slots(scheme: QScheme, out_features: int, in_features: int, has_bias: bool) -> dict[str, Slot]:
    """Every tensor that a layer holds, in the order of its state_dict; SchemeError for an indivisible group size."""
    slots: dict[str, Slot] = {}
    w = scheme.weights
    if scheme.is_float:
        slots["weight"] = Slot(getattr(torch, scheme.float_dtype or ""), (out_features, in_features))
    else:
        check_group_size(w, in_features)
        t = w.code_type
        shape = (out_features,) if w.group_size is None else (out_features, in_features // w.group_size)
        slots[t.weight_name] = Slot(t.storage, (out_features, t.columns(in_features)), w.code_range, t)
        steps = numerics.largest_step(*w.code_range) if w.two_level else 0
        slots["weight_scale"] = Slot(torch.float32, shape, steps=steps)
        if not w.symmetric:
            slots["weight_zero_point"] = Slot(torch.int32, shape, w.code_range)
    if has_bias:
        slots["bias"] = Slot(torch.float32, (out_features,))
    for name, tensor in (("input", scheme.inputs), ("output", scheme.outputs)):
        if tensor is not None and not tensor.dynamic:
            slots[f"{name}_scale"] = Slot(torch.float32, (1,))
            if not tensor.symmetric:
                slots[f"{name}_zero_point"] = Slot(torch.int32, (1,), tensor.code_range)
    return slots


def fresh(found: dict[str, Slot], device: torch.device) -> dict[str, Tensor]:
    """The tensors of a layer that waits for a state_dict: zero weights, scales of 1, no ranges of activations."""
    tensors = {}
    for name, slot in found.items():
        if not name.startswith(("input", "output")):
            make = torch.ones if name == "weight_scale" else torch.zeros
            tensors[name] = make(slot.shape, dtype=slot.dtype, device=device)
    return tensors


def check(name: str, tensor: object, slot: Slot) -> Tensor:
    """The tensor, if it is what its slot says: dtype, shape, values where they can be read (scales: finite, > 0)."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(name, f"{type(tensor).__name__} {tensor!r}"[:120], slot.text)
    if tensor.dtype != slot.dtype or tuple(tensor.shape) != slot.shape or tensor.layout != torch.strided:
        raise ArgumentError(name, describe(tensor), slot.text)
    if tensor.is_meta or tensor.numel() == 0 or values.is_batch(tensor):
        return tensor
    if name == "scale" or name.endswith("_scale"):
        values.check_scale(name, tensor)
    if slot.steps and bool((rows := numerics.split_scales(tensor, slot.steps)[0].isnan()).any()):
        row = int(rows.nonzero()[0])
        allowed = f"1 to {slot.steps} whole steps of one float32 scale in each row (docs/numerics.md 4.1)"
        raise ArgumentError(name, f"row {row}: {tensor[row, :4].tolist()} ...", allowed)
    if slot.code_range is not None:
        t = slot.code_type
        ends: list[int] = []
        for part in row_parts(tensor):
            codes = part if t is None else codes_of(part, t.per_element * part.shape[-1], t)
            ends += (int(codes.min()), int(codes.max()))
        low, high = min(ends), max(ends)
        if low < slot.code_range[0] or high > slot.code_range[1]:
            raise ArgumentError(name, f"values from {low} to {high}", f"{slot.code_range[0]} to {slot.code_range[1]}")
    return tensor


def scalar(name: str, value: object, slot: Slot | None, device: torch.device) -> Tensor | None:
    """A Python number or one-element tensor as the [1] tensor of its slot, if it has one; None stays None."""
    if value is None:
        return None
    if slot is None:
        raise ArgumentError(name, f"{type(value).__name__} {value!r}"[:120], "None with this scheme")
    is_whole = slot.dtype == torch.int32
    if isinstance(value, Tensor):
        others = (torch.bool, torch.complex64)
        is_number = value.numel() == 1 and value.is_floating_point() != is_whole and value.dtype not in others
    else:
        is_number = not isinstance(value, bool) and isinstance(value, int if is_whole else (int, float))
    if not is_number:
        got = describe(value) if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"[:120]
        raise ArgumentError(name, got, f"a number, or {slot.text}")
    if isinstance(value, Tensor):
        return check(name, value.detach().reshape(1).to(device=device, dtype=slot.dtype), slot)
    try:
        return check(name, torch.tensor([value], dtype=slot.dtype, device=device), slot)
    except (OverflowError, RuntimeError):
        raise ArgumentError(name, value, slot.text) from None


def stand_in(dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """The parameter of a layer whose numbers are codes: none of them, but the float type and device of its weight.

    Frameworks ask the first parameter of a model for both, and optimisers want one; it takes no memory, is frozen and
    is in no state_dict.
    """
    return nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)


def device_of(device: object) -> torch.device:
    """The device that a name or torch.device means; None: torch's default. Raises ArgumentError where there is none."""
    try:
        return torch.empty(0, dtype=torch.float32, device=device).device  # type: ignore[call-overload, no-any-return]
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        allowed = f"a device of this machine ({str(error).splitlines()[0]})"
        raise ArgumentError("device", repr(device), allowed) from None


def same_type(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """fn's move without its cast: codes, scales and bias keep their types whatever the model is cast to."""
    moved = fn(tensor)
    return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)
