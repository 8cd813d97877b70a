"""Banks of experts of which ranks hold some: the bits of the whole bank, whatever the routing, scheme and layout."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accept
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expert_banks import Bank, Biased, Interleaved, register_banks, routing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import pyquant
from pyquant import QExperts
from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.integrations.distributed import (
    PyquantColwise,
    PyquantExpertParallel,
    PyquantRowwise,
    experts,
    gather_quantized_,
)
from pyquant.integrations.distributed.experts import SharedQExperts
from tests.integrations.distributed.layers import part

register_banks()
E, H = 6, 32  # experts that 4 ranks hold in unequal shares
MIXED = {"*.4.*": pyquant.W8A16(), "*.1.down_proj": None, "_default": pyquant.W4A8Dynamic(16)}
SCHEMES: tuple[Any, ...] = ("W8A8Dynamic", "W4A8Dynamic(group_size=16)", "W4A16(group_size=16)", "FP16", MIXED)

SHAPES = ((1, 1, torch.float32), (9, 3, torch.bfloat16), (40, 4, torch.float16), (0, 2, torch.float32))


def mesh_of(world: int) -> Any:
    return init_device_mesh("cpu", (world,))


class Block(nn.Module):
    """A bank as transformers writes it, and what is beside it."""

    def __init__(self, kind: type[Bank] = Bank, seed: int = 1, number: int = E, **words: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.experts: Any = kind(number, H, 48, **words)
        self.dense = nn.Linear(H, H)


def block(scheme: Any = "W8A8Dynamic", kind: type[Bank] = Bank, seed: int = 1, **words: Any) -> Block:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pyquant.quantize_(Block(kind, seed, **words), scheme, check_speed=False).eval()  # type: ignore[return-value]


def cut(model: Block, world: int, **words: Any) -> Block:
    parallelize_module(model, mesh_of(world), {"experts": PyquantExpertParallel(**words)})
    assert type(model.experts) is SharedQExperts
    return model


def tokens(seed: int, number: int, dtype: torch.dtype = torch.float32, slots: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(number, H, generator=torch.Generator().manual_seed(seed)).to(dtype)
    ids, weights = routing(number, E, slots, seed)
    return x, ids, weights


def bits(rank: int, world: int, folder: Path) -> None:
    """All schemes, mixed ones too; routings that leave ranks without a token; every type."""
    for scheme in SCHEMES[: None if world == 2 else 2]:
        for kind in (Bank, Biased, Interleaved):
            whole = block(scheme, kind)
            model = cut(copy.deepcopy(whole), world)
            assert len([name for name in model.experts._modules if name.isdigit()]) in {E // world, -(-E // world)}
            for number, slots, dtype in SHAPES:
                dtype = torch.float32 if scheme is MIXED else dtype  # that of its float layer
                x, ids, weights = tokens(number, number, dtype, slots)
                with torch.no_grad():
                    accept.t1(model.experts(x, ids, weights), whole.experts(x, ids, weights))
                    ids = torch.full_like(ids, E - 1)  # all tokens to one expert
                    accept.t1(model.experts(x, ids.int(), weights), whole.experts(x, ids.int(), weights))
            assert "over" in repr(model)


@torch.no_grad()
def signs_of_zero(rank: int, world: int, folder: Path) -> None:
    """Experts on no rank add nothing, and zeros keep their signs."""
    whole = block()
    model = cut(copy.deepcopy(whole), world)
    x, ids, weights = tokens(3, 8)
    x[:4] = 0
    ids[1], ids[2, 0], ids[5] = -1, E, E + 7
    for w in (weights, -weights):
        got, want = model.experts(x, ids, w), whole.experts(x, ids, w)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    small = Block()
    with torch.no_grad():
        small.experts.down_proj.mul_(1e-7)
    tiny: Any = pyquant.quantize_(small, "W8A8Dynamic", check_speed=False).eval()
    case = tokens(15, 8, torch.float16, slots=1)
    got, want = cut(copy.deepcopy(tiny), world).experts(*case), tiny.experts(*case)
    assert bool((want.view(torch.int16) == -(2**15)).any()), "some results are -0"
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    x[6, 3], x[7, 0] = math.nan, math.inf
    got = model.experts(x, ids, weights)
    accept.t1(got, whole.experts(x, ids, weights))
    assert int(got.isnan().all(-1).sum()) == 2


@torch.no_grad()
def layouts(rank: int, world: int, folder: Path) -> None:
    """Tokens and results in every layout; tokens without experts."""
    whole, mesh = block(), mesh_of(world)
    x, ids, weights = tokens(4, 8)
    want, mine = whole.experts(x, ids, weights), [part(t, world, rank, 0) for t in (x, ids, weights)]
    accept.t1(cut(block(), world, output_layouts=Shard(0)).experts(x, ids, weights), part(want, world, rank, 0))
    accept.t1(cut(block(), world, output_layouts=Shard(-1)).experts(x, ids, weights), part(want, world, rank))
    both = cut(block(), world, input_layouts=Shard(0), output_layouts=Shard(0))
    accept.t1(both.experts(*mine), part(want, world, rank, 0))
    placed = cut(block(), world, use_local_output=False)
    got = placed.experts(*(distribute_tensor(t, mesh, [Shard(0)]) for t in (x, ids, weights)))
    assert isinstance(got, DTensor)
    accept.t1(got.full_tensor(), want)
    assert not cut(block(), world).experts(x, ids[:, :0], weights[:, :0]).any()
    odd = cut(block(), world, output_layouts=Shard(0))
    x, ids, weights = tokens(5, 7)
    accept.t1(odd.experts(x, ids, weights), part(whole.experts(x, ids, weights), world, rank, 0))


@torch.no_grad()
def not_routed(rank: int, world: int, folder: Path) -> None:
    """Llama-4's way: as many rows for each expert, sorted by expert."""

    class Even(Bank):
        def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
            return hidden_states

    pyquant.register_experts(Even, pyquant.ExpertsRule(is_routed=False))
    whole = block("W8A8Dynamic", Even)
    x = torch.randn(E * 4, H, generator=torch.Generator().manual_seed(6))
    want = whole.experts(x)
    accept.t1(cut(copy.deepcopy(whole), world).experts(x), want)
    accept.t1(cut(copy.deepcopy(whole), world, output_layouts=Shard(0)).experts(x), part(want, world, rank, 0))
    with pytest.raises(ArgumentError, match=f"as many rows for {E}"):
        cut(copy.deepcopy(whole), world).experts(x[1:])


