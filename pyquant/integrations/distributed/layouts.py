"""How tensors come into and go out of a layer of which every rank holds a share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from pyquant.core.qtensor import QTensor
from pyquant.errors import ArgumentError, UnsupportedError

# Names of dimensions of a mesh, as torch's and transformers' documents have them.
TENSOR_PARALLEL: Final = "tp"
EXPERT_PARALLEL: Final = "ep"


@dataclass(frozen=True)
class Layouts:
    """What torch's ColwiseParallel and RowwiseParallel are told: the layout of inputs that are no DTensor, that of the
    result, and whether the result is the local tensor or a DTensor."""

    mesh: DeviceMesh
    inputs: Placement
    outputs: Placement
    use_local_output: bool

    @property
    def rank(self) -> int:
        """This rank's place in the mesh."""
        return self.mesh.get_local_rank()

    @property
    def world(self) -> int:
        """How many ranks share the layer."""
        return self.mesh.size()

    @property
    def group(self) -> Any:
        """The process group of the mesh."""
        return self.mesh.get_group()

    def __deepcopy__(self, memo: Any) -> Layouts:
        """A copy of a model talks to the same ranks."""
        return self

    def is_there(self, x: Any, wanted: Placement) -> bool:
        """Whether an input, as enter takes it, lies under the layout that the product wants: the ranks exchange
        nothing."""
        if not isinstance(x, Tensor):
            return True
        held = x.placements[0] if isinstance(x, DTensor) else self.inputs
        return _are_same(held, wanted, x.dim())

    def enter(self, x: Any, wanted: Placement) -> Any:
        """The local part of an input under the layout that the product wants.

        x  a Tensor of the layout `inputs`, a DTensor of any, or a QTensor that has the wanted one already.
        Gradients of a replicated input are summed over the ranks.
        """
        if isinstance(x, QTensor):
            if not _are_same(self.inputs, wanted, x.data.dim()):
                got = f"a QTensor under input_layouts={self.inputs}"
                raise UnsupportedError(f"{got}: codes are not moved between ranks; allowed: {wanted}")
            return x
        if not isinstance(x, Tensor):
            return x  # the layer refuses it
        is_replicated = isinstance(wanted, Replicate)
        is_there = self.is_there(x, wanted)
        if not isinstance(x, DTensor):
            has_gradient = is_replicated and torch.is_grad_enabled() and x.requires_grad
            if is_there and not has_gradient:
                return x
            x = DTensor.from_local(x, self.mesh, [self.inputs], run_check=False)
        elif x.device_mesh != self.mesh:
            got = f"a DTensor on the {described(x.device_mesh)}"
            raise ArgumentError("x", got, f"one on the {described(self.mesh)}, or the local tensor")
        if not is_there:
            x = x.redistribute(placements=[wanted])
        return x.to_local(grad_placements=[Partial()] if is_replicated else None)

    def everywhere(self, y: Tensor, shape: Sequence[int]) -> Tensor:
        """The whole of a tensor [*shape] that lies on the ranks as the result does."""
        if isinstance(self.outputs, Replicate):
            return y
        return self._placed(y, self.outputs, shape).redistribute(placements=[Replicate()]).to_local()

    def leave(self, y: Any, made: Placement, shape: Sequence[int]) -> Any:
        """The result under the layout that was asked for.

        y      this rank's part, under the layout `made`.
        shape  of the whole.
        """
        if isinstance(y, QTensor):
            if not self.use_local_output or not _are_same(made, self.outputs, y.data.dim()):
                got = f"output_layouts={self.outputs}, use_local_output={self.use_local_output} of a layer with codes"
                raise UnsupportedError(f"{got}: they are not moved between ranks; allowed: {made}, True")
            return y
        is_there = _are_same(made, self.outputs, y.dim())
        if is_there and self.use_local_output:
            return y
        y = self._placed(y, made, shape)
        y = y if is_there else y.redistribute(placements=[self.outputs])
        return y.to_local() if self.use_local_output else y

    def _placed(self, y: Tensor, placement: Placement, shape: Sequence[int]) -> DTensor:
        whole = torch.Size(shape)
        strides = torch.empty(whole, dtype=torch.float32, device="meta").stride()
        return DTensor.from_local(y, self.mesh, [placement], run_check=False, shape=whole, stride=strides)


def described(mesh: DeviceMesh) -> str:
    """A mesh in words."""
    names = mesh.mesh_dim_names or ()
    sizes = " x ".join(str(size) for size in mesh.shape)
    return f"mesh of {sizes} ranks ({', '.join(names) or 'no names'})"


def one_dimension(mesh: DeviceMesh, names: Sequence[str] = (TENSOR_PARALLEL,)) -> DeviceMesh:
    """The dimension of a mesh over which layers are cut: its only one, or the first of `names` that it has.

    Raises ArgumentError for a mesh of several dimensions with other names, or none.
    """
    if mesh.ndim == 1:
        return mesh
    name = next((name for name in names if name in (mesh.mesh_dim_names or ())), None)
    if name is None:
        allowed = f"one dimension (mesh['NAME'] of a larger one), or one that is named {' or '.join(map(repr, names))}"
        raise ArgumentError("device_mesh", f"a {described(mesh)}", allowed)
    return mesh[name]


def one_placement(name: str, given: object, default: Placement) -> Placement:
    """A layout as the argument `name` gives it; None: the default. Raises ArgumentError."""
    if given is None:
        return default
    if not isinstance(given, (Shard, Replicate)):
        raise ArgumentError(name, repr(given)[:80], "Shard(dim), Replicate() or None")
    return given


def bounds(size: int, world: int, rank: int) -> tuple[int, int]:
    """Where a rank's share of a dimension begins and ends, as Shard cuts it: ceil(size / world) each, the last fewer.

    Example:
        >>> [bounds(10, 4, rank) for rank in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    each = -(-size // world)
    return min(rank * each, size), min((rank + 1) * each, size)


def is_last(placement: Placement, dims: int) -> bool:
    """Whether a layout cuts the last of so many dimensions."""
    return isinstance(placement, Shard) and placement.dim in (-1, dims - 1)


def _are_same(one: Placement, other: Placement, dims: int) -> bool:
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.dim % max(dims, 1) == other.dim % max(dims, 1)
    return one == other
