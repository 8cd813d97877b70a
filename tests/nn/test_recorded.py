"""What runs, and what is written down, of calls whose input asks for a gradient: a norm with parameters stands before
the layer, and nobody said torch.no_grad, as in most models and pages."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyquant
from pyquant.integrations import compile as ours

SCHEMES = [
    "W8A8Dynamic",
    "W4A8Dynamic(group_size=32)",
    "W4A8TwoLevelDynamic(group_size=32)",
    "W4A16(group_size=32)",
    "W8A16",
    "FP16",
]
OPS = {"W4A16(group_size=32)": "weight_only_linear", "W8A16": "weight_only_linear", "FP16": "float_linear"}
DEQUANTISES = ("unpack_linear", "unpack_int4", "dequantize", "pack_linear")


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(self.norm(x))))


def made(kind: str, scheme: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if kind == "images":
        model, x = Images(), torch.randn(2, 3, 9, 9)
    else:
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        model, x = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), layer), torch.randn(2, 5, 64)
    return pyquant.quantize_(model.eval(), scheme, check_speed=False), x


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.removeprefix("pyquant::")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["rows", "images"])
def test_a_forward_dequantises_no_weight(kind: str, scheme: str) -> None:
    """It did, for a backward that did not come: 40 times the time of the layer."""
    model, x = made(kind, scheme)
    with Count() as count:
        y = model(x)
    assert y.requires_grad
    assert not {name for name in count.calls if name in DEQUANTISES}
    y.square().mul(torch.randn(y.shape)).sum().backward()
    first = model[0].weight if kind == "rows" else model.norm.weight
    assert bool(first.grad.any())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["rows", "images"])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_the_ops_alone(kind: str, scheme: str, strict: bool) -> None:
    model, x = made(kind, scheme)
    program = torch.export.export(model, (x,), strict=strict)
    names = Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")
    assert not [name for name in names if any(word in name for word in DEQUANTISES)]
    assert not [name for name in names if "wrap_with_set_grad" in name or name == "aten.linear.default"]
    want = model(x)
    assert torch.equal(program.module()(x), want)
    assert torch.equal(torch.export.unflatten(program)(x), want)
    if kind == "rows" and scheme.startswith("W8A8"):
        before = {name: t.clone() for name, t in program.constants.items() if "storage" in name}
        ours.retarget(program, "cpu", layout="rows")
        assert before
        assert not any(torch.equal(t, program.constants[name]) for name, t in before.items())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["rows", "images"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_module_passes_its_check_and_is_saved(kind: str, scheme: str, tmp_path: Path) -> None:
    model, x = made(kind, scheme)
    traced = torch.jit.trace(model, (x,))
    torch.jit.save(traced, tmp_path / "model.pt")
    assert torch.equal(torch.jit.load(tmp_path / "model.pt")(x), model(x))


@pytest.mark.parametrize("scheme", ["W4A16(group_size=32)", "W8A16", "FP16"])
@pytest.mark.parametrize("kind", ["rows", "images"])
def test_compiled_layers_of_float_products_are_one_op(kind: str, scheme: str) -> None:
    """Dynamo answers the question for a stack of transforms as if there were one: weights were dequantised in each
    call, and multiplied by torch."""
    if kind == "images" and scheme == "FP16":
        pytest.skip("torch's own convolution")
    model, x = made(kind, scheme)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    assert torch.equal(y, model(x))
    assert OPS[scheme] in graphs[0]
    assert not any(word in graphs[0] for word in DEQUANTISES)


def test_layers_in_branches_of_a_program_are_not_left_behind_by_retarget() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, self.one, self.other, (x,))

    model, x = pyquant.quantize_(Either().eval(), "W8A8Dynamic", check_speed=False), torch.randn(3, 8)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        with pytest.raises(pyquant.errors.UnsupportedError, match=r"torch\.cond"):
            ours.retarget(program, "cpu", layout="rows")
