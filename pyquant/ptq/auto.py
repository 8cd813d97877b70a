"""auto_: integers only where they are not slower; every other layer stays, or becomes again, a float one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from pyquant.core import arguments
from pyquant.core.presets import W8A8Dynamic
from pyquant.errors import ArgumentError
from pyquant.nn.dequantize import put_floats
from pyquant.nn.keep import remember
from pyquant.nn.linear_state import LinearState
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qlinear import QLinear
from pyquant.nn.quicker import BOTH, FLOATS, INTEGERS, LayerChoice, judge, with_both_forms
from pyquant.nn.sites import find_all_sites, find_owners
from pyquant.nn.speed import UNREACHED, unreached
from pyquant.nn.swap import as_it_is, distinct, swap_modules
from pyquant.nn.two_forms import TwoFormLinear
from pyquant.nn.undo import Undo, undone_on_error
from pyquant.nn.whole_layer import WRAPPERS, without, wrappers_of
from pyquant.ops.plan import Device
from pyquant.ptq.quantize import quantize_

_ITS_OWN = ("device", "check_speed")  # arguments of quantize_ that auto_ decides


@dataclass(frozen=True)
class AutoReport(Sequence[LayerChoice]):
    """What auto_ did with every quantised layer that the examples reach; a sequence, and text that prints well.

    choices    one a layer, in the model's order.   device   what the figures are of.
    unreached  names of quantised layers that no example called: they stay as they are.
    """

    choices: tuple[LayerChoice, ...]
    device: str
    unreached: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.choices)

    def __getitem__(self, index: Any) -> Any:
        return self.choices[index]

    def __iter__(self) -> Iterator[LayerChoice]:
        return iter(self.choices)

    @property
    def us(self) -> float:
        """Microseconds of all calls of the compared layers as they are now."""
        return sum(choice.us for choice in self.choices)

    @property
    def float_us(self) -> float:
        """Microseconds of the same calls with all of these layers in floats."""
        return sum(choice.float_us for choice in self.choices)

    @property
    def extra_bytes(self) -> int:
        """Bytes of real weights beside codes: the price of layers in both forms."""
        return sum(choice.extra_bytes for choice in self.choices)

    def __str__(self) -> str:
        counts = {form: sum(choice.form == form for choice in self.choices) for form in (INTEGERS, FLOATS, BOTH)}
        parts = [f"{count} in {'both forms' if form == BOTH else form}" for form, count in counts.items() if count]
        speed = f": {self.us:.1f} us against {self.float_us:.1f} us in floats" if self.float_us else ""
        price = f"; both forms take {self.extra_bytes} bytes more" if self.extra_bytes else ""
        head = f"{len(self.choices)} layers on {self.device}: {', '.join(parts)}{speed}{price}"
        widths = [max(len(getattr(choice, name)) for choice in self.choices) for name in ("name", "form")]
        lines = [f"  {c.name:{widths[0]}}  {c.form:{widths[1]}}  {c.reason}" for c in self.choices]
        quiet = [f"  not called: {', '.join(self.unreached)}: {UNREACHED}"] if self.unreached else []
        return "\n".join([head, *lines, *quiet])


def auto_(
    model: nn.Module,
    example_inputs: object,
    config: Any = None,
    *,
    device: Device | None = None,
    measure: bool = False,
    tolerance: float = 0.03,
    spare_bytes: int = 0,
    seconds: float = 2.0,
    **options: Any,
) -> AutoReport:
    """Quantise a model, and leave in floating point every layer that integers would make slower, in place.

    model           nn.Module, in the mode and on the device in which it will run. One that quantize_ changed already
                    keeps its quantised layers, and those that lose become float layers of what their codes stand for.
    example_inputs  what the model will be given: a tensor, a tuple of arguments or a mapping of keyword arguments; a
                    list of these where several kinds of calls matter (a prompt and a single token): their times add up.
                    The model runs once with each; the rows that reach a layer decide about it.
    config          as in quantize_, for a float model: scheme, FqnConfig or recipe; None: W8A8Dynamic.
    device          a GPU to plan for that is not here (pyquant.ops.plan.Device); None: where the model is.
    measure         time layers on a GPU also where the plan knows them.
    tolerance       an integer layer that is slower by at most this part of the float one's time stays, for its memory.
    spare_bytes     memory for real weights beside the codes. A QLinear that is quicker in integers at some numbers of
                    rows and in floats at others keeps both forms as far as they reach (nn.two_forms.TwoFormLinear);
                    0: every layer has the form that is quicker over all calls.
    seconds         of timing altogether, about.
    options         further arguments of quantize_ (data, filter_fn, heads, ...).
    ->              AutoReport: the form of every layer, with the figures; print it. quantization_report(model) gives
                    the reasons later, too.

    What is compared: on a CPU both forms, timed with interleaved calls. On a GPU 16-bit Linears by the plan: whole
    layers or kernels that `pyquant tune` measured on that GPU, else the cost model; the launch that quantises the
    activations counts. Convolutions and float32 layers of a GPU are timed. Layers that take or give codes (link_) or
    add a residual are left as they are, and so are layers that no example reaches, which the report names.
    Layers that a float model brought go back themselves, with weights that were never rounded. A layer whose inputs are
    transformed first (HadamardLinear) is timed with the transform, against a Linear without: that is what takes its
    place where integers lose, its weight turned back in float64. Transactional: on any exception the model is as
    before. Raises ArgumentError for wrong arguments, and what quantize_ raises.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> report = auto_(model, torch.randn(16, 64), seconds=0.05)
        >>> [choice.name for choice in report], {choice.form for choice in report} <= {"integers", "floats"}
        (['0', '2'], True)
    """
    arguments.module("model", model)
    for name, value in (("tolerance", tolerance), ("spare_bytes", spare_bytes)):
        arguments.number(name, value, 0)
    arguments.number("seconds", seconds, 0, above=True)
    arguments.flag("measure", measure)
    if device is not None and (measure or not isinstance(device, Device)):
        got = "a device elsewhere" if measure else arguments.shown(device)
        raise ArgumentError("measure" if measure else "device", got, "a pyquant.ops.plan.Device, and no measuring")
    for name in (name for name in _ITS_OWN if name in options):
        raise ArgumentError(name, "given", "nothing: move the model before; auto_ compares speeds itself")
    examples = list(example_inputs) if isinstance(example_inputs, list) else [example_inputs]
    if not examples:
        raise ArgumentError("example_inputs", "an empty list", "at least one example")
    is_quantised = any(isinstance(module, LinearState) for module in model.modules())
    if is_quantised and (config is not None or options):
        raise ArgumentError(next(iter(options), "config"), "given", "nothing for a model that is quantised already")
    where = device.name or f"sm_{device.sm}" if device is not None else _place(model)
    undo = as_it_is(model)
    with undone_on_error(undo):
        originals: dict[str, nn.Module] = {}
        if not is_quantised:
            sites = find_all_sites(model, (nn.Linear, nn.Conv2d), find_owners(model))
            originals = {name: site.module for site in sites for name in site.names}
            quantize_(model, W8A8Dynamic() if config is None else config, check_speed=False, **options)
        how: dict[str, Any] = {"device": device, "measure": measure, "seconds": seconds, "tolerance": tolerance}
        choices = judge(model, examples, **how)
        quiet = tuple(unreached(model, {choice.name for choice in choices}))
        if spare_bytes:
            wrappers = wrappers_of(model.modules())
            layers = {choice.name: model.get_submodule(choice.name) for choice in choices}
            layers = {name: wrappers.get(id(layer), layer) for name, layer in layers.items()}
            choices = with_both_forms(choices, layers, spare_bytes, device)
        _carry_out(model, choices, originals, undo)
    return AutoReport(tuple(choices), where, quiet)


def _carry_out(
    model: nn.Module, choices: Sequence[LayerChoice], originals: dict[str, nn.Module], undo: list[Undo]
) -> None:
    by_name = {choice.name: choice for choice in choices}
    found = distinct(model, lambda _, module: isinstance(module, (QLinear, QConv2d)))
    chosen = [(names, layer, by_name[names[0]]) for names, layer in found if names[0] in by_name]
    both = [
        (names, TwoFormLinear.of(layer, choice.rows_in_floats))
        for names, layer, choice in chosen
        if choice.form == BOTH and isinstance(layer, QLinear)
    ]
    swap_modules(model, both, undo=undo)
    lost = [(names, layer) for names, layer, choice in chosen if choice.form == FLOATS]
    inside = {id(layer) for _, layer in lost}
    wrapped = distinct(model, lambda name, m: bool(name) and isinstance(m, WRAPPERS) and id(m.linear) in inside)
    put_floats(model, lost, undo, originals)
    new = [(names, without(module, cast(nn.Module, module.linear))) for names, module in wrapped]
    swap_modules(model, new, undo=undo)
    for names, _ in lost:
        remember(_nearest(model, names[0]), by_name[names[0]].reason, undo)


def _nearest(model: nn.Module, name: str) -> nn.Module:
    """The module of that name, or (where a linear form is a module of its own class again) what it belongs to."""
    while True:
        try:
            return model.get_submodule(name)
        except AttributeError:
            name = name.rpartition(".")[0]


def _place(model: nn.Module) -> str:
    """The device of the model, with the number of threads of a CPU."""
    tensors = (*model.parameters(), *model.buffers())
    device = tensors[0].device if tensors else torch.device("cpu")
    return f"cpu, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
