"""Float layers of a model become quantised ones, in place, all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles, origin, refusals, state
from pyquant.nn.forms import has_form
from pyquant.nn.indivisible import check_choice, fitted
from pyquant.nn.keep import kept_layers, remember
from pyquant.nn.own_embedding import like
from pyquant.nn.products import ONLY_ADDED, only_added
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.report import quantization_report
from pyquant.nn.sites import (
    Config,
    Fate,
    Filter,
    Owner,
    Site,
    check_keys,
    fate_of,
    find_owners,
    find_sites,
    rules_of,
    sites_within,
    wished_floats,
)
from pyquant.nn.speed import warn_of_speed
from pyquant.nn.swap import Undo, swap_modules, undone_on_error
from pyquant.nn.tell import warn_of_floats
from pyquant.nn.tied import TiedTwins

Chosen = Sequence[tuple[Site, QScheme]]
Swap = tuple[Sequence[str], nn.Module]
# (model, linear forms that its classes are to be replaced by, layers with their schemes) -> {id of a float layer: its
# quantised twin}, for layers whose twin needs more than the weights; the model must be as before afterwards.
Prepare = Callable[[nn.Module, Sequence[Swap], Chosen], Mapping[int, nn.Module]]


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
    arguments.module("model", model)
    arguments.filter_function(filter_fn)
    arguments.flag("embeddings", embeddings)
    if heads is not None and not isinstance(heads, bool):
        raise ArgumentError("heads", repr(heads)[:80], "True, False or None")
    check_choice(on_indivisible)
    target = None if device is None else state.device_of(device)
    scales = _scales(input_scales)
    rules = rules_of(config)
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d, *((nn.Embedding,) if embeddings else ()))
    if isinstance(model, kinds) or has_form(model):
        raise ArgumentError("model", f"a {type(model).__name__} itself", "a model that contains layers; use from_float")
    owners = find_owners(model)
    sites = [*_outside(find_sites(model, kinds), owners), *sites_within(owners)]
    if not sites:
        raise refusals.no_layers(model)
    check_keys(rules, model, sites)
    kept = kept_layers(model, heads=heads is True)
    fates = [(site, fate_of(rules, site, filter_fn, kept)) for site in sites]
    fits = [(site, *_fit(site, fate, on_indivisible, scales, prepare is not None)) for site, fate in fates]
    chosen = [(site, scheme, note) for site, scheme, note in fits if scheme is not None]
    if not chosen:
        refusals.check_not_double(model, [site.module for site, fate in fates if not fate.is_wish])
    rewritten = {id(site.owner): site.owner for site, _, _ in chosen if site.owner is not None}
    forms: list[Swap] = [(owner.names, owner.form) for owner in rewritten.values()]
    plan = [(site, scheme) for site, scheme, _ in chosen]
    twins = {} if prepare is None else prepare(model, forms, plan)
    _check_scales(scales, [(site, scheme) for site, scheme in plan if id(site.module) not in twins])
    tied = TiedTwins()
    for owner in rewritten.values():
        origin.remember(owner.form, owner.module)
    new = forms + [
        (site.names, _convert(site, scheme, note, scales, target, tied, twins.get(id(site.module))))
        for site, scheme, note in chosen
    ]
    wished = {site.names[0] for site, fate in fates if fate.is_wish}
    wished |= {site.owner.names[0] for site, fate in fates if fate.is_wish and site.owner is not None}
    undo: list[Undo] = []
    swap_modules(model, new, device=target, undo=undo)
    with undone_on_error(undo):  # a warning that the caller made an error is one, too
        for site, scheme, note in fits:
            if scheme is None:
                remember(site.module, note, undo)
                if site.owner is not None:
                    remember(site.owner.module, note, undo)
        for name in set() if check_speed is None or check_speed is False else only_added(model, check_speed):
            if not isinstance(module := model.get_submodule(name), obstacles.KINDS):
                remember(module, ONLY_ADDED, undo)
                wished.add(name)
        wished |= wished_floats(model, rules, filter_fn, embeddings, heads)
        warn_of_floats(quantization_report(model), wished, stacklevel=4)
        warn_of_speed(model, check_speed)
    return model


def _outside(sites: Iterable[Site], owners: Iterable[Owner]) -> list[Site]:
    """The sites that are no part of a module with a linear form, and no such module themselves."""
    inside = {id(module) for owner in owners for module in owner.module.modules()}
    return [site for site in sites if id(site.module) not in inside]


def _fit(
    site: Site, fate: Fate, on_indivisible: str, scales: Mapping[str, float | Tensor], has_data: bool
) -> tuple[QScheme | None, str]:
    """The scheme that a site can have, and a note where that is another one than it was given, or none."""
    if fate.scheme is None:
        return None, fate.reason
    has_scale = has_data or scales.keys() & set(site.names)
    if site.owner is not None and fate.scheme.is_static and not fate.is_named and not has_scale:
        return None, f"a static scheme, and no input scale is given for {site.names[0]}"
    return fitted(fate.scheme, site.module, on_indivisible, site.names[0])


def _convert(
    site: Site, scheme: QScheme, note: str, scales: Mapping[str, float | Tensor], device: torch.device | None,
    tied: TiedTwins, twin: nn.Module | None,
) -> nn.Module:  # fmt: skip
    """The quantised twin of one module: the one that is made already, or a new one."""
    old, name = site.module, site.names[0]
    scale = next((scales[n] for n in site.names if n in scales), None)
    try:
        if twin is not None:
            new: Any = twin
        elif isinstance(old, nn.Embedding):
            new = like(old, QEmbedding.from_float(_on(old, device)))
        else:
            kind: Any = QLinear if isinstance(old, nn.Linear) else QConv2d
            new = kind.from_float(_on(old, device), scheme, input_scale=scale)
    except ArgumentError as error:
        raise type(error)(f"{name}: {error.argument}", error.got, error.allowed) from None
    new.train(old.training)
    origin.remember(new, old)
    if note:
        new.note = note
    obstacles.carry_hooks(old, new)
    return tied.shared(old, new)


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


def _scales(input_scales: object) -> Mapping[str, float | Tensor]:
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


def _check_scales(scales: Mapping[str, float | Tensor], chosen: list[tuple[Site, QScheme]]) -> None:
    static = [one for one in chosen if one[1].is_static and not isinstance(one[0].module, nn.Embedding)]
    without = {site.names[0]: scheme for site, scheme in static if not scales.keys() & set(site.names)}
    if without:
        raise refusals.no_ranges(without, "input_scales" if scales else "data")
    known = {name for site, _ in static for name in site.names}
    unused = [name for name in scales if name not in known]
    if unused:
        got = f"names of no static layer: {', '.join(map(str, unused[:6]))}"
        raise ArgumentError("input_scales", got, ", ".join(sorted(known)[:8]) or "none")
