"""When a model has been loaded, which vLLM tells no quantisation method: its last layer was packed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

_TALLIES: weakref.WeakKeyDictionary[nn.Module, Tally] = weakref.WeakKeyDictionary()
Layers = Sequence[tuple[str, nn.Module]]


class Tally:
    """The layers that vLLM asked one quantisation method about, in this process.

    at_end  called with (name, layer) of all that are still there, once those that are packed after loading have been.
    A copy, in another process too, begins with none.
    """

    def __init__(self, at_end: Callable[[Layers], None]) -> None:
        self._at_end = at_end
        self._asked: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._waits: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Tally, (self._at_end,))

    def asked(self, name: str, layer: nn.Module, *, will_be_packed: bool) -> None:
        """vLLM builds a layer. will_be_packed: packed() is called with it after loading."""
        self._asked.append((name, weakref.ref(layer)))
        if will_be_packed:
            self._waits.add(layer)
            _TALLIES[layer] = self

    def _packed(self, layer: nn.Module) -> None:
        self._waits.discard(layer)
        if not self._waits:
            found = [(name, one()) for name, one in self._asked]
            self._asked = []
            self._at_end([(name, one) for name, one in found if one is not None])


def packed(layer: nn.Module) -> None:
    """A layer was loaded and packed; of a layer that no tally was told of, nothing."""
    tally = _TALLIES.pop(layer, None)
    if tally is not None:
        tally._packed(layer)
