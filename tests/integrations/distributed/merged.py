"""Layers that merge_ joined, on ranks: each rank's share of every part, in one product, with the bits of the whole."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accept
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import pyquant
from pyquant import W4A16, QLinear, QScheme, W4A8Dynamic, W8A8Dynamic
from pyquant.integrations.distributed import PyquantColwise, PyquantRowwise, gather_quantized_
from pyquant.integrations.distributed.layer import ColwiseQLinear
from pyquant.integrations.distributed.merged import ColwiseMergedLinear
from pyquant.nn.merged_linear import MergedLinear
from tests.integrations.distributed.layers import K, layer_of, part, rows_of

SIZES = {"q_proj": 52, "k_proj": 20, "v_proj": 18}  # of which 4 ranks get unequal shares
SCHEMES: tuple[QScheme, ...] = (
    W8A8Dynamic(),
    W8A8Dynamic(symmetric_inputs=False),
    pyquant.W8A8(),
    W4A8Dynamic(16),
    pyquant.W4A8TwoLevelDynamic(16),
    W4A16(16),
)


class Attention(nn.Module):
    """Three layers that read one tensor, and one that reads what is made of their results."""

    def __init__(self, scheme: QScheme, seed: int = 0, **words: Any) -> None:
        super().__init__()
        for place, (name, rows) in enumerate(SIZES.items()):
            self.add_module(name, layer_of(scheme, seed + place, n=rows, **words))
        self.o_proj = layer_of(scheme if scheme.inputs is None or scheme.inputs.dynamic else W8A8Dynamic(), 9, k=64)

    def parts(self, x: Tensor) -> list[Tensor]:
        return [self._modules[name](x) for name in SIZES]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        return q[..., :8] + k[..., :1] * v[..., :1]


def mesh_of(world: int) -> Any:
    return init_device_mesh("cpu", (world,))


def plan(**words: Any) -> dict[str, Any]:
    return {name: PyquantColwise(**words) for name in SIZES}


def products(model: nn.Module) -> int:
    """How many products the layers of q, k and v make."""
    layers = [model._modules[name] for name in SIZES]
    return len({id(m._group) if isinstance(m, MergedLinear) else id(m) for m in layers})


def bits(model: nn.Module, x: Tensor, want: list[Tensor], world: int, rank: int) -> None:
    for got, whole in zip(model.parts(x), want, strict=True):
        accept.t1(got, part(whole, world, rank), waiver="a share")


def counted(model: nn.Module) -> list[int]:
    """A list that grows with each product of the group of q."""
    calls: list[int] = []
    whole = model.q_proj._group.whole
    true = type(whole).forward

    def forward(x: Any, residual: Any = None) -> Any:
        calls.append(1)
        return true(whole, x, residual)

    whole.__dict__["forward"] = forward
    return calls


@torch.no_grad()
def both_orders(rank: int, world: int, folder: Path) -> None:
    """merge_ before parallelize_module, and after it: one product, the bits of the whole layers."""
    for scheme in SCHEMES[: None if world == 2 else 2]:
        whole, x = Attention(scheme, activation="relu").eval(), rows_of(1, 3, 5, K)
        want = whole.parts(x)
        before = parallelize_module(pyquant.merge_(copy.deepcopy(whole), x), mesh_of(world), plan())
        after = pyquant.merge_(parallelize_module(copy.deepcopy(whole), mesh_of(world), plan()), x)
        by_name = pyquant.merge_(parallelize_module(copy.deepcopy(whole), mesh_of(world), plan()))
        for model in (before, after, by_name):
            assert products(model) == 1
            assert all(type(model._modules[name]) is ColwiseMergedLinear for name in SIZES)
            calls = counted(model)
            for dtype in (torch.float32, torch.bfloat16):
                bits(model, x.to(dtype), whole.parts(x.to(dtype)), world, rank)
            assert len(calls) == 2
            bits(copy.deepcopy(model), x[:0], whole.parts(x[:0]), world, rank)
            assert "merged" in repr(model.k_proj)
            assert "colwise" in repr(model.k_proj)
            [record] = [r for r in pyquant.merge_report(model) if r.state == "merged"]
            assert record.names == tuple(SIZES)
        with torch.inference_mode():
            bits(before, x.clone(), want, world, rank)
        gather_quantized_(before)
        assert products(before) == 1
        assert type(before.q_proj) is MergedLinear
        for got, one in zip(before.parts(x), want, strict=True):
            accept.t1(got, one)


def rows_of_each(rank: int, world: int, folder: Path) -> None:
    """A rank holds its share of every part, not a slice of what they are together."""
    whole = Attention(W8A8Dynamic()).eval()
    model = parallelize_module(pyquant.merge_(copy.deepcopy(whole)), mesh_of(world), plan())
    held = model.q_proj._group.whole.codes
    accept.t0(held, torch.cat([part(whole._modules[name].codes, world, rank, 0) for name in SIZES]))
    assert [model._modules[name].out_features for name in SIZES] == model.q_proj._group.sizes


@torch.no_grad()
def some_of_them(rank: int, world: int, folder: Path) -> None:
    """Plans that name some of the layers, or others in another way (few heads of keys and values stay whole)."""
    whole, x = Attention(W4A8Dynamic(16)).eval(), rows_of(1, 4, K)
    want = dict(zip(SIZES, whole.parts(x), strict=True))

    def made(styles: dict[str, Any]) -> nn.Module:
        return parallelize_module(pyquant.merge_(copy.deepcopy(whole)), mesh_of(world), styles)

    one = made({"q_proj": PyquantColwise()})
    assert type(one.q_proj) is ColwiseQLinear
    assert products(one) == 2
    assert one.k_proj._group.whole.out_features == SIZES["k_proj"] + SIZES["v_proj"]
    accept.t1(one.q_proj(x), part(want["q_proj"], world, rank), waiver="a share")
    accept.t1(one.k_proj(x), want["k_proj"])
    accept.t1(one.v_proj(x), want["v_proj"])
    two = made({"v_proj": PyquantColwise(), "q_proj": PyquantColwise()})
    assert type(two.k_proj) is QLinear
    assert two.q_proj._group is two.v_proj._group
    assert [two.q_proj._place, two.v_proj._place] == [0, 1]
    for name in ("q_proj", "v_proj"):
        accept.t1(two._modules[name](x), part(want[name], world, rank), waiver="a share")
    accept.t1(two.k_proj(x), want["k_proj"])
    other = made({**plan(), "k_proj": PyquantColwise(output_layouts=Replicate())})
    assert type(other.k_proj) is ColwiseQLinear
    assert products(other) == 2
    accept.t1(other.k_proj(x), want["k_proj"])
    accept.t1(other.v_proj(x), part(want["v_proj"], world, rank), waiver="a share")
    reason = next(r.reason for r in pyquant.merge_report(other) if r.state == "apart")
    assert "layouts" in reason
    row = made({"k_proj": PyquantRowwise(output_layouts=Replicate())})
    accept.t1(row.q_proj(x), want["q_proj"])
    assert row.q_proj._group is row.v_proj._group
    for model in (one, two, other, row):
        gather_quantized_(model)
        assert products(model) == 1
        for name in SIZES:
            accept.t1(model._modules[name](x), want[name])


@torch.no_grad()
def gathered_once(rank: int, world: int, folder: Path) -> None:
    """Inputs that lie on the ranks are put together once for the three, and multiplied once."""
    whole, x = Attention(W8A8Dynamic()).eval(), rows_of(1, 2, 8, K)
    want, mesh = whole.parts(x), mesh_of(world)
    model = parallelize_module(pyquant.merge_(copy.deepcopy(whole)), mesh, plan(input_layouts=Shard(1)))
    calls = counted(model)
    mine = part(x, world, rank, 1)
    for _ in range(2):
        bits(model, mine, want, world, rank)
    assert len(calls) == 2  # what all had asked for is dropped
    bits(model, distribute_tensor(x, mesh, [Shard(1)]), want, world, rank)
    bits(model, distribute_tensor(x, mesh, [Replicate()]), want, world, rank)
    assert len(calls) == 4
    model.q_proj(mine)
    mine.mul_(2)
    accept.t1(model.k_proj(mine), part(whole.k_proj(x * 2), world, rank), waiver="a share")
    local = part(x, world, rank, 1)
    rows, columns = DTensor.from_local(local, mesh, [Shard(0)]), DTensor.from_local(local, mesh, [Shard(1)])
    model.q_proj(rows)  # the same numbers, as what they are not
    accept.t1(model.k_proj(columns), part(want[1], world, rank), waiver="a share")
    with torch.inference_mode():
        bits(model, mine.div(2), want, world, rank)
    out = parallelize_module(
        pyquant.merge_(copy.deepcopy(whole)), mesh, plan(output_layouts=Replicate(), use_local_output=False)
    )
    for got, one in zip(out.parts(x), want, strict=True):
        assert isinstance(got, DTensor)
        accept.t1(got.to_local(), one)


def gradients(rank: int, world: int, folder: Path) -> None:
    whole, x = Attention(W8A8Dynamic()).eval(), rows_of(1, 3, K).requires_grad_()
    model = parallelize_module(pyquant.merge_(copy.deepcopy(whole)), mesh_of(world), plan())
    want = sum(y.square().sum() for y in whole.parts(x))
    want.backward()
    other = x.detach().clone().requires_grad_()
    sum(y.square().sum() for y in model.parts(other)).backward()
    torch.testing.assert_close(other.grad, x.grad, rtol=1e-4, atol=1e-4)
    residual = rows_of(2, 3, SIZES["k_proj"])
    got = model.k_proj(x.detach(), part(residual, world, rank))
    accept.t1(got, part(whole.k_proj(x.detach(), residual), world, rank), waiver="a share")


@torch.no_grad()
def numbers_come_and_go(rank: int, world: int, folder: Path) -> None:
    """state_dict, load_state_dict and checkpoints of merged shares are those of the whole layers."""
    want, x, mesh = Attention(W4A8Dynamic(16)).eval(), rows_of(1, 4, K), mesh_of(world)
    model = parallelize_module(pyquant.merge_(copy.deepcopy(want)), mesh, plan())
    other = pyquant.merge_(parallelize_module(Attention(W4A8Dynamic(16), seed=5).eval(), mesh, plan()))
    for name, tensor in model.state_dict().items():
        held = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(held.as_subclass(Tensor), want.state_dict()[name].as_subclass(Tensor)), name
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "merged")
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder / "merged")
    other.load_state_dict(state["model"])
    bits(other, x, want.parts(x), world, rank)
    third = parallelize_module(pyquant.merge_(Attention(W4A8Dynamic(16), seed=5).eval()), mesh, plan())
    third.q_proj(x)  # a product is kept, and dropped
    third.load_state_dict(want.state_dict())
    bits(third, x, want.parts(x), world, rank)
    whole = Attention(W4A8Dynamic(16), seed=7).eval()
    state = {"model": whole.state_dict()}
    dcp.load(state, checkpoint_id=folder / "merged")
    whole.load_state_dict(state["model"])
    for got, one in zip(whole.parts(x), want.parts(x), strict=True):
        accept.t1(got, one)
    third.to(torch.bfloat16)
    bits(third, x.bfloat16(), copy.deepcopy(want).to(torch.bfloat16).parts(x.bfloat16()), world, rank)
    if world == 2:
        gather_quantized_(other)
        if rank == 0:
            pyquant.save_pretrained(other, folder / "merged own")
            again = pyquant.load_pretrained(folder / "merged own", partial(Floats, 3)).eval()
            for got, one in zip(again.parts(x), want.parts(x), strict=True):
                accept.t1(got, one)


class Floats(Attention):
    """The layers in floating point."""

    def __init__(self, seed: int) -> None:
        nn.Module.__init__(self)
        torch.manual_seed(seed)
        for name, rows in SIZES.items():
            self.add_module(name, nn.Linear(K, rows))
        self.o_proj = nn.Linear(64, 50)


def nothing_is_left(rank: int, world: int, folder: Path) -> None:
    """The codes are held once: neither the product that was, nor a layer that is gone, stays in memory."""
    model = parallelize_module(pyquant.merge_(Attention(W8A8Dynamic()).eval()), mesh_of(world), plan())
    gc.collect()
    bytes_of = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held_by(model)}
    whole = Attention(W8A8Dynamic()).eval()
    limit = sum(m.storage.nbytes for name, m in whole.named_children() if name in SIZES) / world
    assert sum(bytes_of.values()) < limit * 1.3 + 4096, (bytes_of, limit)


def held_by(model: nn.Module) -> list[Tensor]:
    return [
        t for name in SIZES for t in (*model._modules[name]._group.whole.buffers(), *model._modules[name].buffers())
    ]


@torch.no_grad()
def planted(rank: int, world: int, folder: Path) -> None:
    """A rank that took a slice of the concatenation is seen."""
    whole, x = Attention(W8A8Dynamic()).eval(), rows_of(1, 4, K)
    model = parallelize_module(pyquant.merge_(copy.deepcopy(whole)), mesh_of(world), plan())
    product, states = model.q_proj._group.whole, [whole._modules[name]._state() for name in SIZES]
    rows = product.out_features
    begin = min(rank * rows, sum(SIZES.values()) - rows)
    product._fill({n: torch.cat([state[n] for state in states])[begin : begin + rows] for n in states[0]})
    pairs = zip(model.parts(x), whole.parts(x), strict=True)
    seen = torch.tensor(int(any(not torch.equal(got, part(want, world, rank)) for got, want in pairs)))
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    assert seen


CASES: dict[str, Callable[[int, int, Path], None]] = {
    case.__name__: case
    for case in (
        both_orders,
        rows_of_each,
        some_of_them,
        gathered_once,
        gradients,
        numbers_come_and_go,
        nothing_is_left,
        planted,
    )
}
