"""quantize_from_shards_: a quantised model of the state of one whose float parameters the ranks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.io.foreign.tensors import Span
from pyquant.io.pretrained.float_weights import FloatWeights
from pyquant.io.pretrained.from_floats import Reading, read_and_quantise
from pyquant.nn.sites import Config, Filter
from pyquant.nn.state import device_of


def quantize_from_shards_(
    model: nn.Module,
    state: Mapping[str, Tensor],
    config: Config,
    filter_fn: Filter | None = None,
    *,
    embeddings: bool = False,
    heads: bool | None = None,
    on_indivisible: str = "per_channel",
    device: torch.device | str | None = None,
) -> nn.Module:
    """quantize_ of a float model that fully_shard has cut, whose groups cannot let go of their parameters: in another
    model of the same code, in place, on every rank.

    model   as its code builds it; its weights are not used, so it belongs on the meta device.
    state   state_dict() of the float model, names as in `model`: DTensors of any layout, and ordinary tensors.
    config, filter_fn, embeddings, heads, on_indivisible   as in quantize_, schemes with dynamic or float inputs.
    device  where layers are quantised, and the model is at the end; None: the CPU.
    ->      the model, whole on every rank, equal to the bit to quantize_ of the whole float model: each weight is put
            together on every rank in turn, quantised, and let go. codes_to_parameters_ and fully_shard cut it again.
    Raises what quantize_checkpoint_ raises. On an error the model is as before.

    Example:
        >>> whole = nn.Sequential(nn.Linear(8, 4))
        >>> with torch.device("meta"):
        ...     empty = nn.Sequential(nn.Linear(8, 4))
        >>> type(quantize_from_shards_(empty, whole.state_dict(), "W8A8Dynamic")[0]).__name__
        'QLinear'
    """
    arguments.module("model", model)
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise ArgumentError("state", arguments.shown(state), "a mapping of tensors by name: float_model.state_dict()")
    target = None if device is None else device_of(device)
    weights = FloatWeights(model, _Shards(state), mapping=[])
    if weights.unused:
        raise ArgumentError("state", f"tensors {', '.join(weights.unused)}", f"those of {type(model).__name__} alone")
    options = {"embeddings": embeddings, "heads": heads, "on_indivisible": on_indivisible}
    read_and_quantise(model, Reading(weights, lambda _: target), config, filter_fn, options, target)
    return model


class _Shards:
    """Tensors of a state as FloatWeights reads those of files; all ranks read them in the same order."""

    directory = Path("state")

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def span(self, name: str) -> Span:
        return Span(self._state[name].dtype, tuple(self._state[name].shape), 0)

    def read(self, name: str) -> Tensor:
        held: Any = self._state[name].detach()
        whole: Tensor = held.full_tensor() if isinstance(held, DTensor) else held
        return whole.to("cpu", copy=True)
