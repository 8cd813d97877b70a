"""Put fake quantisation into a model, take it out again, or turn it into integer layers; all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from pyquant.errors import ArgumentError, PyquantError
from pyquant.nn import obstacles, origin
from pyquant.nn.indivisible import check_choice, fitted
from pyquant.nn.keep import remember
from pyquant.nn.match import FqnConfig
from pyquant.nn.report import quantization_report
from pyquant.nn.sites import Config, Filter, Site, check_keys, find_sites, rules_of, scheme_of, wished_floats
from pyquant.nn.swap import swap_modules, undone_on_error
from pyquant.nn.tell import warn_of_floats
from pyquant.nn.tied import TiedTwins
from pyquant.simulate.kinds import SIMULATED, is_simulated, simulate


def insert_fake_quantize_(
    model: nn.Module, config: Config, filter_fn: Filter | None = None, *, on_indivisible: str = "per_channel"
) -> nn.Module:
    """Replace float layers by layers that simulate their quantised twins, in place.

    model, config, filter_fn   as in quantize_; layers whose scheme is 16-bit are left alone.
    on_indivisible   layers whose K the scheme's group size does not divide, as in quantize_: 'per_channel', 'skip' or
                     'error'. One QuantizationWarning names them, and what stays in floating point unasked.
    ->   the model; parameters are shared with the float layers, names in the state dict unchanged.
    Transactional: on any exception the model is as before. Layers that are simulated already are refused: convert_ or
    remove_fake_quantize_ first. Raises ArgumentError or SchemeError naming the layer.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> type(insert_fake_quantize_(nn.Sequential(nn.Linear(8, 8)), W8A8Dynamic())[0]).__name__
        'FakeQuantLinear'
    """
    if not isinstance(model, nn.Module) or is_simulated(model) or isinstance(model, tuple(SIMULATED)):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module that contains float layers")
    if any(is_simulated(module) for module in model.modules()):
        allowed = "a float model (remove_fake_quantize_ takes it out)"
        raise ArgumentError("model", "a model with fake quantisation", allowed)
    check_choice(on_indivisible)
    rules = rules_of(config)
    twins, left = simulating_twins(model, rules, filter_fn, on_indivisible)
    put_in(model, [(site.names, twin) for site, twin in twins], left, "insert_fake_quantize_", rules, filter_fn)
    return model


def put_in(
    model: nn.Module, new: Sequence[tuple[list[str], nn.Module]], left: Iterable[tuple[Site, str]], what: str,
    rules: FqnConfig | None, filter_fn: Filter | None,
) -> None:  # fmt: skip
    """Put new layers into a model, remember why others are left, and warn of what stays (rules None: no word of it)."""
    with undone_on_error() as undo:
        swap_modules(model, new, undo=undo)
        for site, reason in left:
            remember(site.module, reason, undo)
        if rules is not None:
            warn_of_floats(quantization_report(model), wished_floats(model, rules, filter_fn), what, stacklevel=4)


def simulating_twins(
    model: nn.Module, rules: FqnConfig | None, filter_fn: Filter | None, on_indivisible: str
) -> tuple[list[tuple[Site, nn.Module]], list[tuple[Site, str]]]:
    """What a config does to the layers of a float model: (simulating twins; layers left for their size, and why)."""
    sites = list(find_sites(model, tuple(SIMULATED)))
    if not sites:
        raise ArgumentError("model", f"a {type(model).__name__} without layers to quantise", "a model with nn.Linear")
    if rules is None:
        raise ArgumentError("config", "None", "a scheme or mapping of schemes; None only for a simulating model")
    check_keys(rules, model, sites)
    twins, left = [], []
    for site in sites:
        scheme = scheme_of(rules, site, filter_fn)
        if scheme is None or scheme.is_float:
            continue
        name = site.names[0]
        fit, note = fitted(scheme, site.module, on_indivisible, name)
        if fit is None:
            left.append((site, note))
            continue
        make = partial(simulate, scheme=fit)
        twins.append((site, twin_of(site.module, name, lambda old, make=make, note=note: noted(make(old), note))))  # type: ignore[misc]
    return twins, left


def noted(new: nn.Module, note: str) -> nn.Module:
    """A new layer, with why it has another scheme than it was given ('': it has not)."""
    if note and hasattr(new, "note"):
        new.__dict__["note"] = note
    return new


def convert_(model: nn.Module) -> nn.Module:
    """Replace every simulating layer by the layer that runs in integers, in place.

    model  after calibration (SelectiveQuantizer and QuantizationCalibrator) or training (prepare_qat_).
    ->     the model. Codes are those that the simulation rounded to, bit for bit; no calibration is needed.
    Transactional. Raises ArgumentError naming the first layer whose static range was never calibrated, and for a model
    without simulating layers.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> type(convert_(insert_fake_quantize_(nn.Sequential(nn.Linear(8, 8)), W8A8Dynamic()))[0]).__name__
        'QLinear'
    """
    tied = TiedTwins()
    return _replace(model, lambda layer: tied.shared(layer, noted(layer.to_quantized(), layer.note)))


def remove_fake_quantize_(model: nn.Module) -> nn.Module:
    """Take fake quantisation out again: the float layers, around the parameters as they are now, in place."""
    return _replace(model, lambda layer: layer.to_float())


def _replace(model: nn.Module, make: Callable[[Any], nn.Module]) -> nn.Module:
    if not isinstance(model, nn.Module) or is_simulated(model):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module that contains simulating layers")
    sites = list(find_sites(model, tuple(SIMULATED.values())))
    if not sites:
        raise ArgumentError("model", f"a {type(model).__name__} without fake quantisation", "a prepared model")
    swap_modules(model, [(site.names, twin_of(site.module, site.names[0], make)) for site in sites])
    return model


def twin_of(old: nn.Module, name: str, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """make(old), a replacement that runs the old module's hooks; errors name the layer."""
    try:
        new = make(old)
    except PyquantError as error:
        if isinstance(error, ArgumentError):
            raise type(error)(f"{name}: {error.argument}", error.got, error.allowed) from None
        raise
    obstacles.carry_hooks(old, new)
    if origin.has_origin(old):
        origin.remember(new, old)
    return new
