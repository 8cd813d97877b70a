"""calibrate_: ranges for the static tensors of a model with fake quantisation, from batches of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import nn

from pyquant.calibrate import Range, compute_range, run_calibration
from pyquant.calibrate.run import refuse_silent, warn_of_zeros
from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.float_model import floating_point
from pyquant.simulate.kinds import is_simulated
from pyquant.simulate.layer import Simulated
from pyquant.simulate.unseen_experts import count_tokens, peers_of, widest

FIELDS: Final = {"weight": "weights", "input": "inputs", "output": "outputs"}  # tensor -> its field of a QScheme
_STATE: Final = ("scheme", "mode", "statistics", "_is_known", "method_is_open")


def calibrate_(
    model: nn.Module,
    data: Iterable[Any],
    num_batches: int = 16,
    *,
    batch_to_inputs: Callable[[Any], Any] | None = None,
    method: str | None = None,
    percentile: float | None = None,
    **run_options: Any,
) -> nn.Module:
    """Find the range of every static input and output of the simulating layers, in place.

    model            after insert_fake_quantize_ (or SelectiveQuantizer, prepare_qat_).
    data, num_batches, batch_to_inputs, run_options   as in pyquant.calibrate.run_calibration: exactly so many batches.
    method           None: the calibrator of each tensor's scheme; else this one for all.
    percentile       of method 'percentile'; None: the scheme's.
    ->               the model, calibrated. Models whose ranges all follow their data are not run at all.
    Transactional: on any exception every range is as before. Raises CalibrationError naming layers that saw no data,
    NonFiniteError naming layer and batch, ArgumentError.

    Example:
        >>> import torch
        >>> from pyquant.core.presets import W8A8
        >>> from pyquant.simulate.insert import insert_fake_quantize_
        >>> model = insert_fake_quantize_(nn.Sequential(nn.Linear(4, 2)), W8A8())
        >>> model = calibrate_(model, [torch.full((3, 4), 1.27)], 1)
        >>> round(model[0].input_fake_quant.scale.item(), 4)
        0.01
    """
    targets = targets_of(model, weights=False)
    with unchanged(targets, only_on_error=True):
        for target in targets:
            target.set_method(method, percentile)
        static = {target.name: target.fake for target in targets}
        set_ranges_from_data(static, model, data, num_batches, batch_to_inputs=batch_to_inputs, **run_options)
    return model


def set_ranges_from_data(
    fakes: Mapping[str, FakeQuantize], model: nn.Module, data: Iterable[Any], num_batches: int, **run_options: Any
) -> dict[str, Range]:
    """Run batches, nothing rounded meanwhile, and set the range of each of these by the calibrator of its scheme; ->
    the ranges, by their names. Without any fake quantiser nothing is run: any data would do, and none is needed."""
    if not fakes:
        return {}
    with floating_point(model):
        found = ranges_of(fakes, model, data, num_batches, **run_options)
    return set_ranges(fakes, model, found)


def ranges_of(
    fakes: Mapping[str, FakeQuantize], model: nn.Module, data: Iterable[Any], num_batches: int, **run_options: Any
) -> dict[str, tuple[Range | None, int]]:
    """Run batches and let each of these collect; -> its range (None: it saw nothing) and how many numbers it saw."""
    collected = run_calibration(model, fakes, data, num_batches, **{"on_silent": "ignore", **run_options})
    seen = {name: collected[name]["x"] for name in fakes}
    return {
        name: (compute_range(seen[name], fake.scheme) if seen[name].count else None, seen[name].count)
        for name, fake in fakes.items()
    }


def set_ranges(
    fakes: Mapping[str, FakeQuantize], model: nn.Module, found: Mapping[str, tuple[Range | None, int]]
) -> dict[str, Range]:
    """Set the ranges that data gave; experts that saw none get those of the others. -> the ranges, by name."""
    peers = peers_of(model, fakes)
    ranges = {name: found[name][0] for name in fakes}
    seen = {name: range_ for name, range_ in ranges.items() if range_ is not None}
    ranges = {name: range_ or widest(peers.get(name, ()), seen) for name, range_ in ranges.items()}
    refuse_silent([name for name, range_ in ranges.items() if range_ is None], len(fakes))
    count_tokens(model, fakes, {name: found[name][1] for name in fakes})
    known = {name: range_ for name, range_ in ranges.items() if range_ is not None}
    warn_of_zeros([name for name, range_ in known.items() if not bool(range_.amax.any())])
    for name, fake in fakes.items():  # all are known before the first is set
        fake.set_range(known[name])
    return known


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
    """Every static FakeQuantize with a calibrator (weights=False: but those of weights), each once, in the order of
    named_modules. Raises ArgumentError for a model without fake quantisation."""
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
    numbers = [(fake.scale.data, fake.zero_point, getattr(fake, "floor", None)) for fake in fakes]  # learned: a floor
    tensors = [(t, t.clone()) for of_fake in numbers for t in of_fake if t is not None]
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
