"""Modules that others hold a second time, where nn.Module does not look: in lists, tuples, dicts, plain attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from torch import nn

from pyquant.nn.undo import Undo, put

_OF_TORCH: Final = frozenset(nn.Module().__dict__)  # registered members and hooks
_DEEPEST, _LONGEST = 4, 4096  # a vocabulary that a module holds is no list of layers


def exchange_listed(modules: Iterable[nn.Module], new: Mapping[int, nn.Module], undo: list[Undo]) -> None:
    """Put new modules also where a module holds the old ones beside its registered members.

    MaskFormer's heads call their layers from a list, and register them under names beside it: they would go on calling
    the old ones.

    modules   those whose attributes are looked through; pyquant's own look after theirs.
    new       {id of the module that goes: what comes in its place}.
    undo      gets the steps that take it back.
    """
    for module in modules:
        if type(module).__module__.partition(".")[0] == "pyquant":
            continue
        for name, value in list(module.__dict__.items()):
            if name in _OF_TORCH:
                continue
            exchanged = _exchanged(value, new, undo, 0)
            if exchanged is not value:
                put(module.__dict__, name, exchanged, undo)


def _exchanged(value: Any, new: Mapping[int, nn.Module], undo: list[Undo], depth: int) -> Any:
    """The value with new modules: lists and dicts are changed as they stand, others made anew where they hold one."""
    if isinstance(value, nn.Module):
        return new.get(id(value), value)
    if depth == _DEEPEST or not isinstance(value, (list, tuple, dict)) or len(value) > _LONGEST:
        return value
    places = list(value.items() if isinstance(value, dict) else enumerate(value))
    changed = [(place, was, now) for place, was in places if (now := _exchanged(was, new, undo, depth + 1)) is not was]
    if not changed:
        return value
    if type(value) is tuple:
        now_at = {place: now for place, _, now in changed}
        return tuple(now_at.get(place, was) for place, was in places)
    if isinstance(value, tuple):  # of names, or of somebody's own making
        return value
    for place, was, now in changed:
        undo.append(partial(value.__setitem__, place, was))
        value[place] = now
    return value


def listed_as_it_is(module: nn.Module) -> list[Undo]:
    """Steps that give the lists and dicts of a module the modules back that they hold now."""
    steps: list[Undo] = []
    for name, value in module.__dict__.items():
        if name not in _OF_TORCH:
            _remember(value, steps, 0)
    return steps


def _remember(value: Any, steps: list[Undo], depth: int) -> None:
    if depth == _DEEPEST or not isinstance(value, (list, tuple, dict)) or len(value) > _LONGEST:
        return
    for place, held in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if not isinstance(held, nn.Module):
            _remember(held, steps, depth + 1)
        elif not isinstance(value, tuple):
            steps.append(partial(value.__setitem__, place, held))
