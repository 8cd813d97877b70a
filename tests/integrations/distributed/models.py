"""Whole models on ranks: a transformer's block, FSDP2, models that are sharded in floating point."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import accept
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pyquant
from pyquant.errors import UnsupportedError
from pyquant.integrations.distributed import (
    PyquantColwise,
    PyquantRowwise,
    codes_to_parameters_,
    quantize_from_shards_,
    quantize_sharded_,
)

SCHEMES = ("W8A8Dynamic", "W8A8Dynamic(symmetric_inputs=False)", "W4A8Dynamic(group_size=16)", "W4A16(group_size=16)")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))


def blocks(scheme: str, seed: int = 0) -> nn.Module:
    return copy.deepcopy(_quantised(scheme, seed))


@functools.cache
def _quantised(scheme: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64)) for _ in range(2)]
    model = nn.Sequential(*layers)
    data = [X] if pyquant.scheme_from_name(scheme).is_static else None
    return pyquant.quantize_(model, scheme, data=data, check_speed=False).eval()


def bytes_here(model: nn.Module) -> int:
    held = [*model.parameters(), *model.buffers()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in held]
    return sum(t.numel() * t.element_size() for t in local)


def sharded(model: nn.Module) -> nn.Module:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def fsdp(rank: int, world: int, folder: Path) -> None:
    for scheme in ("W8A8", "W4A8Dynamic(group_size=16)", "W4A16(group_size=16)", "FP16")[: None if world == 2 else 2]:
        whole, buffers = blocks(scheme), sharded(blocks(scheme))
        codes = sum(m.storage.nbytes for m in whole.modules() if isinstance(m, pyquant.QLinear))
        model = sharded(codes_to_parameters_(blocks(scheme)))
        with torch.no_grad():
            for _ in range(2):
                accept.t1(model(X), whole(X))
                accept.t1(buffers(X), whole(X))
        model[0].reshard(), model[1].reshard()
        assert bytes_here(buffers) >= codes  # whole, on every rank
        assert bytes_here(model) - (bytes_here(buffers) - codes) <= -(-codes // world) + 64
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        for name, tensor in whole.state_dict().items():
            if rank == 0:
                assert torch.equal(state[name].as_subclass(Tensor), tensor.as_subclass(Tensor)), name
        x = X.clone().requires_grad_()
        model(x).sum().backward()
        y = X.clone().requires_grad_()
        whole(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        accept.t0(model[0][0].codes, whole[0][0].codes) if not scheme.startswith("FP16") else None


def fsdp_checkpoints(rank: int, world: int, folder: Path) -> None:
    whole, scheme = blocks("W4A8Dynamic(group_size=16)"), "W4A8Dynamic(group_size=16)"
    model, place = sharded(codes_to_parameters_(blocks(scheme))), folder / "fsdp"
    dcp.save({"model": model.state_dict()}, checkpoint_id=place)
    for other in (sharded(codes_to_parameters_(blocks(scheme, 1))), blocks(scheme, 1)):
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=place)
        other.load_state_dict(state["model"])
        with torch.no_grad():
            accept.t1(other(X), whole(X))

    gathered = fully_shard(codes_to_parameters_(blocks(scheme, 1)))  # one group, which the root keeps after a call
    with torch.no_grad():
        gathered(X)
    with pytest.raises(UnsupportedError, match="reshard"):
        gathered.load_state_dict(whole.state_dict())
    gathered.reshard()
    gathered.load_state_dict(fully_shard(codes_to_parameters_(blocks(scheme))).state_dict())
    with torch.no_grad():
        accept.t1(gathered(X), whole(X))
        accept.t1(copy.deepcopy(codes_to_parameters_(copy.deepcopy(whole)))(X), whole(X))
    whole_again = codes_to_parameters_(blocks(scheme, 1))
    whole_again.load_state_dict(whole.state_dict())
    accept.t1(whole_again.to(torch.bfloat16).to(torch.float32)(X), whole(X))


def fsdp_refused(rank: int, world: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    share = parallelize_module(blocks("W8A8Dynamic"), mesh, {"0.0": PyquantColwise()})
    with pytest.raises(UnsupportedError, match="colwise"):
        codes_to_parameters_(share)


class Head(nn.Module):
    """An embedding that a head is tied to, a pair of layers and one that nobody cuts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.up, self.down = nn.Embedding(48, 64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.alone, self.lm_head = nn.Linear(64, 64), nn.Linear(64, 48, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.alone(self.down(torch.relu(self.up(self.embed(ids))))))


IDS = torch.arange(48).view(4, 12)


def quantised_when_cut(rank: int, world: int, folder: Path) -> None:
    """quantize_sharded_ gives what quantize_ before parallelize_module gives, for every calibrator of weights."""
    mesh = init_device_mesh("cpu", (world,))
    theirs = {"up": ColwiseParallel(), "down": RowwiseParallel(), "embed": RowwiseParallel(input_layouts=Replicate())}
    ours = {"up": PyquantColwise(), "down": PyquantRowwise(), "embed": PyquantRowwise()}
    sequence = {"up": ColwiseParallel(input_layouts=Replicate()), "down": RowwiseParallel(output_layouts=Shard(1))}
    for scheme in SCHEMES:
        for embeddings in (False, True):
            before = pyquant.quantize_(Head(0), scheme, embeddings=embeddings, heads=embeddings, check_speed=False)
            plan = ours if embeddings else {name: ours[name] for name in ("up", "down")}
            parallelize_module(before, mesh, plan)
            after = Head(0)
            parallelize_module(after, mesh, theirs if embeddings else {n: theirs[n] for n in ("up", "down")})
            with pytest.raises(UnsupportedError, match="quantize_sharded_"):
                pyquant.quantize_(after, scheme)
            quantize_sharded_(after, scheme, embeddings=embeddings, heads=embeddings)
            assert [type(m).__name__ for m in after.modules()] == [type(m).__name__ for m in before.modules()]
            for name, tensor in before.state_dict().items():
                other = after.state_dict()[name]
                pair = [t.to_local() if isinstance(t, DTensor) else t.as_subclass(Tensor) for t in (tensor, other)]
                assert torch.equal(*pair), name
            got, want = after(IDS), before(IDS)
            if scheme.startswith("W8"):
                accept.t1(got, want)
            else:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    scattered = parallelize_module(Head(0), mesh, sequence)
    whole = pyquant.quantize_(Head(0), "W8A8Dynamic", check_speed=False)
    quantize_sharded_(scattered, "W8A8Dynamic", filter_fn=lambda m, name: name != "up")
    assert isinstance(scattered.up.weight, DTensor)
    assert type(scattered.up) is nn.Linear
    quantize_sharded_(scattered, "W8A8Dynamic", filter_fn=lambda m, name: name == "up")
    hidden = torch.relu(whole.up(whole.embed(IDS)))
    begin = slice(rank * 12 // world, (rank + 1) * 12 // world)
    accept.t1(scattered.down(torch.relu(scattered.up(scattered.embed(IDS)))), whole.down(hidden)[:, begin].contiguous())


def cut_refused(rank: int, world: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world,))
    cut = parallelize_module(Head(0), mesh, {"up": ColwiseParallel()})
    before = [(name, id(m)) for name, m in cut.named_modules()]
    with pytest.raises(UnsupportedError, match="'up': a static scheme"):
        quantize_sharded_(cut, {"up": pyquant.W8A8()})
    assert [(name, id(m)) for name, m in cut.named_modules()] == before
    with pytest.raises(UnsupportedError, match="quantize_from_shards_"):
        quantize_sharded_(fully_shard(Head(0)), "W8A8Dynamic")
    with pytest.raises(UnsupportedError, match="fully_shard"):
        pyquant.quantize_(fully_shard(Head(0)), "W8A8Dynamic")


def quantised_from_shards(rank: int, world: int, folder: Path) -> None:
    """Of a float model that FSDP2 trained, and of one that is cut by columns and rows: the codes of the whole one."""
    mesh = init_device_mesh("cpu", (world,))
    trained = fully_shard(Head(0))
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    trained(IDS).square().mean().backward()
    optimizer.step()
    state = get_model_state_dict(trained, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    gathered = [state if rank == 0 else None]
    torch.distributed.broadcast_object_list(gathered)
    cut = parallelize_module(Head(0), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for scheme in ("W8A8Dynamic", "W4A16(group_size=16)"):
        for source, numbers in ((trained, gathered[0]), (cut, Head(0).state_dict())):
            whole = Head(0)
            whole.load_state_dict(numbers)
            pyquant.quantize_(whole, scheme, embeddings=True, heads=True, check_speed=False)
            with torch.device("meta"):
                model = Head(0)
            quantize_from_shards_(model, source.state_dict(), scheme, embeddings=True, heads=True)
            for name, tensor in whole.state_dict().items():
                assert torch.equal(model.state_dict()[name].as_subclass(Tensor), tensor.as_subclass(Tensor)), name
            assert {type(m).__name__ for m in model.children()} == {"QLinear", "QEmbedding"}
            model = fully_shard(codes_to_parameters_(model))
            with torch.no_grad():
                accept.t1(model(IDS), whole(IDS))
    assert all(isinstance(p, DTensor) for p in trained.parameters())  # it is as it was
    with torch.device("meta"):
        model = Head(0)
    part = {name: tensor for name, tensor in trained.state_dict().items() if name != "up.weight"}
    for state, match in (
        (part, "up.weight, which the model has"),
        ({**trained.state_dict(), "more": IDS}, "tensors more"),
        ({**part, "up.weight": torch.zeros(3, 64)}, r"\[128, 64\], as in the model"),
    ):
        with pytest.raises(pyquant.PyquantError, match=match):
            quantize_from_shards_(model, state, "W8A8Dynamic")
    with pytest.raises(pyquant.ArgumentError, match="static input ranges"):
        quantize_from_shards_(model, trained.state_dict(), "W8A8")
    assert all(p.is_meta for p in model.parameters())


CASES: dict[str, Callable[[int, int, Path], None]] = {
    case.__name__: case
    for case in (fsdp, fsdp_checkpoints, fsdp_refused, quantised_when_cut, quantised_from_shards, cut_refused)
}
