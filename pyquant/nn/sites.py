"""Which float layers of a model are meant by a config: every layer once, with all its names, and its scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from pyquant.core.presets import to_scheme
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles, origin
from pyquant.nn.forms import form_of, has_form, linears_of
from pyquant.nn.keep import output_heads
from pyquant.nn.match import FqnConfig, Key
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.swap import distinct

Filter = Callable[[nn.Module, str], bool]
Config = QScheme | str | Callable[[], QScheme] | FqnConfig | Mapping[Key, QScheme | None]


@dataclass
class Site:
    """One float module of the model with every name and parent under which it is reachable."""

    module: nn.Module
    names: list[str] = field(default_factory=list)
    parents: list[nn.Module] = field(default_factory=list)
    owner: Owner | None = None  # in whose linear form this one is


@dataclass
class Owner:
    """A module that has a linear form (pyquant.nn.forms), all its names, and the form."""

    module: nn.Module
    names: list[str]
    form: nn.Module


def find_owners(model: nn.Module) -> list[Owner]:
    """Distinct modules with a linear form in the order of named_modules, and not those inside of others."""
    owners: dict[int, Owner] = {}
    inside: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in inside or not has_form(module):
            continue
        if id(module) not in owners:
            owners[id(module)] = Owner(module, [], form_of(module))
            origin.remember(owners[id(module)].form, module)
            inside |= {id(child) for child in module.modules() if child is not module}
        owners[id(module)].names.append(name)
    return list(owners.values())


def sites_within(owners: Iterable[Owner]) -> Iterator[Site]:
    """The Linears of linear forms as sites, under the names that they will have."""
    for owner in owners:
        sites: dict[int, Site] = {}
        for name in owner.names:
            for inner, linear in linears_of(name, owner.form):
                sites.setdefault(id(linear), Site(linear, [], [owner.form], owner)).names.append(inner)
        yield from sites.values()


def find_all_sites(model: nn.Module, kinds: tuple[type[nn.Module], ...], owners: Sequence[Owner]) -> list[Site]:
    """The sites of a model outside of modules with a linear form, and those in the forms, in the model's order."""
    inside = {id(module) for owner in owners for module in owner.module.modules()}
    sites = [site for site in find_sites(model, kinds) if id(site.module) not in inside]
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted([*sites, *sites_within(owners)], key=lambda site: order[(site.owner or site).names[0]])


def find_sites(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[Site]:
    """Distinct modules of the wanted kinds in the order of named_modules, each with all its names."""
    found = distinct(model, lambda _, module: isinstance(module, kinds) and not isinstance(module, QEmbedding))
    for names, module in found:
        yield Site(module, names, [model.get_submodule(name.rpartition(".")[0]) for name in names])


_LONGEST_NAME: Final = 256


def rules_of(config: object, model: nn.Module) -> FqnConfig:
    """Any accepted form of a config as an FqnConfig for a model: a scheme, its name or its preset is meant for every
    layer."""
    config = to_scheme(config)
    if isinstance(config, QScheme):
        return FqnConfig({"_default": config})
    if isinstance(config, Mapping):
        config = FqnConfig(config)
    if isinstance(config, FqnConfig):
        return config.of_model(model)
    got = f"{type(config).__name__} {config!r}"[:120]
    raise ArgumentError("config", got, "a QScheme such as W8A8Dynamic(), its name, or a FqnConfig")


def check_keys(rules: FqnConfig, model: nn.Module, sites: Iterable[Site]) -> None:
    """Raise ArgumentError naming every key of the config that covers none of the sites."""
    sites = list(sites)
    check_names(name for site in sites for name in site.names)
    holders: list[Site | Owner] = [*sites, *(site.owner for site in sites if site.owner is not None)]
    layers = [(name, holder.module) for holder in holders for name in holder.names]
    known = {name for name, _ in layers}
    others = [(name, m) for name, m in model.named_modules(remove_duplicate=False) if name and name not in known]
    rules.check_used(layers, others)


def check_names(names: Iterable[str]) -> None:
    """Raise ArgumentError for a name that no checkpoint could hold, before work is done on the model."""
    for name in names:
        if not name.isprintable() or len(name) > _LONGEST_NAME:
            allowed = f"up to {_LONGEST_NAME} printable characters, as in files: rename the module"
            raise ArgumentError("model", f"a layer called {name[:80]!r}", allowed)


def wished_floats(
    model: nn.Module, rules: FqnConfig, filter_fn: Filter | None, embeddings: bool = False, heads: bool | None = None
) -> set[str]:
    """Names that the arguments leave in floating point, in addition to the layers that config or filter exclude."""
    left_heads = {id(head) for head in output_heads(model)} if heads is False else set()

    def is_left(name: str, module: nn.Module) -> bool:
        decision = rules.decide(name, module)
        is_excluded = decision is None or decision.scheme is None or decision.scheme.is_float
        is_lookup = isinstance(module, nn.Embedding) and not embeddings
        # with a filter layers are chosen by hand, and it is asked about layers only
        is_no_layer = filter_fn is not None and not isinstance(module, obstacles.KINDS)
        return is_excluded or is_lookup or is_no_layer or id(module) in left_heads

    return {name for name, module in model.named_modules() if is_left(name, module)}
