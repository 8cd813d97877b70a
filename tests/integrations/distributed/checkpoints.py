"""torch.distributed.checkpoint: what any number of ranks saved, any other number loads, to the bit."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accept
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import pyquant
from pyquant.integrations.distributed import PyquantColwise, PyquantRowwise, gather_quantized_

SCHEMES = {
    "per channel": "W8A8Dynamic",
    "groups": "W4A8Dynamic(group_size=16)",
    "two levels": "W4A8TwoLevelDynamic(group_size=16)",
    "zero points": "W4A16(group_size=16, symmetric=False)",
    "16 bits": "FP16",
}


class Net(nn.Module):
    """An embedding, a pair of layers, and a norm that stays in floating point."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(50, 64)
        self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64), nn.LayerNorm(64)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.down(torch.relu(self.up(self.embed(ids)))))


PLAN: dict[str, Callable[[], Any]] = {"embed": PyquantRowwise, "up": PyquantColwise, "down": PyquantRowwise}
IDS = torch.arange(48).view(4, 12)


def net(scheme: str, seed: int = 0) -> nn.Module:
    return copy.deepcopy(_quantised(scheme, seed))


@functools.cache
def _quantised(scheme: str, seed: int) -> nn.Module:
    return pyquant.quantize_(Net(seed), scheme, embeddings=True, check_speed=False).eval()


def shared(model: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(model, mesh, {name: style() for name, style in PLAN.items()})


def same(got: nn.Module, want: nn.Module) -> None:
    for (name, one), other in zip(got.state_dict().items(), want.state_dict().values(), strict=True):
        one, other = one.as_subclass(Tensor), other.as_subclass(Tensor)
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name


def meshes(world: int) -> dict[str, Any]:
    """Every way in which so many processes can share a model."""
    found = {str(world): init_device_mesh("cpu", (world,))}
    if world == 4:
        found["2"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    return found


def reshard(scheme: str, rank: int, world: int, folder: Path) -> None:
    want = net(scheme)
    models = {name: shared(net(scheme), mesh) for name, mesh in meshes(world).items()} | {"1": net(scheme)}
    for saved, source in models.items():
        place = folder / f"dcp {scheme} {saved}"
        dcp.save({"model": source.state_dict()}, checkpoint_id=place)
        for mesh in (*meshes(world).values(), None):
            other = net(scheme, seed=1)
            target = other if mesh is None else shared(other, mesh)
            state = {"model": target.state_dict()}
            dcp.load(state, checkpoint_id=place)
            target.load_state_dict(state["model"])
            if mesh is not None:
                y = target(IDS)
                assert type(target.down).__name__ == "RowwiseQLinear"
                torch.testing.assert_close(y, want(IDS), rtol=1e-4, atol=1e-4)
                gather_quantized_(target)
            same(target, want)
            accept.t1(target(IDS), want(IDS))


def as_torch_advises(rank: int, world: int, folder: Path) -> None:
    """get_model_state_dict and set_model_state_dict, and a model given as it is."""
    want, mesh = net("W4A8Dynamic(group_size=16)"), init_device_mesh("cpu", (world,))
    source = shared(net("W4A8Dynamic(group_size=16)"), mesh)
    full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
    for name, tensor in want.state_dict().items():
        assert torch.equal(full[name].as_subclass(Tensor), tensor.as_subclass(Tensor)), name
    assert isinstance(source.state_dict()["up.weight_packed"], DTensor)
    dcp.save(get_model_state_dict(source), checkpoint_id=folder / "advised")
    target = shared(net("W4A8Dynamic(group_size=16)", seed=1), mesh)
    state = get_model_state_dict(target)
    dcp.load(state, checkpoint_id=folder / "advised")
    set_model_state_dict(target, state)
    same(gather_quantized_(target), want)
    stateful = shared(net("W4A8Dynamic(group_size=16)", seed=2), mesh)
    dcp.save({"model": source}, checkpoint_id=folder / "stateful")
    dcp.load({"model": stateful}, checkpoint_id=folder / "stateful")
    same(gather_quantized_(stateful), want)
    plain = shared(net("W4A8Dynamic(group_size=16)", seed=3), mesh)
    plain.load_state_dict(want.state_dict())
    same(gather_quantized_(plain), want)


def small_files(rank: int, world: int, folder: Path) -> None:
    """Every rank writes its own share of the codes, and no more."""
    source = shared(net("W8A8Dynamic"), init_device_mesh("cpu", (world,)))
    dcp.save({"model": source.state_dict()}, checkpoint_id=folder / "sizes")
    dist.barrier()
    sizes = [file.stat().st_size for file in (folder / "sizes").glob("*.distcp")]
    codes = 50 * 64 + 2 * 64 * 128
    assert len(sizes) == world
    assert max(sizes) > codes / world
    assert math.fsum(sizes) < 2 * codes + 12000 * world


def saved_whole(rank: int, world: int, folder: Path) -> None:
    """pyquant's own directory, by way of gather_quantized_."""
    want = net("W4A8TwoLevelDynamic(group_size=16)")
    model = shared(copy.deepcopy(want), init_device_mesh("cpu", (world,)))
    gather_quantized_(model)
    if rank == 0:
        pyquant.save_pretrained(model, folder / "own")
    dist.barrier()
    again = pyquant.load_pretrained(folder / "own", lambda: Net(3)).eval()
    accept.t1(again(IDS), want(IDS))


CASES: dict[str, Callable[[int, int, Path], None]] = {
    **{f"reshard {name}": partial(reshard, scheme) for name, scheme in SCHEMES.items()},
    **{case.__name__: case for case in (as_torch_advises, small_files, saved_whole)},
}
