"""quantize_: float layers of a model become quantised ones, in place, all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, PyquantError
from pyquant.nn import obstacles, state
from pyquant.nn.match import FqnConfig
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.swap import swap_modules

Filter = Callable[[nn.Module, str], bool]


@dataclass
class Site:
    """One float module of the model with every name and parent under which it is reachable."""

    module: nn.Module
    names: list[str] = field(default_factory=list)
    parents: list[nn.Module] = field(default_factory=list)


def quantize_(
    model: nn.Module,
    config: QScheme | FqnConfig | Mapping[str | type, QScheme | None],
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    *,
    embeddings: bool = False,
    input_scales: Mapping[str, float | Tensor] | None = None,
) -> nn.Module:
    """Replace the Linear layers of a model by QLinear, in place.

    model         nn.Module that contains nn.Linear layers (not itself one); weights float32, float16 or bfloat16.
    config        a QScheme for all, or FqnConfig (or its mapping): names, globs, 're:' patterns, types -> scheme.
    filter_fn     filter_fn(module, name) -> bool: layers for which it is false are left alone; None: all.
    device        where the new layers are made and, at the end, the whole model is moved; None: stay.
    embeddings    also replace nn.Embedding by QEmbedding (int8 per row whatever the scheme; None leaves one alone).
    input_scales  {layer name: real size of one input code} for static schemes.
    ->            the model. Weights are max-calibrated; shared modules stay shared; hooks and training flags are kept.
    Transactional: on any exception the model is as before. The output projection of nn.MultiheadAttention stays in
    floating point (its parent reads the weight and never calls the layer): see quantization_report.
    Raises ArgumentError or SchemeError naming the layer: keys that match nothing, layers that cannot be converted, a
    group size that does not divide, a missing or unused input scale.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> type(quantize_(model, W8A8Dynamic(), filter_fn=lambda m, name: name != "2")[0]).__name__
        'QLinear'
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", type(model).__name__, "a torch.nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        raise ArgumentError("filter_fn", type(filter_fn).__name__, "a function (module, name) -> bool, or None")
    target = None if device is None else state.device_of(device)
    scales = _scales(input_scales)
    rules = FqnConfig({"_default": config}) if isinstance(config, QScheme) else _rules(config)
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding) if embeddings else (nn.Linear,)
    if isinstance(model, kinds):
        raise ArgumentError(
            "model", f"a {type(model).__name__} itself", "a module that contains layers; use from_float"
        )
    sites = list(_sites(model, kinds))
    if not sites:
        raise ArgumentError(
            "model", f"a {type(model).__name__} without nn.Linear layers", "a model with layers to convert"
        )
    _check_keys(rules, model, sites)
    chosen = [(site, scheme) for site in sites if (scheme := _scheme(rules, site, filter_fn)) is not None]
    _check_scales(scales, chosen)
    made: dict[tuple[Any, ...], nn.Module] = {}
    new = [(site.names, _convert(site, scheme, scales, target, made)) for site, scheme in chosen]
    swap_modules(model, new, device=target)
    return model


