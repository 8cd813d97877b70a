"""Layers that are given one tensor, as q, k and v or gate and up are: what is found for one holds for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyquant.nn.flow import watch_input
from pyquant.ptq.improve.matrix import Layer
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.linear import FakeQuantLinear


class _Given:
    """The tensor that one layer was given, held so that another one cannot take its place."""

    def __init__(self, x: Tensor) -> None:
        self._x, self._version = x, None if x.is_inference() else x._version

    def is_still(self, x: Any) -> bool:
        """Whether this is that tensor, unchanged; not where changes are not counted."""
        return x is self._x and self._version is not None and self._x._version == self._version


@contextmanager
def noting_groups(layers: Mapping[str, Layer], calls: Mapping[str, int]) -> Iterator[list[list[str]]]:
    """The list holds, after a pass of the model inside, the names of Linears that followed each other there and were
    given one tensor, in groups; those that a pass calls more than once are left out."""
    groups: list[list[str]] = []
    last: list[_Given] = []

    def called(name: str, layer: Layer, x: Any) -> None:
        if last and last[0].is_still(x) and rounded_alike(layers[groups[-1][0]], layer):
            groups[-1].append(name)
        elif isinstance(x, Tensor):
            groups.append([name])
            last[:] = [_Given(x)]

    with ExitStack() as hooks:
        for name, layer in layers.items():
            if type(layer) is FakeQuantLinear and calls.get(name) == 1:
                hooks.callback(watch_input(layer, partial(called, name, layer)).remove)
        try:
            yield groups
        finally:
            last.clear()


@contextmanager
def checked(layers: Sequence[Layer], sharing: list[bool]) -> Iterator[None]:
    """Passes inside set sharing[i] to False where layer i is given another tensor than layers[0] in front of it."""
    last: list[_Given] = []

    def first(x: Tensor) -> None:
        last[:] = [_Given(x)]

    def other(i: int, x: Any) -> None:
        sharing[i] = sharing[i] and bool(last) and last[0].is_still(x)

    with ExitStack() as hooks:
        if len(layers) > 1:
            hooks.callback(watch_input(layers[0], first).remove)
        for i, layer in enumerate(layers[1:], 1):
            hooks.callback(watch_input(layer, partial(other, i)).remove)
        try:
            yield
        finally:
            last.clear()


def rounded_alike(a: Layer, b: Layer) -> bool:
    """Whether two Linears round one input to the same numbers."""
    x, y = a.input_fake_quant, b.input_fake_quant
    if x is None or y is None:
        return x is y
    if type(x) is not FakeQuantize or type(y) is not FakeQuantize or (x.scheme, x.follows) != (y.scheme, y.follows):
        return False
    pairs = [] if x.follows else [(x.scale, y.scale), (x.zero_point, y.zero_point)]
    return all(s is t or (s is not None and t is not None and torch.equal(s, t)) for s, t in pairs)
