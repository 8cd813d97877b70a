"""Gated feed-forward modules that fuse_ had fused when a model was saved: they are fused again when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from pyquant.errors import CheckpointError
from pyquant.io.pretrained.before import bad_extra
from pyquant.io.pretrained.save import OWN_EXTRA, modules_by_name
from pyquant.nn.gated_feed import GatedFeed, gated, gated_feeds, make_gated
from pyquant.nn.swap import uses_of
from pyquant.nn.undo import Undo


def saved_gates(extra: Mapping[str, Any]) -> list[str]:
    """Names of the modules that were GatedFeeds; none in older files. Raises CheckpointError for anything else."""
    names = extra.get(OWN_EXTRA, {}).get("gated", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise bad_extra("gated is not a list of names")
    return names


def put_gates(model: nn.Module, saved: Iterable[str], undo: list[Undo]) -> None:
    """Make GatedFeeds of modules of a model whose layers are in their places; `undo` receives the steps back."""
    wanted = list(saved)
    lost = [name for name in gated_feeds(model) if name not in wanted]
    if lost:
        raise CheckpointError(f"'{lost[0]}' was fused in the model and not in the file; build the float model anew")
    names, uses = modules_by_name(model), uses_of(model)
    for name in wanted:
        module = names.get(name)
        if isinstance(module, GatedFeed):
            continue
        found = None if module is None else gated(module, uses)
        if module is None or found is None:
            got = "no module" if module is None else f"a {type(module).__name__}"
            raise CheckpointError(f"'{name}' was saved as down(activation(gate(x)) * up(x)); the model has {got} there")
        make_gated(module, found, undo)
