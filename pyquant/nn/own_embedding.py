"""Subclasses of nn.Embedding (with a scale, an offset of positions, buffers): quantised, and still of their class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from pyquant.core.remembered import derived
from pyquant.nn.qembedding import QEmbedding

_OF_TWINS_ONLY: Final = vars(QEmbedding(0, 0)).keys() - vars(nn.Embedding(0, 0)).keys()


class _OwnRows(QEmbedding, nn.Embedding):  # type: ignore[override]
    """What stands between a subclass of nn.Embedding and nn.Embedding in the bases of its quantised twin.

    super().forward(ids) in the subclass finds the look-up of QEmbedding, self.weight its float view; the attributes and
    unsaved buffers that the subclass computes with are those of the module that was quantised.
    """

    _kind: type[nn.Embedding]  # the subclass itself

    def to_float(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """The subclass again, with the dequantised rows."""
        plain = super().to_float(dtype)
        plain_module = self._kind.__new__(self._kind)
        plain_module.__dict__.update(attributes(self, plain))
        return plain_module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _OwnRows:
        super()._apply(fn, recurse)
        self._buffers.update({name: fn(tensor) for name, tensor in _unsaved(self).items() if tensor is not None})
        return self

    def __reduce__(self) -> Any:
        return _blank, (self._kind,), self.__dict__


def like(old: nn.Embedding, new: QEmbedding) -> QEmbedding:
    """`new` as a twin of `old`: itself for a plain nn.Embedding, else one of old's class that runs its forward."""
    kind = kind_of(old)
    if kind is nn.Embedding:
        return new
    twin = _blank(kind)
    twin.__dict__.update(attributes(old, new))
    return twin


def kind_of(layer: nn.Module) -> type[nn.Embedding]:
    """The class whose forward a look-up runs, quantised or not: nn.Embedding for a plain one."""
    if isinstance(layer, _OwnRows):
        return layer._kind
    return nn.Embedding if isinstance(layer, QEmbedding) else cast(type[nn.Embedding], type(layer))


def attributes(old: nn.Module, new: nn.Module) -> dict[str, Any]:
    """The attributes of `new`, and those of `old` that it lacks: own ones, and buffers that are not saved."""
    own = {name: value for name, value in old.__dict__.items() if name not in _OF_TWINS_ONLY}
    both = {**own, **new.__dict__}
    unsaved = _unsaved(old)
    both["_buffers"] = {**new._buffers, **unsaved}
    both["_non_persistent_buffers_set"] = new._non_persistent_buffers_set | set(unsaved)
    return both


def _unsaved(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers that are in no state_dict, but for the one that holds codes."""
    return {n: t for n, t in module._buffers.items() if n in module._non_persistent_buffers_set and n != "storage"}


def _blank(kind: type[nn.Embedding]) -> QEmbedding:
    twin = _twin(kind)
    return twin.__new__(twin)


@derived
def _twin(kind: type[nn.Embedding]) -> type[_OwnRows]:
    return cast(type[_OwnRows], type(f"Q{kind.__name__}", (kind, _OwnRows), {"_kind": kind}))
