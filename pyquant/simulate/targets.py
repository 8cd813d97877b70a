"""The tensors of a prepared model whose ranges come from data: found, given a method, put back where a run fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.kinds import is_simulated
from pyquant.simulate.layer import Simulated

FIELDS: Final = {"weight": "weights", "input": "inputs", "output": "outputs"}  # tensor -> its field of a QScheme
_STATE: Final = ("scheme", "mode", "statistics", "_is_known", "method_is_open")


@dataclass(frozen=True)
class Target:
    """One FakeQuantize of a model: its own name, and the simulating layer and tensor that it belongs to, if any."""

    name: str
    fake: FakeQuantize
    layer: Simulated | None = None
    tensor: str = ""

    def set_method(self, method: str | None, percentile: float | None) -> None:
        """Take another calibrator and percentile (None: as they are) into the schemes of tensor and layer."""
        given: dict[str, Any] = {"calibrator": method, "percentile": percentile}
        self.fake.scheme = replace(self.fake.scheme, **{k: v for k, v in given.items() if v is not None})
        if self.layer is not None:
            changed: dict[str, Any] = {FIELDS[self.tensor]: self.fake.scheme}
            self.layer.scheme = replace(self.layer.scheme, **changed)


def targets_of(model: nn.Module, *, weights: bool = True) -> list[Target]:
    """Every static FakeQuantize with a calibrator, each once, in the order of named_modules.

    weights  False: all but those of weights.
    Raises ArgumentError for a model without fake quantisation.
    """
    arguments.module("model", model)
    named = list(model.named_modules())
    owners = {
        id(fake): (name, layer, tensor)
        for name, layer in named
        if is_simulated(layer)
        for tensor, fake in layer.fake_quantizers().items()
    }
    fakes = [(name, fake) for name, fake in named if isinstance(fake, FakeQuantize)]
    if not fakes:
        got = f"a {type(model).__name__} without fake quantisation"
        raise ArgumentError("model", got, "a model after quantize_module")
    targets = []
    for name, fake in fakes:
        if not fake.follows and fake.scheme.calibrator != "fixed":
            owner, layer, tensor = owners.get(id(fake), (name, None, ""))
            targets.append(Target(f"{owner}.{tensor}" if tensor else owner, fake, layer, tensor))
    return [target for target in targets if weights or target.tensor != "weight"]


@contextmanager
def unchanged(targets: list[Target], *, only_on_error: bool = False) -> Iterator[None]:
    """Ranges, schemes and modes as they were after the block, in any case or only should it raise."""
    fakes = [target.fake for target in targets]
    before = [{name: getattr(fake, name) for name in _STATE} for fake in fakes]
    tensors = [(t, t.clone()) for fake in fakes for t in (fake.scale.data, fake.zero_point) if t is not None]
    schemes = [(target.layer, target.layer.scheme) for target in targets if target.layer is not None]
    is_done = False
    try:
        yield
        is_done = only_on_error
    finally:
        if not is_done:
            for fake, fields in zip(fakes, before, strict=True):
                fake.__dict__.update(fields)
            for tensor, kept in tensors:
                tensor.copy_(kept)
            for layer, scheme in schemes:
                layer.scheme = scheme
