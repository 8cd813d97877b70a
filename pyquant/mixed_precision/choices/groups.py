"""Groups: the layers of a model that share one format, so that a configuration is a format for every group."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from torch import nn

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.nn import obstacles, refusals
from pyquant.nn.experts import QExperts
from pyquant.nn.sites import Filter, Site, find_sites

# Projections of one input: one kernel quantises it for all of them, and runtimes fuse them into one product.
_TOGETHER: Final = (
    r"(q|k|v)",
    r"(q_proj|k_proj|v_proj)",
    r"(query|key|value)",
    r"(wq|wk|wv)",
    r"(to_q|to_k|to_v)",
    r"(q_lin|k_lin|v_lin)",
    r"(gate_proj|up_proj)",
    r"(w1|w3)",
    r"(wi_0|wi_1)",
)


@dataclass(frozen=True)
class Group:
    """name: of the group; layers: names of its layers, in the order of named_modules."""

    name: str
    layers: tuple[str, ...]


Grouping = str | Mapping[str, str | Sequence[str]]


def find_groups(model: nn.Module, grouping: Grouping = "auto", filter_fn: Filter | None = None) -> tuple[Group, ...]:
    """The groups of a model: every Linear and Conv2d that can be quantised is in exactly one.

    grouping   'auto': projections of the same input (q/k/v, gate/up and their usual names) of one parent share a
               group, as do the same layers of all experts of a bank (after expose_linears_); 'none': every layer is
               alone; a mapping {group name: names or globs of layers}, all other layers being alone. Layers of one
               weight share a group in any case: only together do they need its floats no more.
    filter_fn  filter_fn(module, name) -> bool: layers for which it is false are no choice: they stay as they are.
    ->         groups in the order of their first layer. Layers that quantize_ would leave alone are in none.
    Raises ArgumentError: a model without such layers, a key that matches nothing, a layer in two groups, layers of one
    weight in two groups.

    Example:
        >>> block = nn.ModuleDict({n: nn.Linear(4, 4) for n in ("q_proj", "k_proj", "v_proj", "o_proj")})
        >>> [group.name for group in find_groups(block)]
        ['q_proj+k_proj+v_proj', 'o_proj']
    """
    sites = quantisable(model, filter_fn)
    names = [site.names[0] for site in sites]
    if not names and refusals.is_wholly_quantised(model):
        raise refusals.already_quantised(model)
    if not names:
        refusals.check_not_simulating(model)
        raise ArgumentError("model", f"a {type(model).__name__} without layers to quantise", "a model with nn.Linear")
    if isinstance(grouping, Mapping):
        owner = _given(names, grouping)
    elif grouping == "auto":
        owner = {name: family for name in names if (family := _family(name)) is not None} | _of_banks(model)
    elif grouping == "none":
        owner = {}
    else:
        raise ArgumentError("grouping", repr(grouping), "'auto', 'none', or a mapping {group: names of layers}")
    owner |= _of_one_weight(sites, owner, grouping if isinstance(grouping, Mapping) else ())
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(owner.get(name) or name, []).append(name)
    if isinstance(grouping, Mapping):
        return tuple(Group(group, tuple(layers)) for group, layers in members.items())
    banks = set(_of_banks(model).values())
    return tuple(Group(g if g in banks else _joined(layers), tuple(layers)) for g, layers in members.items())


def quantisable(model: nn.Module, filter_fn: Filter | None = None) -> list[Site]:
    """The layers among which there is a choice, in the order of named_modules."""
    arguments.module("model", model)
    arguments.filter_function(filter_fn)
    if isinstance(model, (nn.Linear, nn.Conv2d)):
        raise ArgumentError("model", f"a {type(model).__name__} itself", "a module that contains layers")
    return [
        site
        for site in find_sites(model, (nn.Linear, nn.Conv2d))
        if obstacles.why_not(site.module, site.parents) is None
        and obstacles.read_by(site.module, site.parents) is None
        and (filter_fn is None or all(filter_fn(site.module, name) for name in site.names))
    ]


def _of_banks(model: nn.Module) -> dict[str, str]:
    """{layer of an expert: 'bank.*.layer'}, for the layers that all experts of a bank have."""
    found: dict[str, str] = {}
    for name, bank in model.named_modules(remove_duplicate=False):
        if isinstance(bank, QExperts):
            at = f"{name}." if name else ""
            for layer in (bank.rule.up, bank.rule.down):
                found |= {f"{at}{e}.{layer}": f"{at}*.{layer}" for e in range(bank.num_experts)}
    return found


def _of_one_weight(sites: Sequence[Site], owner: Mapping[str, str], given: Container[str]) -> dict[str, str]:
    """{layer: group}, in which all layers of a weight are, with all that are in a group with one of them; given: groups
    that the caller named, which keep their names."""
    first: dict[int, str] = {}  # weight -> group
    merged: dict[str, str] = {}  # group -> the one that it became a part of
    groups = {name: owner.get(name) or name for name in (site.names[0] for site in sites)}

    def whole(group: str) -> str:
        while group in merged:
            group = merged[group]
        return group

    for site, group in zip(sites, groups.values(), strict=True):
        one, other = whole(first.setdefault(id(site.module.weight), group)), whole(group)
        if one != other and one in given and other in given:
            raise ArgumentError(f"grouping[{other!r}]", f"{site.names[0]!r}, of one weight with {one!r}", "one group")
        if one != other:
            merged |= {one: other} if other in given else {other: one}
    return {name: whole(group) for name, group in groups.items() if whole(group) != group}


def _family(name: str) -> str | None:
    """A key that the layers share which belong together."""
    parent, _, child = name.rpartition(".")
    for i, pattern in enumerate(_TOGETHER):
        if re.fullmatch(pattern, child):
            return f"{parent}.*{i}"
    return None


def _joined(layers: Sequence[str]) -> str:
    parent, dot, first = layers[0].rpartition(".")
    return parent + dot + "+".join([first, *(name.rpartition(".")[2] for name in layers[1:])])


def _given(names: Sequence[str], grouping: Mapping[str, str | Sequence[str]]) -> dict[str, str]:
    owner: dict[str, str] = {}
    for group, keys in grouping.items():
        for key in [keys] if isinstance(keys, str) else arguments.iterable(f"grouping[{group!r}]", keys, "names"):
            matches = [name for name in names if fnmatchcase(name, key)]
            if not matches:
                raise ArgumentError(f"grouping[{group!r}]", repr(key), f"names or globs of layers: {', '.join(names)}")
            for name in matches:
                if owner.setdefault(name, group) != group:
                    raise ArgumentError(f"grouping[{group!r}]", f"{name!r}, which is in {owner[name]!r}", "one group")
    return owner
