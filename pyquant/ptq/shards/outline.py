"""A model without its numbers: emptied, and the blocks in which they are brought."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pyquant.errors import ArgumentError
from pyquant.io.pretrained.float_weights import FloatWeights
from pyquant.nn.forms import has_form
from pyquant.nn.sites import Owner
from pyquant.ptq.blockwise.drive import Way
from pyquant.ptq.blockwise.find import IsLayer, block_lists
from pyquant.ptq.shards.residence import FromFiles


def empty_(model: nn.Module) -> None:
    """Puts the parameters of a model, and the buffers that files hold, onto the meta device; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, old in module._parameters.items():
            if old is not None and not old.is_meta:
                made.setdefault(id(old), nn.Parameter(torch.empty_like(old, device="meta"), old.requires_grad))
                module._parameters[key] = made[id(old)]
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and key not in module._non_persistent_buffers_set:
                module._buffers[key] = torch.empty_like(buffer, device="meta")


def is_float_layer(module: nn.Module) -> bool:
    """Whether a module of a float model is what blocks are made of."""
    return isinstance(module, (nn.Linear, nn.Conv2d)) or has_form(module)


def blocks_of(model: nn.Module, way: Way, is_layer: IsLayer) -> dict[str, nn.Module]:
    """The blocks of a model by name. Raises ArgumentError where it has none, or they share a parameter."""
    lists = block_lists(model, way.blocks, is_layer)
    blocks = {name: model.get_submodule(name) for names in lists for name in names}
    if not blocks:
        allowed = "a model whose layers stand in a list of blocks; blocks=... names them"
        raise ArgumentError("blocks", f"none in this {type(model).__name__}", allowed)
    owner: dict[int, str] = {}
    for name, block in blocks.items():
        for parameter in block.parameters():
            if owner.setdefault(id(parameter), name) != name:
                raise ArgumentError(
                    "model", f"one parameter in {owner[id(parameter)]} and {name}", "blocks of their own"
                )
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    outer = {id(p) for module in model.modules() if id(module) not in inside for p in module._parameters.values()}
    if shared := [name for key, name in owner.items() if key in outer]:
        raise ArgumentError("model", f"one parameter in {shared[0]} and outside of the blocks", "blocks of their own")
    return blocks


@contextmanager
def settled(
    model: nn.Module,
    weights: FloatWeights,
    blocks: Mapping[str, nn.Module],
    owners: Sequence[Owner] = (),
    facts: str = "",
) -> Iterator[FromFiles]:
    """The residence of a model's blocks; what lies outside of them has its numbers inside, and is empty afterwards."""
    residence = FromFiles(model, weights, owners, facts)
    try:
        residence.settle(blocks)
        yield residence
    finally:
        empty_(model)


def tensors_in(block: nn.Module, name: str, apart: Mapping[str, nn.Module] | None = None) -> dict[str, Tensor]:
    """What of a block's state_dict is in none of these modules of it, by its name in the model."""
    inside = tuple(f"{other}." for other in apart or {})
    state = block.state_dict(prefix=f"{name}." if name else "")
    return {key: t for key, t in state.items() if isinstance(t, Tensor) and not key.startswith(inside)}
