"""The state of a layer of which every rank holds a share: cut, shown as DTensors, loaded, and put together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from pyquant.errors import ArgumentError
from pyquant.integrations.distributed.layouts import Layouts, bounds
from pyquant.nn.linear_state import LinearState

Placements = Mapping[str, int]  # tensor of a state -> the dimension that is cut; every rank has the others whole


def placement_of(placements: Placements, name: str) -> Placement:
    """How one tensor of a state lies on the ranks."""
    return Shard(placements[name]) if name in placements else Replicate()


def cut(state: Mapping[str, Tensor], layouts: Layouts, placements: Placements, source: int | None) -> dict[str, Tensor]:
    """This rank's share of a whole state.

    source  the rank whose numbers all take, as torch's styles do; None: each its own.
    """
    parts = {}
    for name, tensor in state.items():
        placed = distribute_tensor(tensor, layouts.mesh, [placement_of(placements, name)], src_data_rank=source)
        parts[name] = placed.to_local().contiguous().clone()
    return parts


class Share(LinearState):
    """What the layers of this package add to a LinearState: names of their tensors mean the whole."""

    _layouts: Layouts
    _placements: Placements
    _whole_shapes: Mapping[str, tuple[int, ...]]

    def _become(self, layouts: Layouts, placements: Placements, whole: Mapping[str, Tensor], share: str) -> None:
        self.__dict__["_layouts"], self.__dict__["_placements"] = layouts, dict(placements)
        self.__dict__["_whole_shapes"] = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        self.share = share

    def whole_state(self) -> dict[str, Tensor]:
        """Every tensor of the whole layer, on every rank; all ranks must ask."""
        return {name: self._placed(name, tensor).full_tensor() for name, tensor in self._state().items()}

    def _placed(self, name: str, tensor: Tensor) -> DTensor:
        """A tensor of the state as what it is of the whole."""
        shape = self._whole_shapes.get(name, tuple(tensor.shape))  # what was added since is the same everywhere
        strides = torch.empty(shape, dtype=torch.float32, device="meta").stride()
        where = [placement_of(self._placements, name)]
        plain = tensor.as_subclass(Tensor)
        return DTensor.from_local(
            plain, self._layouts.mesh, where, run_check=False, shape=torch.Size(shape), stride=strides
        )

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.state_slots:
            if prefix + name in destination:
                destination[prefix + name] = self._placed(name, destination[prefix + name])

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        mine = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        error_msgs: list[str] = rest[-1]
        try:
            for name in self.state_slots:
                if isinstance(mine.get(prefix + name), Tensor):
                    mine[prefix + name] = self._my_part(name, mine[prefix + name])
        except ArgumentError as error:
            error_msgs.append(f"{prefix or type(self).__name__}: {error}")
            return
        super()._load_from_state_dict(mine, prefix, *rest)

    def _my_part(self, name: str, given: Tensor) -> Tensor:
        """This rank's share of a tensor that is given whole, or as a DTensor of any layout."""
        where = placement_of(self._placements, name)
        if tuple(given.shape) != self._whole_shapes.get(name, tuple(given.shape)):
            raise ArgumentError(name, f"{list(given.shape)}", f"{list(self._whole_shapes[name])}, of the whole layer")
        if isinstance(given, DTensor):
            if given.device_mesh == self._layouts.mesh:
                return given.redistribute(placements=[where]).to_local()
            given = given.full_tensor()
        if not isinstance(where, Shard):
            return given
        begin, end = bounds(given.shape[where.dim], self._layouts.world, self._layouts.rank)
        return given.narrow(where.dim, begin, end - begin).contiguous()
