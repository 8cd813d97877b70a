"""Which float layers of a model are meant by a config: every layer once, with all its names, and its scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from pyquant.core.presets import to_scheme
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles
from pyquant.nn.match import FqnConfig, Key

Filter = Callable[[nn.Module, str], bool]
Config = QScheme | str | Callable[[], QScheme] | FqnConfig | Mapping[Key, QScheme | None]


@dataclass
class Site:
    """One float module of the model with every name and parent under which it is reachable."""

    module: nn.Module
    names: list[str] = field(default_factory=list)
    parents: list[nn.Module] = field(default_factory=list)


def find_sites(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[Site]:
    """Distinct modules of the wanted kinds in the order of named_modules, each with all its names."""
    found: dict[int, Site] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if isinstance(module, kinds):
            site = found.setdefault(id(module), Site(module))
            site.names.append(name)
            site.parents.append(modules[name.rpartition(".")[0]])
    return iter(found.values())


def scheme_of(rules: FqnConfig, site: Site, filter_fn: Filter | None) -> QScheme | None:
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


def rules_of(config: object) -> FqnConfig:
    """Any accepted form of a config as an FqnConfig: a scheme, its name or its preset is meant for every layer."""
    config = to_scheme(config)
    if isinstance(config, QScheme):
        return FqnConfig({"_default": config})
    if isinstance(config, FqnConfig):
        return config
    if isinstance(config, Mapping):
        return FqnConfig(config)
    raise ArgumentError(
        "config",
        f"{type(config).__name__} {config!r}"[:120],
        "a QScheme such as W8A8Dynamic(), its name, or a FqnConfig",
    )


def check_keys(rules: FqnConfig, model: nn.Module, sites: Iterable[Site]) -> None:
    """Raise ArgumentError naming every key of the config that covers none of the sites."""
    layers = [(name, site.module) for site in sites for name in site.names]
    known = {name for name, _ in layers}
    others = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if name and name not in known]
    rules.check_used(layers, others)