def _sites(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[Site]:
    """Distinct modules of the wanted kinds in the order of named_modules, each with all its names."""
    found: dict[int, Site] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if isinstance(module, kinds):
            site = found.setdefault(id(module), Site(module))
            site.names.append(name)
            site.parents.append(modules[name.rpartition(".")[0]])
    return iter(found.values())


def _scheme(rules: FqnConfig, site: Site, filter_fn: Filter | None) -> QScheme | None:
    """The scheme of one module, None to leave it alone; raises where its names disagree or it cannot be converted."""
    wanted = [name for name in site.names if filter_fn is None or filter_fn(site.module, name)]
    if not wanted:
        return None
    decisions = [rules.decide(name, site.module) for name in wanted]
    schemes = [None if decision is None else decision.scheme for decision in decisions]
    if len(wanted) != len(site.names) or any(scheme != schemes[0] for scheme in schemes):
        named = [d for d in decisions if d is not None and d.kind != "default"]
        if len({d.scheme for d in named}) > 1 or len(wanted) != len(site.names):
            told = ", ".join(f"{n}: {s}" for n, s in zip(wanted, schemes, strict=True))
            raise ArgumentError(
                "config", f"one shared layer under several names ({told})", "the same scheme for all its names"
            )
        schemes = [named[0].scheme]
    if schemes[0] is None:
        return None
    why_not = obstacles.why_not(site.module, site.parents)
    if why_not is None:
        return schemes[0]
    if why_not.is_usual and not any(d is not None and d.kind == "name" for d in decisions):
        return None
    raise ArgumentError("model", f"layer '{wanted[0]}' {why_not.reason}", why_not.remedy)


def _convert(
    site: Site, scheme: QScheme, scales: Mapping[str, float | Tensor], device: torch.device | None,
    made: dict[tuple[Any, ...], nn.Module],
) -> nn.Module:  # fmt: skip
    """The quantised twin of one module. Modules that share weight and bias share their twin."""
    old, name = site.module, site.names[0]
    scale = next((scales[n] for n in site.names if n in scales), None)
    bias = getattr(old, "bias", None)
    key = (type(old), id(old.weight), id(bias), scheme, None if scale is None else float(scale))
    if key in made and not obstacles.has_hooks(old):
        return made[key]
    try:
        if isinstance(old, nn.Embedding):
            new: nn.Module = QEmbedding.from_float(_on(old, device))
        elif isinstance(old, nn.Linear):
            new = QLinear.from_float(_on(old, device), scheme, input_scale=scale)
    except PyquantError as error:
        if isinstance(error, ArgumentError):
            raise type(error)(f"{name}: {error.argument}", error.got, error.allowed) from None
        raise
    new.train(old.training)
    obstacles.carry_hooks(old, new)
    made[key] = new
    return new


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


def _rules(config: object) -> FqnConfig:
    if isinstance(config, FqnConfig):
        return config
    if isinstance(config, Mapping):
        return FqnConfig(config)
    raise ArgumentError(
        "config", f"{type(config).__name__} {config!r}"[:120], "a QScheme such as W8A8Dynamic(), or a FqnConfig"
    )


def _scales(input_scales: object) -> Mapping[str, float | Tensor]:
    if input_scales is None:
        return {}
    if not isinstance(input_scales, Mapping):
        raise ArgumentError("input_scales", type(input_scales).__name__, "a mapping {layer name: scale}")
    for name, scale in input_scales.items():
        if isinstance(scale, Tensor) and scale.numel() != 1:
            raise ArgumentError(f"input_scales[{name!r}]", f"{list(scale.shape)}", "one number")
        if (
            not isinstance(scale, (int, float, Tensor))
            or isinstance(scale, bool)
            or not 0 < float(scale) < float("inf")
        ):
            raise ArgumentError(f"input_scales[{name!r}]", repr(scale), "a finite number above 0")
    return input_scales


def _check_keys(rules: FqnConfig, model: nn.Module, sites: Iterable[Site]) -> None:
    layers = [(name, site.module) for site in sites for name in site.names]
    known = {name for name, _ in layers}
    others = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if name and name not in known]
    rules.check_used(layers, others)


def _check_scales(scales: Mapping[str, float | Tensor], chosen: list[tuple[Site, QScheme]]) -> None:
    static = [site for site, scheme in chosen if scheme.is_static and isinstance(site.module, nn.Linear)]
    without = [site.names[0] for site in static if not any(name in scales for name in site.names)]
    if without:
        more = f" and {len(without) - 6} more" if len(without) > 6 else ""
        got = f"nothing for {', '.join(without[:6])}{more}"
        raise ArgumentError(
            "input_scales", got, "a scale for every layer with static inputs; dynamic schemes need none"
        )
    known = {name for site in static for name in site.names}
    unused = [name for name in scales if name not in known]
    if unused:
        raise ArgumentError(
            "input_scales",
            f"names of no static layer: {', '.join(map(str, unused[:6]))}",
            ", ".join(sorted(known)[:8]) or "none",
        )
