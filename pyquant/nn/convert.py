"""Float layers of a model become quantised ones, in place, all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles, refusals, state
from pyquant.nn.fates import Fate, LayerScheme, carry_out, fate_of, said_by, stays_without, twins_of, wishes_of
from pyquant.nn.forms import has_form
from pyquant.nn.indivisible import CHOICES
from pyquant.nn.keep import kept_layers, remember
from pyquant.nn.match import FqnConfig
from pyquant.nn.own_embedding import like
from pyquant.nn.products import ONLY_ADDED, only_added
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.report import quantization_report
from pyquant.nn.sites import Config, Filter, check_keys, find_all_sites, find_owners, rules_of, wished_floats
from pyquant.nn.speed import warn_of_speed
from pyquant.nn.tell import warn_of_floats
from pyquant.nn.undo import undone_on_error

Scales = Mapping[str, float | Tensor]
# (model, fates of its layers) -> {id of a float layer: its quantised twin}, for layers whose twin needs more than the
# weights; the model must be as before afterwards.
Prepare = Callable[[nn.Module, Sequence[Fate]], Mapping[int, nn.Module]]


def prepared(prepare: Prepare, model: nn.Module, fates: Sequence[Fate]) -> dict[int, nn.Module]:
    """What `prepare` made. Raises ArgumentError for what is no function, and for one that gave no mapping."""
    form = "{id of a float layer: its quantised twin}"
    made = arguments.function("prepare", prepare, f"(model, fates) -> {form}", optional=False)(model, fates)
    if not isinstance(made, Mapping):
        raise ArgumentError("prepare", f"a function that gave {arguments.shown(made)}", f"one that gives {form}")
    return dict(made)


def quantize_layers_(
    model: nn.Module,
    config: Config,
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    *,
    embeddings: bool = False,
    heads: bool | None = None,
    on_indivisible: str = "per_channel",
    input_scales: Mapping[str, float | Tensor] | None = None,
    check_speed: object = None,
    prepare: Prepare | None = None,
) -> nn.Module:
    """The part of quantize_ that needs no data, whose arguments these are.

    prepare  makes the twins of static layers, from data.
    """
    target = None if device is None else state.device_of(device)
    scales = _scales(input_scales)
    options: dict[str, Any] = {"embeddings": embeddings, "heads": heads, "on_indivisible": on_indivisible}
    rules, fates = fates_in(model, config, filter_fn, **options)
    if prepare is None:
        fates = [stays_without(fate, scales, "a static scheme, and no input scale is given") for fate in fates]
    if all(fate.layer is None for fate in fates):
        refusals.check_not_double(model, [fate.site.module for fate in fates if not fate.is_wish])
    made = {} if prepare is None else prepared(prepare, model, fates)
    _check_scales(scales, [fate for fate in fates if id(fate.site.module) not in made])

    def quantised(fate: Fate) -> nn.Module:
        old = fate.site.module
        return (made.get(id(old)) or integer_twin(fate, scales, target)).train(old.training)

    with undone_on_error() as undo:  # a warning that the caller made an error is one, too
        carry_out(model, fates, twins_of(fates, quantised), undo, target)
        wished = wishes_of(fates) | wished_floats(model, rules, filter_fn, embeddings, heads)
        for name in set() if check_speed is None or check_speed is False else only_added(model, check_speed):
            if not isinstance(module := model.get_submodule(name), obstacles.KINDS):
                remember(module, ONLY_ADDED, undo)
                wished.add(name)
        warn_of_floats(quantization_report(model), wished, stacklevel=4)
        warn_of_speed(model, check_speed)
    return model


def fates_in(
    model: nn.Module,
    config: Config,
    filter_fn: Filter | None = None,
    *,
    embeddings: bool = False,
    heads: bool | None = None,
    on_indivisible: str = "per_channel",
) -> tuple[FqnConfig, list[Fate]]:
    """What a config says, and what it means for every layer; the model stays as it is, and may be on the meta device.

    Arguments and errors as in quantize_.
    """
    arguments.module("model", model)
    arguments.filter_function(filter_fn)
    arguments.flag("embeddings", embeddings)
    if heads is not None and not isinstance(heads, bool):
        raise ArgumentError("heads", repr(heads)[:80], "True, False or None")
    arguments.one_of("on_indivisible", on_indivisible, CHOICES)
    rules = rules_of(config, model)
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d, *((nn.Embedding,) if embeddings else ()))
    if isinstance(model, kinds) or has_form(model):
        raise ArgumentError("model", f"a {type(model).__name__} itself", "a model that contains layers; use from_float")
    sites = find_all_sites(model, kinds, find_owners(model))
    if not sites:
        raise refusals.no_layers(model)
    check_keys(rules, model, sites)
    kept = kept_layers(model, heads=heads is True)
    said = [said_by(rules, site, filter_fn) for site in sites]
    meant = [site.module for site, what in zip(sites, said, strict=True) if what.layer is not None]
    refusals.check_not_simulating(model, meant)
    refusals.check_no_foreign_codes(model, meant)
    fates = [fate_of(site, what, on_indivisible, kept) for site, what in zip(sites, said, strict=True)]
    return rules, fates


def _scale(fate: Fate, scales: Scales) -> float | Tensor | None:
    return next((scales[name] for name in fate.site.names if name in scales), None)


def integer_twin(fate: Fate, scales: Scales = MappingProxyType({}), device: torch.device | None = None) -> nn.Module:
    """The quantised twin of a float layer, on the device (None: where the layer is)."""
    old: Any = _on(fate.site.module, device)
    if isinstance(old, nn.Embedding):
        return like(cast(nn.Embedding, fate.site.module), QEmbedding.from_float(old))
    scheme = cast(LayerScheme, fate.layer).scheme
    kind: Any = QLinear if isinstance(old, nn.Linear) else QConv2d
    return cast(nn.Module, kind.from_float(old, scheme, input_scale=_scale(fate, scales)))


def _on(module: Any, device: torch.device | None) -> Any:
    """The module itself, or a shallow twin whose tensors are on the device; the original is not touched."""
    if device is None or module.weight.device == device:
        return module
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin._parameters = {
        name: None if p is None else nn.Parameter(p.detach().to(device), requires_grad=False)
        for name, p in module._parameters.items()
    }
    return twin


def _scales(input_scales: object) -> Scales:
    if input_scales is None:
        return {}
    if not isinstance(input_scales, Mapping):
        raise ArgumentError("input_scales", type(input_scales).__name__, "a mapping {layer name: scale}")
    for name, scale in input_scales.items():
        if isinstance(scale, Tensor) and scale.numel() != 1:
            raise ArgumentError(f"input_scales[{name!r}]", f"{list(scale.shape)}", "one number")
        is_number = isinstance(scale, (int, float, Tensor)) and not isinstance(scale, bool)
        if not is_number or not 0 < float(scale) < float("inf"):
            raise ArgumentError(f"input_scales[{name!r}]", repr(scale), "a finite number above 0")
    return input_scales


def _check_scales(scales: Scales, fates: Iterable[Fate]) -> None:
    layers = [(fate, fate.layer.scheme) for fate in fates if fate.layer is not None]
    static = [one for one in layers if one[1].is_static and not isinstance(one[0].site.module, nn.Embedding)]
    without = {fate.site.names[0]: scheme for fate, scheme in static if _scale(fate, scales) is None}
    if without:
        raise refusals.no_ranges(without, "input_scales" if scales else "data")
    known = {name for fate, _ in static for name in fate.site.names}
    unused = [name for name in scales if name not in known]
    if unused:
        got = f"names of no static layer: {', '.join(map(str, unused[:6]))}"
        raise ArgumentError("input_scales", got, ", ".join(sorted(known)[:8]) or "none")
