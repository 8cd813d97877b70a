"""Meshes of two dimensions: along one the ranks have other rows, along the other they hold shares of layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accept
import pytest
import torch
import torch.distributed.checkpoint as dcp
from expert_banks import Bank, register_banks, routing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import pyquant
from pyquant.errors import ArgumentError
from pyquant.integrations.distributed import (
    PyquantColwise,
    PyquantExpertParallel,
    PyquantRowwise,
    gather_quantized_,
)
from tests.integrations.distributed.layers import part

register_banks()
PLAN: dict[str, Callable[[], Any]] = {
    "gate_proj": PyquantColwise,
    "up_proj": PyquantColwise,
    "down_proj": PyquantRowwise,
    "table": PyquantRowwise,
    "plain": lambda: PyquantColwise(output_layouts=Replicate()),
    "experts": PyquantExpertParallel,
}


class Net(nn.Module):
    """A table, a gated pair that merge_ joins, a bank of experts, and a layer that stays in floating point."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(40, 32)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.experts: Any = Bank(4, 32, 48)
        self.norm, self.plain = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = self.down_proj(self.gate_proj(x).relu() * self.up_proj(x))
        return self.plain(self.norm(self.experts(x, *routing(x.shape[0], 4, 2))))


def net(scheme: str = "W8A8Dynamic", seed: int = 0) -> Net:
    model = pyquant.quantize_(
        Net(seed), scheme, lambda m, name: name != "plain", embeddings=True, check_speed=False
    ).eval()
    return pyquant.merge_(model)  # type: ignore[return-value]


def grid(world: int, *names: str) -> Any:
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=names or None)


def rows_of_group(mesh: Any) -> Tensor:
    """Other indices for each data parallel group, of another number of rows."""
    group = mesh.get_local_rank(0)
    return torch.arange(7 + group) * (3 + group) % 40


def near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # behind a float layer that is cut


@torch.no_grad()
def two_dimensions(rank: int, world: int, folder: Path) -> None:
    """A whole plan on the mesh of two dimensions, as on the one of its dimension 'tp'."""
    for names in (("dp", "tp"), ("replicate", "tp")):
        mesh, whole = grid(world, *names), net()
        model = parallelize_module(net(), mesh, {name: style() for name, style in PLAN.items()})
        other = parallelize_module(net(), mesh["tp"], {name: style() for name, style in PLAN.items()})
        ids = rows_of_group(mesh)
        assert torch.equal(model(ids), other(ids))
        near(model(ids), whole(ids))
        assert "over 2 ranks" in repr(model.down_proj)
        assert model.gate_proj._group is model.up_proj._group
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(mesh.get_local_rank(0)))
        accept.t1(model.up_proj(x), part(whole.up_proj(x), 2, mesh.get_local_rank("tp")))
        accept.t1(model.experts(x, *routing(5, 4, 2)), whole.experts(x, *routing(5, 4, 2)))
    turned = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("tp", "dp"))
    accept.t1(
        parallelize_module(net(), turned, {"down_proj": PyquantRowwise(input_layouts=Replicate())}).down_proj(
            torch.ones(2, 64)
        ),
        whole.down_proj(torch.ones(2, 64)),
    )


@torch.no_grad()
def experts_have_a_name(rank: int, world: int, folder: Path) -> None:
    mesh, whole = grid(world, "tp", "ep"), net()
    bank = parallelize_module(net(), mesh, {"experts": PyquantExpertParallel()}).experts
    assert len(bank.here) == 2
    assert bank.here[0] == 2 * mesh.get_local_rank("ep")
    case = torch.randn(5, 32, generator=torch.Generator().manual_seed(mesh.get_local_rank("tp"))), *routing(5, 4, 2)
    accept.t1(bank(*case), whole.experts(*case))


@torch.no_grad()
def with_fsdp(rank: int, world: int, folder: Path) -> None:
    """fully_shard over the other dimension: float parameters are cut there, shares of codes are as they are."""
    mesh, whole = grid(world, "dp", "tp"), net()
    model = parallelize_module(net(), mesh, {name: style() for name, style in PLAN.items()})
    fully_shard(model, mesh=mesh["dp"])
    ids = rows_of_group(mesh)
    for _ in range(2):
        near(model(ids), whole(ids))
    model.reshard()
    assert isinstance(model.norm.weight, DTensor)


@torch.no_grad()
def checkpoints(rank: int, world: int, folder: Path) -> None:
    """Saved from a mesh of two dimensions, read by all ways to share a model, and by one process."""
    mesh, whole = grid(world, "dp", "tp"), net("W4A8Dynamic(group_size=16)")
    plan = {name: style for name, style in PLAN.items() if name != "plain"}  # what torch cuts is torch's to save
    source = parallelize_module(copy.deepcopy(whole), mesh, {name: style() for name, style in plan.items()})
    dcp.save({"model": source.state_dict()}, checkpoint_id=folder / "grid")
    line = init_device_mesh("cpu", (world,))
    for where in (mesh, line, None):
        other = net("W4A8Dynamic(group_size=16)", seed=1)
        if where is not None:
            parallelize_module(other, where, {name: style() for name, style in plan.items()})
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder / "grid")
        other.load_state_dict(state["model"])
        gather_quantized_(other)
        ids = rows_of_group(mesh)
        accept.t1(other(ids), whole(ids))


def gradients(rank: int, world: int, folder: Path) -> None:
    mesh, whole = grid(world, "dp", "tp"), net()
    model = parallelize_module(net(), mesh, {name: style() for name, style in PLAN.items() if name != "plain"})
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))

    def grad(net: Any) -> Tensor | None:
        a = x.clone().requires_grad_()
        net.down_proj(net.gate_proj(a).relu() * net.up_proj(a)).square().sum().backward()
        return a.grad

    torch.testing.assert_close(grad(model), grad(whole), rtol=1e-4, atol=1e-4)


def refused(rank: int, world: int, folder: Path) -> None:
    """Other names, none, and inputs that lie on another mesh."""
    shape = rf"mesh of {world // 2} x 2 ranks"
    for style in (PyquantColwise(), PyquantRowwise()):
        for name in ("up_proj", "plain"):
            with pytest.raises(ArgumentError, match=rf"device_mesh.*{shape} \(dp, model\).*'tp'"):
                parallelize_module(net(), grid(world, "dp", "model"), {name: style})
            with pytest.raises(ArgumentError, match=rf"{shape} \(no names\)"):
                parallelize_module(net(), grid(world), {name: style})
    with pytest.raises(ArgumentError, match="'ep' or 'tp'"):
        parallelize_module(net(), grid(world, "dp", "model"), {"experts": PyquantExpertParallel()})
    mesh = grid(world, "dp", "tp")
    model = parallelize_module(net(), mesh, {"up_proj": PyquantColwise(), "down_proj": PyquantRowwise()})
    for layer, wide in ((model.up_proj, 32), (model.down_proj, 64)):
        x = distribute_tensor(torch.ones(4, wide), mesh, [Shard(0), Replicate()])
        with pytest.raises(ArgumentError, match=rf"x.*{shape} \(dp, tp\).*2 ranks \(tp\)"):
            layer(x)


CASES: dict[str, Callable[[int, int, Path], None]] = {
    case.__name__: case for case in (two_dimensions, experts_have_a_name, with_fsdp, checkpoints, gradients, refused)
}
