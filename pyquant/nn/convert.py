"""quantize_: float layers of a model become quantised ones, in place, all of them or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError, PyquantError
from pyquant.nn import obstacles, state
from pyquant.nn.match import FqnConfig
from pyquant.nn.patches import Patches
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear
from pyquant.nn.sites import Filter, Site, check_keys, find_sites, rules_of, scheme_of
from pyquant.nn.swap import swap_modules


def quantize_(
    model: nn.Module,
    config: QScheme | str | Callable[[], QScheme] | FqnConfig | Mapping[str | type, QScheme | None],
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    *,
    embeddings: bool = False,
    input_scales: Mapping[str, float | Tensor] | None = None,
) -> nn.Module:
    """Replace the Linear and Conv2d layers of a model by QLinear and QConv2d, in place.

    model         nn.Module that contains nn.Linear or nn.Conv2d layers (not itself one); weights float32, float16 or
                  bfloat16.
    config        a QScheme for all, its name ('W8A8Dynamic', 'W4A16(group_size=64)') or its preset (W8A8Dynamic), or
                  FqnConfig (or its mapping): names, globs, 're:' patterns, types -> scheme.
    filter_fn     filter_fn(module, name) -> bool: layers for which it is false are left alone; None: all.
    device        where the new layers are made and, at the end, the whole model is moved; None: stay.
    embeddings    also replace nn.Embedding by QEmbedding (int8 per row whatever the scheme; None leaves one alone).
    input_scales  {layer name: real size of one input code} for static schemes.
    ->            the model. Weights are max-calibrated; shared modules stay shared; hooks and training flags are kept.
    Transactional: on any exception the model is as before. The output projection of nn.MultiheadAttention stays in
    floating point (its parent reads the weight and never calls the layer), and so do convolutions with groups or
    another padding than zeros, unless they are named: see quantization_report.
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
    rules = rules_of(config)
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d, *((nn.Embedding,) if embeddings else ()))
    if isinstance(model, kinds):
        raise ArgumentError(
            "model", f"a {type(model).__name__} itself", "a module that contains layers; use from_float"
        )
    sites = list(find_sites(model, kinds))
    if not sites:
        raise ArgumentError(
            "model", f"a {type(model).__name__} without nn.Linear or nn.Conv2d layers", "a model with layers to convert"
        )
    check_keys(rules, model, sites)
    chosen = [(site, scheme) for site in sites if (scheme := scheme_of(rules, site, filter_fn)) is not None]
    _check_scales(scales, chosen)
    made: dict[tuple[Any, ...], nn.Module] = {}
    new = [(site.names, _convert(site, scheme, scales, target, made)) for site, scheme in chosen]
    swap_modules(model, new, device=target)
    return model


def _convert(
    site: Site, scheme: QScheme, scales: Mapping[str, float | Tensor], device: torch.device | None,
    made: dict[tuple[Any, ...], nn.Module],
) -> nn.Module:  # fmt: skip
    """The quantised twin of one module. Modules that share weight and bias share their twin."""
    old, name = site.module, site.names[0]
    scale = next((scales[n] for n in site.names if n in scales), None)
    bias = getattr(old, "bias", None)
    shape = Patches.of(old) if isinstance(old, nn.Conv2d) else None
    key = (type(old), id(old.weight), id(bias), shape, scheme, None if scale is None else float(scale))
    if key in made and not obstacles.has_hooks(old):
        return made[key]
    try:
        if isinstance(old, nn.Embedding):
            new: nn.Module = QEmbedding.from_float(_on(old, device))
        elif isinstance(old, nn.Linear):
            new = QLinear.from_float(_on(old, device), scheme, input_scale=scale)
        elif isinstance(old, nn.Conv2d):
            new = QConv2d.from_float(_on(old, device), scheme, input_scale=scale)
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


def _check_scales(scales: Mapping[str, float | Tensor], chosen: list[tuple[Site, QScheme]]) -> None:
    static = [site for site, scheme in chosen if scheme.is_static and not isinstance(site.module, nn.Embedding)]
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
