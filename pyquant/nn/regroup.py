"""Layers leave the product that merge_ made of them, and come back to it, where they stand in the model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import cast

from torch import nn

from pyquant.nn import merge_rules
from pyquant.nn.merged_linear import Group, MergedLinear, member_kind
from pyquant.nn.qlinear import QLinear

# Layers that were one product once, in the order of their rows. A copy of a model was never one with the original.
_ONCE: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[QLinear]]] = weakref.WeakKeyDictionary()


def separate(member: MergedLinear) -> None:
    """Take a layer out of its group, in place; it has weights of its own then, and the others stay together."""
    others = sorted((m for m in member._group.members if m._place != member._place), key=lambda m: m._place)
    known = _ONCE.get(member) or [weakref.ref(m) for m in sorted((member, *others), key=lambda m: m._place)]
    for layer in (member, *others):
        _ONCE[layer] = known
    member.leave()
    if len(others) == 1:
        others[0].leave()
    elif others:
        _join(others)


def reunite(layer: QLinear) -> None:
    """Make a layer one product again with those that it was one with, in place: all that are as it is now."""
    known = [found for mate in _ONCE.get(layer, ()) if (found := mate()) is not None]
    mates = [m for m in known if m is layer or not (merge_rules.obstacle(m, 1) or merge_rules.unlikeness(layer, m))]
    if len(mates) > 1 and not merge_rules.obstacle(layer, 1):
        _join(mates)


def _join(layers: Sequence[QLinear]) -> None:
    group, kind = Group(layers), cast(type[MergedLinear], member_kind(layers[0]))
    for place, layer in enumerate(layers):
        kind.become(layer, group, place)
