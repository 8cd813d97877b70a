"""codes_to_parameters_: codes as frozen parameters, which fully_shard cuts and gathers like any other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pyquant.core import arguments
from pyquant.errors import UnsupportedError
from pyquant.integrations.distributed.state import Share
from pyquant.nn.linear_state import LinearState
from pyquant.nn.merged_linear import MergedLinear

_KINDS: dict[type, type] = {}


def codes_to_parameters_(model: nn.Module) -> nn.Module:
    """Let quantised layers hold their codes in a parameter that needs no gradient, so that fully_shard shards them.

    model  nn.Module; call it before fully_shard, on every rank. Of buffers, where codes are otherwise, fully_shard
           leaves a whole copy on each rank.
    ->     the model: the same results and the same state_dict. Scales and bias, a few bytes a row, stay buffers. After
           fully_shard what reads the weights outside of forward (state_dict, load_state_dict, `weight`) puts them
           together from the pieces of all ranks: every rank must do it.
    Raises UnsupportedError for layers that other ranks share, or merge_ joined, before anything is changed.

    Example:
        >>> import pyquant
        >>> model = pyquant.quantize_(nn.Sequential(nn.Linear(8, 4)), "W8A8Dynamic", check_speed=False)
        >>> [name for name, _ in codes_to_parameters_(model).named_parameters()]
        ['0.stand_in', '0.storage']
    """
    layers = [m for m in arguments.module("model", model).modules() if isinstance(m, LinearState)]
    for layer in layers:
        if isinstance(layer, Share):
            raise UnsupportedError(f"codes of {layer.share} as a parameter: fully_shard takes whole layers")
        if isinstance(layer, MergedLinear):
            raise UnsupportedError("codes of a layer that merge_ joined with others: call fully_shard without merge_")
    for layer in layers:
        kind = type(layer)
        if not issubclass(kind, CodesInParameter):
            layer.__class__ = _KINDS.setdefault(kind, type(kind.__name__, (CodesInParameter, kind), {}))
            layer._to_parameter(None)  # type: ignore[operator]
    return model


class CodesInParameter(LinearState):
    """A layer whose `storage` is a parameter. Under fully_shard that is a DTensor between calls, of which each rank
    holds a piece, and whole within them."""

    def _load_from_state_dict(self, *args: Any) -> None:
        self._refuse_gathered()
        super()._load_from_state_dict(*args)

    def _refuse_gathered(self) -> None:
        """Raise UnsupportedError where the parameter is the whole that fully_shard has gathered, and keeps elsewhere in
        pieces: what is written to it is lost."""
        held = self._parameters.get("storage")
        if held is not None and not isinstance(held, DTensor) and held is not self.__dict__.get("_made"):
            raise UnsupportedError(
                "new numbers for codes that fully_shard has gathered for a call: call reshard() of the module that was "
                "sharded first"
            )

    def _fill(self, tensors: Mapping[str, Tensor], *, in_place: bool = False, waits: bool = False) -> None:
        self._refuse_gathered()
        former = {name: self._parameters.get(name) for name in ("storage", "stand_in")}
        super()._fill(tensors, waits=waits)
        if isinstance(former["stand_in"], DTensor):
            self._parameters["stand_in"] = former["stand_in"]
        self._to_parameter(former["storage"])

    def _to_parameter(self, former: Tensor | None) -> None:
        """Take the storage out of the buffers, into the pieces where fully_shard has made such."""
        new = cast(Tensor, self._buffers.pop("storage"))
        self._is_direct, self._how = False, None  # the short ways to ops look among the buffers
        if not isinstance(former, DTensor):
            self._parameters["storage"] = self.__dict__["_made"] = nn.Parameter(new, requires_grad=False)
            return
        if (new.shape, new.dtype, new.device) != (former.shape, former.dtype, former.device):
            raise UnsupportedError(
                f"{new.numel()} bytes of codes on {new.device} for a layer of which fully_shard cut {former.numel()} "
                f"on {former.device}: move the model before fully_shard"
            )
        with torch.no_grad():
            piece = distribute_tensor(new, former.device_mesh, former.placements, src_data_rank=None)
            former.to_local().copy_(piece.to_local())

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Within, the storage is a buffer, put together where it is in pieces."""
        held: Any = self._parameters.pop("storage", None)
        if held is None:  # within already, or within _fill
            yield
            return
        self._buffers["storage"] = held.full_tensor() if isinstance(held, DTensor) else held.detach()
        try:
            yield
        finally:
            self._buffers.pop("storage")
            self._parameters["storage"] = held

    def _canonical(self) -> Tensor:
        with self._whole():
            return super()._canonical()

    def _real(self, dtype: torch.dtype) -> Tensor:
        with self._whole():
            return super()._real(dtype)

    def dequantised_weight(self) -> Tensor:
        """float32 [N, K]: the real weights that the codes stand for."""
        with self._whole():
            return self._form.matrix(self.storage, self.weight_scale_, self.weight_zero_point_)

    @property
    def codes(self) -> Tensor:
        """The weight codes, as LinearState.codes."""
        with self._whole():
            return super().codes

    @property
    def weight(self) -> Tensor:
        """The weight, as LinearState.weight."""
        with self._whole():
            return super().weight
