"""SwitchableModel: a model whose layers exist in every format at once, so that a configuration is a swap away."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import methodcaller
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from pyquant.calibrate.padding import Padding, counted, left_out
from pyquant.calibrate.run import Inputs, inputs_of
from pyquant.core import arguments
from pyquant.core.modes import evaluating
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, PyquantError
from pyquant.mixed_precision.choices.formats import Format, formats_of
from pyquant.mixed_precision.choices.groups import Group, Grouping, find_groups, quantisable
from pyquant.nn.fates import is_same, shares, twin_of
from pyquant.nn.flow import first_tensor
from pyquant.nn.forms import has_form
from pyquant.nn.report import quantization_report
from pyquant.nn.sites import Filter, Site
from pyquant.nn.swap import swap_modules
from pyquant.nn.tell import warn_of_floats
from pyquant.nn.undo import Undo
from pyquant.nn.whole_layer import around, wrappers_of
from pyquant.ptq.calibrator import QuantizationCalibrator, Ranges
from pyquant.simulate.kinds import simulate

Config = tuple[int, ...]

USUAL_BATCHES: Final = 16  # kept by default
_OF_WEIGHTS: Final = ("weight_scale", "weight_zero_point")  # what a file has beside the codes of a weight


class SwitchableModel:
    """A float model with every quantisable layer in every format, calibrated once; integer layers are the real ones.

    model            nn.Module in floating point; it is changed only inside of `using`, and restored.
    formats          names, see formats_of; the float one becomes number 0 and is called by the dtype of the layers.
    data             batches, as for calibration; the first num_batches are kept. None where no format is static and
                     nothing is to be called.
    num_batches      how many batches are kept and calibrate. None: the first 16, or all where there are fewer.
    batch_to_inputs  batch -> tensor, tuple of arguments, or mapping of keyword arguments; None: as in calibration.
    grouping, filter_fn   which layers share a format, and which have a choice; see find_groups.
    to_output        what the model returned -> the tensor that counts; None: 'logits', 'last_hidden_state', or the
                     first tensor.
    Raises ArgumentError naming what is missing; a format that a layer cannot take is no error: see `refusals`.

    Attributes: groups, formats, allowed [groups][formats], refusals {(layer, format): why}, batches, numel (weights of
    each group).

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        >>> switchable = SwitchableModel(model, ("float", "W8A8Dynamic"))
        >>> with switchable.using((0, 1)):
        ...     print([type(layer).__name__ for layer in model])
        ['Linear', 'ReLU', 'QLinear']
    """

    def __init__(
        self,
        model: nn.Module,
        formats: Sequence[str],
        data: Iterable[Any] | None = None,
        *,
        num_batches: int | None = None,
        batch_to_inputs: Callable[[Any], Any] | None = None,
        grouping: Grouping = "auto",
        filter_fn: Filter | None = None,
        to_output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.model = arguments.module("model", model)
        arguments.function("to_output", to_output, "result of the model -> tensor")
        self._sites = {site.names[0]: site for site in quantisable(model, filter_fn)}
        wrappers = wrappers_of(model.modules())
        self._wrappers = {n: wrappers[id(s.module)] for n, s in self._sites.items() if id(s.module) in wrappers}
        self.formats = formats_of(formats, {_weight(site).dtype for site in self._sites.values()})
        self.groups = find_groups(model, grouping, filter_fn)
        _warn_of_forms(model, filter_fn)
        # batch -> the model's call, on its device
        self.inputs: Callable[[Any], Inputs] = inputs_of(model, batch_to_inputs)
        self._to_output = output_tensor if to_output is None else to_output
        self._batch_to_inputs = batch_to_inputs
        self.batches = _first_batches(data, num_batches, [f.name for f in self.formats if f.needs_data])
        self.refusals: dict[tuple[str, str], str] = {}
        self._ranges: list[Ranges] = [{}]
        self._layers = {name: [site.module] for name, site in self._sites.items()}
        for format in self.formats[1:]:
            modules = self._build(format)
            for name in self._layers:
                self._layers[name].append(modules.get(name, self._sites[name].module))
        self.allowed = tuple(
            tuple(all((layer, f.name) not in self.refusals for layer in group.layers) for f in self.formats)
            for group in self.groups
        )

    # ---- what there is

    def layer(self, name: str, format_index: int) -> nn.Module:
        """The layer object that replaces `name` in that format."""
        return self._layers[name][format_index]

    def called(self, name: str, format_index: int) -> nn.Module:
        """What the model calls for the layer in that format: the layer, or the module that transforms its inputs, with
        whatever layer is in it. A clock belongs around this one: both may be one kernel."""
        return self._wrappers.get(name) or self.layer(name, format_index)

    def alone(self, name: str, format_index: int) -> nn.Module:
        """The same as a module of its own, which may be called outside of the model."""
        layer = self.layer(name, format_index)
        return around(self._wrappers[name], layer) if name in self._wrappers else layer

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(t.device for t in (*self.model.parameters(), *self.model.buffers()))

    @property
    def group_of(self) -> dict[str, int]:
        """{layer: the index of its group}."""
        return {layer: g for g, group in enumerate(self.groups) for layer in group.layers}

    @property
    def numel(self) -> tuple[int, ...]:
        """Weights of each group."""
        return tuple(sum(_weight(self._sites[n]).numel() for n in g.layers) for g in self.groups)

    def uniform(self, format_index: int) -> Config:
        """Every group in that format, or in floating point where it cannot take it."""
        return tuple(format_index if row[format_index] else 0 for row in self.allowed)

    def group_bytes(self) -> list[list[int]]:
        """Bytes of every group in every format, [groups][formats]: what a file holds, int4 weights two in a byte. A
        weight of several layers counts once, one that a module outside of the groups has too not at all: it stays."""
        outside = {id(t) for t in self._outside()}

        def floats(group: Group) -> int:
            tensors = (t for n in group.layers for t in self._sites[n].module.parameters())
            return _bytes(t for t in tensors if id(t) not in outside)

        formats = range(1, len(self.formats))
        return [[floats(g), *(_bytes(self._state(g, f)) for f in formats)] for g in self.groups]

    def _state(self, group: Group, format_index: int) -> list[Any]:
        """What a group's layers hold in a format; those that would be one layer (twins_of) once."""
        kept: list[tuple[nn.Module, nn.Module]] = []
        for name in group.layers:
            old, new = self._sites[name].module, self.layer(name, format_index)
            if not any(shares(old, other) and is_same(new, twin) for other, twin in kept):
                kept.append((old, new))
        return [value for _, new in kept for value in new.state_dict().values()]

    def group_bits(self) -> list[list[int]]:
        """Bits of every group's weights in every format, [groups][formats]: of their codes, scales and zero points, as
        a file holds these; floats have their dtype's. A weight of several layers counts in each, as in numel."""
        return [[sum(self._bits(n, f) for n in g.layers) for f in range(len(self.formats))] for g in self.groups]

    def _bits(self, name: str, format_index: int) -> int:
        weight = _weight(self._sites[name])
        if not format_index:
            return 8 * weight.nbytes
        state = self.layer(name, format_index).state_dict()
        scales = (value for key, value in state.items() if key.rpartition(".")[2] in _OF_WEIGHTS)
        return weight.numel() * self.formats[format_index].weight_bits + 8 * _bytes(scales)

    def other_bytes(self) -> int:
        """Bytes of everything that is in no group, or not in one alone: the embedding that a head is tied to."""
        return _bytes(self._outside())

    def _outside(self) -> Iterator[Tensor]:
        own = {id(site.module) for site in self._sites.values()}
        for module in self.model.modules():
            if id(module) not in own:
                tensors = (*module._parameters.values(), *module._buffers.values())
                yield from (t for t in tensors if t is not None)

    def named(self, config: Config) -> dict[str, str]:
        """{group: format} of a configuration."""
        return {g.name: self.formats[f].name for g, f in zip(self.groups, self.check(config), strict=True)}

    def text(self, config: Config) -> str:
        """'group: format, ...' of a configuration, for messages."""
        return ", ".join(f"{group}: {format}" for group, format in self.named(config).items())

    def chosen(self, config: Config) -> dict[str, int]:
        """{layer: the index of its format} of a configuration."""
        return {layer: f for group, f in zip(self.groups, self.check(config), strict=True) for layer in group.layers}

    def ranges(self, config: Config) -> Ranges:
        """{'layer.input': Range} of every static tensor of a configuration, as quantize_recipe_ takes them."""
        ranges: Ranges = {}
        for layer, f in self.chosen(config).items():
            ranges |= {name: r for name, r in self._ranges[f].items() if name.rpartition(".")[0] == layer}
        return ranges

    def check(self, config: Config) -> Config:
        """The configuration. Raises ArgumentError for a wrong length, unknown formats, and refused ones with why."""
        if len(config) != len(self.groups) or any(not 0 <= f < len(self.formats) for f in config):
            raise ArgumentError("config", repr(config), f"{len(self.groups)} numbers in [0, {len(self.formats)})")
        for group, row, f in zip(self.groups, self.allowed, config, strict=True):
            if not row[f]:
                name = self.formats[f].name
                why = next(self.refusals[n, name] for n in group.layers if (n, name) in self.refusals)
                raise ArgumentError("config", f"{group.name}: {name}", why)
        return tuple(config)

    # ---- what it does

    @contextmanager
    def using(self, config: Config) -> Iterator[nn.Module]:
        """The model in that configuration, for the length of the block; in evaluation mode."""
        new = {layer: self._layers[layer][f] for layer, f in self.chosen(config).items() if f}
        with self._with(new), evaluating(self.model):
            yield self.model

    @contextmanager
    def _with(self, layers: dict[str, nn.Module]) -> Iterator[None]:
        """Other modules in place of some layers, for the length of the block."""
        undo: list[Undo] = []
        swap_modules(self.model, [(self._sites[name].names, module) for name, module in layers.items()], undo=undo)
        with ExitStack() as stack:
            for step in undo:
                stack.callback(step)
            yield

    def call(self, batch: Any) -> Tensor:
        """What counts of the output tensor of the model, as it is now, for one batch: [rows, ...] without padding where
        the batch has some; the caller decides about gradients."""
        output, padding = self.whole(batch)
        with left_out(padding):
            return counted(output)

    def whole(self, batch: Any) -> tuple[Tensor, Padding]:
        """The output tensor with its padded positions, and which these are."""
        args, kwargs, padding = self.inputs(batch)
        with left_out(padding):
            output = self._to_output(self.model(*args, **kwargs))
        if not isinstance(output, Tensor):
            raise ArgumentError("to_output", f"a function that returned a {type(output).__name__}", "one of a tensor")
        if output.is_nested:
            raise ArgumentError("to_output", "an output that is a nested tensor", "a function that takes its values()")
        return output, padding

    def outputs(self, config: Config, batches: Iterable[Any] | None = None) -> list[Tensor]:
        """The outputs of a configuration for the batches (None: those kept), without gradients."""
        with self.using(config), torch.inference_mode():
            return [self.call(batch) for batch in (self.batches if batches is None else batches)]

    def _build(self, format: Format) -> dict[str, nn.Module]:
        """{layer: its twin in that format}; layers that cannot take it go to the refusals."""
        simulating: dict[str, nn.Module] = {}
        for name, site in self._sites.items():
            try:
                simulating[name] = twin_of(site.module, name, partial(simulate, scheme=cast(QScheme, format.scheme)))
            except PyquantError as error:
                self.refusals[name, format.name] = str(error)
        with self._with(simulating):
            ranges: Ranges = {}
            if format.needs_data and simulating:
                ranges = QuantizationCalibrator().calibrate_model(
                    self.model, self.batches, "mse", len(self.batches), batch_to_inputs=self._batch_to_inputs
                )
            self._ranges.append(ranges)
            return {name: twin_of(twin, name, methodcaller("to_quantized")).eval() for name, twin in simulating.items()}


