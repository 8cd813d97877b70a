"""The same calibration batches through a model several times, watched at single layers; the model is left as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from pyquant.calibrate.padding import counted, left_out
from pyquant.calibrate.run import Inputs, inputs_of, too_few
from pyquant.core import arguments
from pyquant.core.modes import evaluating
from pyquant.errors import ArgumentError
from pyquant.nn.flow import first_given

if TYPE_CHECKING:
    from typing_extensions import Self

BatchToInputs = Callable[[Any], Any]
# how far an output may move by rounding alone, of its norm
_TOLERANCE: Final = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Enough(Exception):
    """Ends a forward pass whose remaining layers are not needed."""


@dataclass
class Calls:
    """What passes of a model call: in which order, and how often in a pass at most.

    A pass may reach what others do not: it comes behind what this pass calls before it.
    """

    order: list[Any] = field(default_factory=list)
    most: Counter[Any] = field(default_factory=Counter)

    def add(self, events: Sequence[Any]) -> None:
        """One more pass: what it called, in order."""
        known, at = set(self.order), 0
        for event in dict.fromkeys(events):
            if event in known:
                at = self.order.index(event) + 1
            else:
                self.order.insert(at, event)
                at += 1
        self.most |= Counter(events)


class Replay:
    """num_batches batches of `data`, kept, and the passes of improvers over them: in eval mode, without gradients.

    Attributes: module, the model (or block); batches, what `run` takes; batch_to_inputs.
    Raises ArgumentError; CalibrationError where data holds fewer than num_batches batches."""

    batches: Sequence[Any]

    def __init__(
        self, model: nn.Module, data: Iterable[Any], num_batches: int, batch_to_inputs: BatchToInputs | None = None
    ) -> None:
        self.module = arguments.module("model", model)
        arguments.whole("num_batches", num_batches, 1)
        self.batches = list(islice(arguments.iterable("data", data), num_batches))
        if len(self.batches) < num_batches:
            raise too_few(num_batches, len(self.batches))
        self.batch_to_inputs = batch_to_inputs
        self._to_inputs = inputs_of(model, batch_to_inputs)

    @classmethod
    def over(cls, block: nn.Module, inputs: Sequence[Inputs]) -> Self:
        """The same of one module whose arguments and keyword arguments are known for every batch."""
        replay = cls.__new__(cls)
        replay.module, replay.batches = block, inputs
        replay.batch_to_inputs, replay._to_inputs = None, _as_they_are
        return replay

    def run(self, batch: Any) -> Any:
        """The module's output for one batch, as in inference."""
        with torch.no_grad():
            return self.forward(batch)

    def forward(self, batch: Any) -> Any:
        """The same for gradients, where they are enabled."""
        return self._called(self._to_inputs(batch))

    def error(self, measure: Callable[[Any, Any], float], floats: Any, batch: Any) -> float:
        """measure(floats, the module's output for a batch), as in inference; padding does not count in it."""
        inputs = self._to_inputs(batch)
        with torch.no_grad():
            output = self._called(inputs)
        with left_out(inputs.padding):
            return measure(floats, output)

    def compared(self, floats: Any, batch: Any) -> list[tuple[Tensor, Tensor]]:
        """(float tensor, tensor) of the outputs for a batch without padding, for gradients where they are enabled."""
        inputs = self._to_inputs(batch)
        output = self._called(inputs)
        with left_out(inputs.padding):
            return list(zip(counted_of_output(floats), counted_of_output(output), strict=True))

    def _called(self, inputs: Inputs) -> Any:
        args, kwargs, padding = inputs
        with evaluating(self.module), left_out(padding):
            return self.module(*args, **kwargs)

    def inputs(self, batch: Any) -> Inputs:
        """The module's call for a batch."""
        return self._to_inputs(batch)

    def calls(self, layers: Mapping[str, nn.Module]) -> dict[str, int]:
        """{layer: most calls in a batch}, in the order of the first calls; layers that no batch reaches are missing.
        Later batches are looked at where the first ones do not reach all, as routers of experts may."""
        found = Calls()
        with noting_calls(layers) as events:
            for batch in self.batches:
                self.run(batch)
                found.add(events)
                events.clear()
                if len(found.most) == len(layers):
                    break
        return {name: found.most[name] for name in found.order}

    def watch(self, layer: nn.Module, calls: int, see: Callable[[Tensor, Tensor], None], first: int, last: int) -> None:
        """see(input, output) of every call of a layer, for batches first <= i < last; a pass ends with the call after
        which the layer is not needed any more."""
        left = 0

        def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
            nonlocal left
            see(first_given(inputs, named).detach(), output.detach())
            left -= 1
            if left == 0:
                raise Enough

        with _hooked(layer, hook):
            for i in range(first, last):
                left = calls
                with suppress(Enough):
                    self.run(self.batches[i])

    def run_until(self, layer: nn.Module, calls: int, batch: int) -> None:
        """The pass of one batch, as far as the last call of a layer, which itself is not needed any more."""
        left = calls

        def hook(*_: object) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Enough

        handle = layer.register_forward_pre_hook(hook)
        try:
            with suppress(Enough):
                self.run(self.batches[batch])
        finally:
            handle.remove()


@contextmanager
def noting_calls(layers: Mapping[str, nn.Module]) -> Iterator[list[str]]:
    """The names of these layers as they are called inside, in order; whoever has read the list may clear it."""
    events: list[str] = []
    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(_hooked(layer, lambda *_, name=name: events.append(name)))
        yield events


def _as_they_are(inputs: Inputs) -> Inputs:
    return inputs


def tensors_of(output: Any) -> list[Tensor]:
    """The floating-point tensors of a model's output: a tensor, or a tuple, list or mapping of outputs."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [t for item in output.values() for t in tensors_of(item)]
    if isinstance(output, (tuple, list)):
        return [t for item in output for t in tensors_of(item)]
    return []


def counted_of_output(output: Any) -> list[Tensor]:
    """The same, without padding."""
    return [counted(tensor) for tensor in tensors_of(output)]


def check_unmoved(argument: str, before: Any, after: Any, allowed: str) -> None:
    """Raise ArgumentError where the outputs of a model differ by more than rounding."""
    for a, b in zip(tensors_of(before), tensors_of(after), strict=True):
        if a.numel() == 0:
            continue
        moved = float((b.double() - a.double()).norm()) / max(float(a.double().norm()), 1e-30)
        if not moved <= _TOLERANCE[a.dtype]:
            raise ArgumentError(argument, f"an output that moved by {moved:.2g} of its size", allowed)


@contextmanager
def _hooked(layer: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = layer.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