def gradients(rank: int, world: int, folder: Path) -> None:
    whole = block()
    x, ids, weights = tokens(7, 12)
    factor = torch.linspace(-1, 1, 12 * H).view(12, H)

    def grads(bank: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        a, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        (bank(a, ids, w) * factor).sum().backward()
        return a.grad, w.grad

    want = grads(whole.experts, factor)
    torch.testing.assert_close(grads(cut(block(), world).experts, factor), want, rtol=1e-5, atol=1e-5)
    floats = cut(block({"experts.0.*": None, "_default": "W8A8Dynamic"}), world)  # one that is trained, on one rank
    w = weights.clone().requires_grad_()
    floats.experts(x, ids, w).sum().backward()
    assert w.grad is not None
    scattered = cut(block(), world, output_layouts=Shard(0)).experts
    torch.testing.assert_close(grads(scattered, part(factor, world, rank, 0)), want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def compiled(rank: int, world: int, folder: Path) -> None:
    """One graph, exchanges included; another routing runs in it."""
    whole = block()
    model = cut(copy.deepcopy(whole), world)
    call = torch.compile(model.experts, fullgraph=True, backend="aot_eager")
    for seed in (8, 9):
        x, ids, weights = tokens(seed, 10)
        accept.t1(call(x, ids, weights), whole.experts(x, ids, weights))
    torch._dynamo.reset()


@torch.no_grad()
def numbers(rank: int, world: int, folder: Path) -> None:
    """Names of the whole bank: each rank saves its experts, and any number of ranks loads them."""
    want, (x, ids, weights) = block(MIXED), tokens(10, 9)
    model = cut(copy.deepcopy(want), world)
    names = [name for name in model.state_dict() if name.startswith("experts")]
    assert {int(name.split(".")[1]) for name in names} == set(model.experts.here)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "banks")
    for other in (cut(block(MIXED, seed=5), world), block(MIXED, seed=6)):
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder / "banks")
        other.load_state_dict(state["model"])
        accept.t1(other.experts(x, ids, weights), want.experts(x, ids, weights))
    plain = cut(block(MIXED, seed=7), world)
    plain.load_state_dict(want.state_dict())
    accept.t1(plain.experts(x, ids, weights), want.experts(x, ids, weights))
    lacking = {name: t for name, t in want.state_dict().items() if f"{model.experts.here[0]}.down_proj" not in name}
    with pytest.raises(RuntimeError, match="Missing key"):
        plain.load_state_dict(lacking)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        plain.load_state_dict({**want.state_dict(), f"experts.{E}.down_proj.weight": torch.zeros(1)})


