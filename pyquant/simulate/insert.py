"""Put fake quantisation into a model, take it out again, or turn it into integer layers; all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import Any, cast

from torch import nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles, refusals
from pyquant.nn.convert import integer_twin
from pyquant.nn.fates import Fate, LayerScheme, Said, Swap, carry_out, fate_of, said_by, twins_of, wishes_of
from pyquant.nn.indivisible import CHOICES
from pyquant.nn.match import FqnConfig
from pyquant.nn.refusals import check_not_sharded
from pyquant.nn.report import quantization_report
from pyquant.nn.sites import Config, Filter, Site, check_keys, find_sites, rules_of, wished_floats
from pyquant.nn.swap import swap_modules
from pyquant.nn.tell import warn_of_floats
from pyquant.nn.undo import Undo, undone_on_error
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
    arguments.one_of("on_indivisible", on_indivisible, CHOICES)
    rules = rules_of(config, model)
    fates = simulated_fates(model, rules, filter_fn, on_indivisible)
    put_in(model, fates, twins_of(fates, simulated), "insert_fake_quantize_", rules, filter_fn)
    return model


def simulated_fates(
    model: nn.Module, rules: FqnConfig | None, filter_fn: Filter | None, on_indivisible: str
) -> list[Fate]:
    """What a config does to the layers of a float model."""
    sites = list(find_sites(model, tuple(SIMULATED)))
    if not sites and refusals.is_wholly_quantised(model):
        raise refusals.already_quantised(model)
    if not sites:
        raise ArgumentError("model", f"a {type(model).__name__} without layers to quantise", "a model with nn.Linear")
    if rules is None:
        raise ArgumentError("config", "None", "a scheme or mapping of schemes; None only for a simulating model")
    check_keys(rules, model, sites)
    fates = []
    for site in sites:
        said = said_by(rules, site, filter_fn)
        if said.layer is not None and said.layer.scheme.is_float:
            said = Said()  # nothing is rounded
        fates.append(fate_of(site, said, on_indivisible, {}))
    return fates


def simulated(fate: Fate) -> nn.Module:
    """The simulating twin of a float layer; for a 16-bit scheme the 16-bit layer itself, as it rounds nothing."""
    module, layer = fate.site.module, cast(LayerScheme, fate.layer)
    if layer.scheme.is_float:  # a marker computes nothing
        return integer_twin(fate).train(module.training) if isinstance(module, obstacles.KINDS) else module
    new = simulate(module, layer.scheme)
    for tensor, fake in new.fake_quantizers().items():
        fake.method_is_open, fake.learn_amax = tensor in layer.open, tensor in layer.learns
    return new


def put_in(
    model: nn.Module,
    fates: Sequence[Fate],
    twins: Sequence[Swap],
    what: str,
    rules: FqnConfig,
    filter_fn: Filter | None,
) -> None:
    """Put simulating layers into a float model, all or none, and warn of what stays unasked."""
    left = [f"{fate.site.names[0]} {fate.note}" for fate in fates if fate.layer is None and not fate.is_wish]
    if left and not twins:
        got = f"a {type(model).__name__} without a layer to simulate: {'; '.join(left[:3])}"
        raise ArgumentError("model", got, "a model with such layers, besides those")
    with undone_on_error() as undo:
        carry_out(model, fates, twins, undo)
        wished = wishes_of(fates) | wished_floats(model, rules, filter_fn)
        warn_of_floats(quantization_report(model), wished, what, stacklevel=4)


def convert_(model: nn.Module) -> nn.Module:
    """Replace every simulating layer by the layer that runs in integers, in place.

    model  after calibration (SelectiveQuantizer and QuantizationCalibrator) or training (prepare_qat_).
    ->     the model. Codes are those that the simulation rounded to, bit for bit; no calibration is needed.
    Transactional. Raises ArgumentError naming the first layer whose static range was never calibrated, or that was
    pruned since (prune.remove first), and for a model without simulating layers; NonFiniteError naming the layer and
    the place where a weight is not finite.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> type(convert_(insert_fake_quantize_(nn.Sequential(nn.Linear(8, 8)), W8A8Dynamic()))[0]).__name__
        'QLinear'
    """
    return replace_simulating(model, methodcaller("to_quantized"))


def remove_fake_quantize_(model: nn.Module) -> nn.Module:
    """Take fake quantisation out again: the float layers, around the parameters as they are now, in place."""
    return replace_simulating(model, methodcaller("to_float"))


def replace_simulating(model: nn.Module, make: Callable[[Any], nn.Module], undo: list[Undo] | None = None) -> nn.Module:
    """Every simulating layer becomes make(layer). undo receives the steps back, for a caller that may still fail."""
    if not isinstance(model, nn.Module) or is_simulated(model):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module that contains simulating layers")
    check_not_sharded(
        model,
        "take the whole state (torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True) "
        "into a model that is prepared in the same way and not cut, and convert that (docs/qat.md 7)",
    )
    sites = list(find_sites(model, tuple(SIMULATED.values())))
    if not sites:
        raise ArgumentError("model", f"a {type(model).__name__} without fake quantisation", "a prepared model")
    for site in sites:
        check_weights_are_its_own(site)
    fates = simulating_fates(sites)
    swap_modules(model, twins_of(fates, lambda fate: make(fate.site.module)), undo=undo)
    return model


def check_weights_are_its_own(site: Site) -> None:
    """Raise ArgumentError for a simulating layer whose weight or bias a hook computes before each forward, as pruning
    does: what it holds may be older than the last step, and the new layer would run the hook."""
    obstacle = obstacles.computed_by_hook(site.module)
    if obstacle is not None:
        raise ArgumentError("model", f"layer '{site.names[0]}' {obstacle.reason}", obstacle.remedy)


def simulating_fates(sites: Iterable[Site]) -> list[Fate]:
    """Simulating layers, which stay under no circumstances."""
    layers: list[tuple[Site, Any]] = [(site, site.module) for site in sites]
    return [Fate(site, LayerScheme(layer.scheme), layer.note) for site, layer in layers]
