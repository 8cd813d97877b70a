"""What is computed from a weight once and used until the weight changes.

Whoever changes a tensor in place raises its version, so one comparison shows whether the result is still good. Two ways
round that exist, `.data` and FSDP's shards, hence a second check: on a CPU a fingerprint of the weight's bits is
compared; elsewhere (where looking would wait for the device) nothing outlives a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from pyquant.ops.load import native_available

T = TypeVar("T")


class Kept(Generic[T]):
    """A value made from tensors, made again when one of them has changed; a copy (deepcopy, pickle) is empty."""

    def __init__(self) -> None:
        self.value: T | None = None
        self.made = 0  # how often the value was computed; read by tests
        self._key: Any = None
        self._marks: list[int | Tensor] = []

    def get(self, make: Callable[[T | None], T], *of: Tensor) -> T:
        """The value for the tensors `of`; make(old value) gives a new one where they have changed."""
        key = [(t._version, t.data_ptr(), t.dtype, t.device, t.shape) for t in of]
        marks = [mark_of(t) for t in of if t.device.type == "cpu"]
        if self.value is None or key != self._key or not all(map(_is_same, marks, self._marks)):
            self._key = None  # an exception in between must not leave half a value behind
            self.value = make(self.value)
            self._key, self._marks = key, marks
            self.made += 1
        elif (
            any(t.device.type != "cpu" for t in of) and not torch.is_grad_enabled()
        ):  # no backward will tell when it is stale
            self.value = make(self.value)
            self.made += 1
        return self.value

    def after_backward(self) -> None:
        """A gradient has passed: the step that changes the weights may follow, unseen on a GPU."""
        if self._key is not None and any(device.type != "cpu" for _, _, _, device, _ in self._key):
            self._key = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (Kept, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> Kept[T]:
        return Kept()


def can_keep(weight: Tensor) -> bool:
    """Whether results of this tensor may be kept: a parameter itself, outside of tracing and inference mode. What is
    computed in every forward (the matrix of a convolution) is another tensor each time."""
    return (
        not torch.compiler.is_compiling()
        and not torch.is_inference_mode_enabled()
        and type(weight) is torch.nn.Parameter
        and not weight.is_inference()
        and not weight.is_meta
        and weight.is_contiguous()
    )


def mark_of(tensor: Tensor) -> int | Tensor:
    """What tells whether a contiguous tensor of a CPU has changed: a hash of its bits that the compiled library reads
    as fast as memory is; without it a copy."""
    if native_available():
        return int(torch.ops.pyquant._fingerprint(tensor.detach()))
    return tensor.detach().clone()


def _is_same(mark: int | Tensor, other: int | Tensor) -> bool:
    if isinstance(mark, Tensor) and isinstance(other, Tensor):
        bits = (t.reshape(-1).view(torch.uint8) for t in (mark, other))
        return torch.equal(*bits)
    return bool(mark == other)
