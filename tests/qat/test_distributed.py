"""DDP and FSDP2 with two processes (gloo): the same ranges everywhere, the step of one process, conversion after."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from children import ranks
from qat_models import SCHEMES, draw, mlp, prepared
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant import convert_, prepare_qat_, quantize_
from pyquant.qat.prepare import range_parameters

STEPS, WORLD = 3, 2
CASES = (
    ("W8A8", True, "simulated"),
    ("W4A4", True, "int8"),
    ("W4A8(group_size=16)", True, "simulated"),
    ("W8A8Dynamic", False, "int8"),
)

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


def model_of(case: tuple[str, bool, str]) -> nn.Module:
    name, learn, forward = case
    return prepared(mlp("ddp"), SCHEMES[name], draw("ddp").normal(16, 32), learn_amax=learn, forward=forward)


def batch() -> tuple[Tensor, Tensor]:
    """Targets near what the model gives: far from it, smaller ranges (and outputs) would lower the loss most."""
    d = draw("ddp batch")
    x = d.normal(8, 32)
    with torch.no_grad():
        return x, mlp("ddp")(x) + 0.2 * d.normal(8, 16)


def steps(model: nn.Module, x: Tensor, target: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()
        optimizer.step()


def ddp(rank: int, results: Path) -> None:
    for i, case in enumerate(CASES):
        model = model_of(case)
        if rank == 1 and case[1]:  # DDP hands out the ranges of rank 0
            with torch.no_grad():
                model[0].weight_fake_quant.scale.mul_(2)
        wrapped = nn.parallel.DistributedDataParallel(model)
        x, target = batch()
        steps(wrapped, x.chunk(WORLD)[rank], target.chunk(WORLD)[rank])
        torch.save(model.state_dict(), results / f"{i}.{rank}.pt")


def fsdp(rank: int, results: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for i, case in enumerate(CASES):
        model = model_of(case)
        ranges = set(range_parameters(model)) if i == 1 else set()  # left out of the sharding, or sharded as well
        for layer in (model[0], model[2]):
            fully_shard(layer, ignored_params=ranges & set(layer.parameters()))
        fully_shard(model, ignored_params=ranges)
        x, target = batch()
        mine = (x.chunk(WORLD)[rank], target.chunk(WORLD)[rank])
        if ranges:  # what is not sharded, its owner averages
            for p in ranges:
                p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(WORLD)))
        steps(model, *mine)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save({k: v.clone() for k, v in state.items()}, results / f"{i}.0.pt")
    mixed = model_of(("W8A8Dynamic", True, "simulated"))
    ranges = set(range_parameters(mixed))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(mixed, mp_policy=policy)
    try:
        mixed(batch()[0])
    except ValueError as error:
        (results / f"error.{rank}").write_text(str(error))
    mixed = model_of(("W8A8Dynamic", True, "simulated"))
    fully_shard(mixed, mp_policy=policy, ignored_params=set(range_parameters(mixed)))
    mixed(batch()[0]).float().sum().backward()


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def wrong_order(rank: int, results: Path) -> None:
    """What has to be done before a model is wrapped or cut, and what takes no model that is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from pyquant.integrations.distributed import PyquantColwise

    x = draw("ddp").normal(16, 32)
    told: dict[str, str] = {}
    wrapped = nn.parallel.DistributedDataParallel(mlp("ddp"))
    told["ddp learned"] = refused(lambda: prepare_qat_(wrapped, SCHEMES["W8A8Dynamic"], learn_amax=["*.weight"]))
    told["ddp dynamic"] = refused(lambda: prepare_qat_(wrapped, SCHEMES["W8A8Dynamic"]))
    cut = fully_shard(prepared(mlp("ddp"), SCHEMES["W8A8Dynamic"], x))
    told["convert_"] = refused(lambda: convert_(cut))
    told["prepare_qat_"] = refused(lambda: prepare_qat_(fully_shard(mlp("ddp")), SCHEMES["W8A8Dynamic"]))
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    training = prepared(mlp("ddp"), SCHEMES["W8A8Dynamic"], x)
    told["PyquantColwise"] = refused(lambda: parallelize_module(training, mesh["tp"], {"0": PyquantColwise()}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize_(mlp("ddp"), "W8A8", data=[x[rank * 8 : rank * 8 + 8]], check_speed=False)
        quantize_(mlp("ddp"), "W8A8Dynamic", check_speed=False)
    told["quantize_"] = "; ".join(str(w.message) for w in caught)
    (results / f"{rank}.json").write_text(json.dumps(told))


def worker(rank: int, results: Path) -> None:
    for run in (ddp, fsdp, wrong_order):
        folder = results / run.__name__
        folder.mkdir(exist_ok=True)
        run(rank, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One pair of processes for all tests: starting them is what costs."""
    folder = tmp_path_factory.mktemp("distributed")
    ranks(worker, folder, world=WORLD)
    return folder


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: CASES[i][0])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one(results: Path, kind: str, case: int) -> None:
    x, target = batch()
    alone = model_of(CASES[case])
    start = copy.deepcopy(alone.state_dict())
    steps(alone, x, target)
    state = torch.load(results / kind / f"{case}.0.pt", weights_only=True)
    assert set(state) == set(start)
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert not torch.equal(state["0.weight"], start["0.weight"])
    if kind == "ddp":
        other = torch.load(results / kind / f"{case}.1.pt", weights_only=True)
        assert all(torch.equal(state[name], other[name]) for name in state)
    loaded = model_of(CASES[case])
    loaded.load_state_dict(state)
    y = loaded(x).detach()
    convert_(loaded)
    torch.testing.assert_close(loaded(x), y, rtol=1e-4, atol=1e-4)


def test_scales_in_a_mixed_precision_policy_are_refused(results: Path) -> None:
    assert "mixed-precision policies" in (results / "fsdp" / "error.0").read_text()


def test_calls_in_the_wrong_order_say_the_right_one(results: Path) -> None:
    for rank in range(WORLD):
        told = json.loads((results / "wrong_order" / f"{rank}.json").read_text())
        assert "DistributedDataParallel" in told["ddp learned"]
        assert "then wrap it" in told["ddp learned"]
        assert told["ddp dynamic"] == "not refused"
        assert "is a DTensor" in told["convert_"]
        assert "get_model_state_dict" in told["convert_"]
        assert "prepare_qat_ first, then fully_shard" in told["prepare_qat_"]
        assert "whose rounding is trained" in told["PyquantColwise"]
        assert told["quantize_"].count("quantize_ calibrates in each of 2 processes for itself") == 1
