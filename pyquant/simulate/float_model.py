"""A simulating model as the float model that it was made of: nothing rounded, the parameters of before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from pyquant.core.names import listed
from pyquant.errors import ArgumentError
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.layer import SimulatedLayer

Parameters = tuple[Tensor, Tensor | None]  # weight and bias
_STALE: Final = -2  # no tensor's count of changes


class Originals:
    """Weight and bias of the float model, beside those of a layer that took their place; weight None: they were let go.

    They stand for the float model as long as the layer has exactly those in their place: training, a loaded state or a
    new parameter make the layer's own the float model again.
    """

    def __init__(self, layer: SimulatedLayer, weight: Tensor | None, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self._replaced_by = [(p, _version(p)) for p in (layer.weight, layer.bias)]

    def are_those_of(self, layer: SimulatedLayer) -> bool:
        """Whether nothing has changed the layer's parameters since."""
        pairs = zip(self._replaced_by, (layer.weight, layer.bias), strict=True)
        return all(was is now and version == _version(now) for (was, version), now in pairs)

    def __getstate__(self) -> dict[str, Any]:
        """Without the counts of changes: those of tensors that are loaded begin anew."""
        replaced = [(tensor, version == _version(tensor)) for tensor, version in self._replaced_by]
        return {"weight": self.weight, "bias": self.bias, "replaced_by": replaced}

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.weight, self.bias = held["weight"], held["bias"]
        self._replaced_by = [(t, _version(t) if is_current else _STALE) for t, is_current in held["replaced_by"]]

    def __deepcopy__(self, memo: dict[int, Any]) -> Originals:
        new = Originals.__new__(Originals)
        new.weight, new.bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        new._replaced_by = []
        for tensor, version in self._replaced_by:
            copied = copy.deepcopy(tensor, memo)
            # a copy begins to count anew: what is stale stays so
            new._replaced_by.append((copied, _version(copied) if version == _version(tensor) else _STALE))
        return new


def keep_originals(layer: SimulatedLayer, before: Parameters | None) -> None:
    """Remember what a layer computed in the float model, now that it has other parameters than `before`, which
    float_parameters gave for it then. None: remember only that it is gone."""
    layer.originals = Originals(layer, *(before or (None, None)))


def float_parameters(layer: SimulatedLayer) -> Parameters:
    """Weight and bias of a layer in the float model, on the layer's device and of its type; its own where those of
    before were let go."""
    kept = layer.originals
    if not isinstance(kept, Originals) or kept.weight is None or not kept.are_those_of(layer):
        return layer.weight, layer.bias
    return _like(kept.weight, layer.weight), None if kept.bias is None else _like(kept.bias, layer.weight)


def check_float_model(model: nn.Module) -> None:
    """Raise ArgumentError where the float model of a simulating one is not known any more."""
    gone = [
        name
        for name, m in model.named_modules()
        if isinstance(m, SimulatedLayer)
        and isinstance(m.originals, Originals)
        and m.originals.weight is None
        and m.originals.are_those_of(m)
    ]
    if gone:
        got = f"layers whose float weights an improver with save_to let go: {listed(gone)}"
        raise ArgumentError("model", got, "improvers one after the other without save_to, or one improver")


@contextmanager
def floating_point(model: nn.Module) -> Iterator[None]:
    """The model is the float one inside: every FakeQuantize passes its tensor on as it is, as no range may depend on
    what else is rounded, and layers whose parameters an improver replaced compute with those of before."""
    modes = [(fake, fake.mode) for fake in model.modules() if isinstance(fake, FakeQuantize)]
    replaced = [
        (m, m.weight, m.bias) for m in model.modules() if isinstance(m, SimulatedLayer) and m.originals is not None
    ]
    try:
        for fake, _ in modes:
            fake.mode = "off"
        for layer, *_ in replaced:
            layer.weight, layer.bias = float_parameters(layer)
        yield
    finally:
        for layer, weight, bias in replaced:
            layer.weight, layer.bias = weight, bias
        for fake, mode in modes:
            fake.mode = mode


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    if tensor.device == other.device and tensor.dtype == other.dtype:
        return tensor
    return nn.Parameter(tensor.detach().to(other.device, other.dtype), requires_grad=tensor.requires_grad)


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None or tensor.is_inference() else tensor._version