def output_tensor(result: Any) -> Tensor:
    """What counts of a model's result: first_tensor. Raises ArgumentError for a result without one."""
    if (tensor := first_tensor(result)) is None:
        allowed = "a function that takes the tensor out of it"
        raise ArgumentError("to_output", f"None, for a result of type {type(result).__name__}", allowed)
    return tensor


def _first_batches(data: Iterable[Any] | None, num_batches: int | None, static: Sequence[str]) -> list[Any]:
    limit = USUAL_BATCHES if num_batches is None else num_batches
    arguments.whole("num_batches", limit, 1)
    if data is None:
        if static:
            raise ArgumentError("data", f"None, for {', '.join(static)}", "batches, or dynamic formats (W8A8Dynamic)")
        return []
    batches = list(itertools.islice(arguments.iterable("data", data), limit))
    if not batches:
        raise ArgumentError("data", "no batches", "at least one")
    if num_batches is not None and len(batches) < num_batches:
        raise ArgumentError("num_batches", limit, f"at most {len(batches)}, the batches that the data has")
    return batches


def _warn_of_forms(model: nn.Module, filter_fn: Filter | None) -> None:
    """One warning of the classes that have matrices of their own: they are no layers, and so in no group."""
    modules = dict(model.named_modules())
    forms = [r for r in quantization_report(model) if r.name in modules and has_form(modules[r.name])]
    meant = [r for r in forms if filter_fn is None or filter_fn(modules[r.name], r.name)]
    warn_of_floats(meant, (), "search and sensitivity", stacklevel=5)


def _weight(site: Site) -> Tensor:
    return cast(Tensor, site.module.weight)


def _bytes(values: Iterable[Any]) -> int:
    return sum({id(t): t.nbytes for t in values if isinstance(t, Tensor)}.values())