@torch.no_grad()
def whole_again(rank: int, world: int, folder: Path) -> None:
    want, (x, ids, weights) = block(MIXED), tokens(11, 9)
    model = cut(copy.deepcopy(want), world)
    gather_quantized_(model)
    assert type(model.experts) is QExperts
    assert list(model.experts._modules) == list(want.experts._modules)
    for (name, got), (other, one) in zip(model.state_dict().items(), want.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(got.as_subclass(Tensor), one.as_subclass(Tensor)), name
    accept.t1(model.experts(x, ids, weights), want.experts(x, ids, weights))
    half = cut(copy.deepcopy(want), world).to(torch.bfloat16)
    gather_quantized_(copy.deepcopy(half))
    gather_quantized_(half)
    case = x.bfloat16(), ids, weights
    accept.t1(half.experts(*case), copy.deepcopy(want).to(torch.bfloat16).experts(*case))
    if rank == 0:
        pyquant.save_pretrained(model, folder / "banks own")
        again: Any = pyquant.load_pretrained(folder / "banks own", lambda: Block(seed=3)).eval()
        accept.t1(again.experts(x, ids, weights), want.experts(x, ids, weights))
    pyquant.dequantize_(model)
    assert type(model.experts) is Bank


@torch.no_grad()
def taken_from_one(rank: int, world: int, folder: Path) -> None:
    """src_data_rank: all get the numbers of that rank, or keep their own."""
    x, ids, weights = tokens(12, 9)
    for source in (0, world - 1):
        mine = block(seed=rank)
        parallelize_module(mine, mesh_of(world), {"experts": PyquantExpertParallel()}, src_data_rank=source)
        accept.t1(mine.experts(x, ids, weights), block(seed=source).experts(x, ids, weights))
    own = block(seed=rank)
    parallelize_module(own, mesh_of(world), {"experts": PyquantExpertParallel()}, src_data_rank=None)
    here = own.experts.here[0]
    accept.t0(own.experts.expert(here)[0].codes, block(seed=rank).experts.expert(here)[0].codes)


def refused(rank: int, world: int, folder: Path) -> None:
    mesh, model = mesh_of(world), cut(block(), world)
    elsewhere = next(e for e in range(E) if e not in model.experts.here)
    with pytest.raises(ArgumentError, match="another rank"):
        model.experts.expert(elsewhere)
    for call, match in (
        (lambda: parallelize_module(model, mesh, {"experts": PyquantExpertParallel()}), "shared already"),
        (lambda: parallelize_module(block(), mesh, {"dense": PyquantExpertParallel()}), "QExperts"),
        (lambda: parallelize_module(Block(), mesh, {"experts": PyquantExpertParallel()}), "quantize_"),
        (lambda: parallelize_module(block(), mesh, {"experts": PyquantColwise()}), "PyquantExpertParallel"),
        (lambda: parallelize_module(block(), mesh, {"experts": PyquantRowwise()}), "PyquantExpertParallel"),
        (lambda: parallelize_module(block(number=world - 1), mesh, {"experts": PyquantExpertParallel()}), "over"),
        (lambda: pyquant.save_pretrained(model, folder / "no"), "gather_quantized_"),
        (lambda: pyquant.dequantize_(model), "gather_quantized_"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            call()
    assert isinstance(model.experts, SharedQExperts)  # as before
    x, ids, weights = tokens(13, 4)
    inner = block()
    parallelize_module(inner, mesh, {"experts.*.gate_up_proj": PyquantColwise()})
    with pytest.raises(UnsupportedError, match="PyquantExpertParallel"):
        inner.experts(x, ids, weights)
    with pytest.raises(UnsupportedError, match="cut the bank alone"):
        cut(inner, world)
    for wrong in ((x[:, 1:], ids, weights), (x, ids.float(), weights), (x, ids, weights[1:])):
        with pytest.raises(ArgumentError):
            model.experts(*wrong)
    with pytest.raises(ArgumentError, match="output_layouts"):
        PyquantExpertParallel(output_layouts="Replicate")  # type: ignore[arg-type]
    assert model.experts.kernel_info(64).keys() == {"gate_up_proj", "down_proj"}


@torch.no_grad()
def planted(rank: int, world: int, folder: Path) -> None:
    """Slots in another order, results that are not exchanged, and routings by each rank's own numbers are seen."""
    whole, (x, ids, weights) = block(), tokens(14, 64, slots=4)
    want, added, sums = whole.experts(x, ids, weights), experts.added, SharedQExperts._sum

    def seen(name: str, wrong: Any, where: Any = SharedQExperts) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            model = cut(block(), world)
            patch.setattr(where, name, wrong)
            found = torch.tensor(int(not torch.equal(model.experts(x, ids, weights), want)))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def turned(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
        return added(y.view(*weights.shape, -1).flip(1).flatten(0, 1), order, weights.flip(1))

    def alone(self: Any, parts: Tensor, outputs: Any) -> Tensor:
        return part(parts, world, rank, outputs.dim)

    assert not seen("_sum", sums)
    assert seen("added", turned, experts)
    assert seen("_sum", alone)
    assert seen("_slots", lambda self, x, ids: QExperts._slots(self, x, ids + self._begin))


CASES: dict[str, Callable[[int, int, Path], None]] = {
    case.__name__: case
    for case in (
        bits,
        signs_of_zero,
        layouts,
        not_routed,
        gradients,
        compiled,
        numbers,
        whole_again,
        taken_from_one,
        refused,
        planted,
    )
}
