"""The tensors of a prepared model whose ranges come from data: found, given a method, put back where a run fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from pyquant.calibrate import weight_range
from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.ptq.layer_scheme import FIELDS
from pyquant.simulate.fake_quantize import FakeQuantize


@dataclass(frozen=True)
class Target:
    """One FakeQuantize of a model: its own name, and the simulating layer and tensor that it belongs to, if any."""

    name: str
    fake: FakeQuantize
    layer: nn.Module | None = None
    tensor: str = ""

    def set_method(self, method: str, percentile: float) -> None:
        """Take another calibrator into the schemes of tensor and layer."""
        self.fake.scheme = replace(self.fake.scheme, calibrator=method, percentile=percentile)
        if self.layer is not None:
            self.layer.scheme = replace(self.layer.scheme, **{FIELDS[self.tensor]: self.fake.scheme})  # type: ignore


def targets_of(model: nn.Module) -> list[Target]:
    """Every static FakeQuantize with a calibrator, each once, weights included, in the order of named_modules.

    Raises ArgumentError for a model without fake quantisation.
    """
    arguments.module("model", model)
    owners: dict[int, tuple[str, nn.Module, str]] = {}
    for name, layer in model.named_modules():
        if hasattr(layer, "fake_quantizers"):
            for tensor, fake in layer.fake_quantizers().items():
                owners[id(fake)] = (name, layer, tensor)
    targets = []
    any_fake = False
    for name, fake in model.named_modules():
        if isinstance(fake, FakeQuantize):
            any_fake = True
            if not fake.follows and fake.scheme.calibrator != "fixed":
                owner, layer, tensor = owners.get(id(fake), (name, None, ""))
                targets.append(Target(f"{owner}.{tensor}" if tensor else owner, fake, layer, tensor))
    if not any_fake:
        raise ArgumentError(
            "model", f"a {type(model).__name__} without fake quantisation", "a model after quantize_module"
        )
    return targets


def calibrate_weight(target: Target) -> None:
    """The range of a weight by its scheme's calibrator, from the weight itself."""
    if target.layer is None:
        raise ArgumentError("target", target.name, "the weight of a layer")
    weight: Tensor = target.layer.weight.detach()  # type: ignore[operator]
    target.fake.set_range(weight_range(weight.flatten(1) if weight.dim() > 2 else weight, target.fake.scheme))


@contextmanager
def unchanged_on_error(targets: list[Target]) -> Iterator[None]:
    """Ranges, schemes and modes as they were, should the block raise."""
    before = [(target, _state(target)) for target in targets]
    try:
        yield
    except BaseException:
        _put_back(before)
        raise


@contextmanager
def restored(targets: list[Target]) -> Iterator[None]:
    """Ranges, schemes and modes as they were, after the block in any case."""
    before = [(target, _state(target)) for target in targets]
    try:
        yield
    finally:
        _put_back(before)


_State = tuple[dict[str, Any], list[tuple[Tensor, Tensor]], Any]


def _put_back(before: list[tuple[Target, _State]]) -> None:
    for target, (fields, tensors, layer_scheme) in before:
        target.fake.__dict__.update(fields)
        for tensor, kept in tensors:
            tensor.copy_(kept)
        if target.layer is not None:
            target.layer.scheme = layer_scheme


def _state(target: Target) -> _State:
    fake = target.fake
    names = ("scheme", "mode", "statistics", "_is_known", "method_is_open")
    tensors = [(t, t.clone()) for t in (fake.scale.data, fake.zero_point) if t is not None]
    return {name: getattr(fake, name) for name in names}, tensors, getattr(target.layer, "scheme", None)
