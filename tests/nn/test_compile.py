"""torch.compile without a graph break and with a free number of rows, and torch.export."""

from __future__ import annotations

import pytest
import torch
from qlayers import CODES_OUT, layer
from torch import Tensor, nn

import pyquant
from pyquant.core.presets import FP16, W4A16, W8A8, W4A8Dynamic, W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.nn.qlinear import QLinear

ROWS = (2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 65, 100, 127, 128)


class Block(nn.Module):
    def __init__(self, scheme: pyquant.QScheme) -> None:
        super().__init__()
        self.up = layer(scheme, 32, 48, activation="gelu")
        self.down = layer(scheme, 48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x), x)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W8A8(), W4A8Dynamic(16), W4A16(16), FP16()], ids=str)
def test_one_graph_serves_every_number_of_rows(scheme: pyquant.QScheme) -> None:
    block = Block(scheme)
    compilations = 0

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        nonlocal compilations
        compilations += 1
        return graph.forward

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for rows in ROWS:
            x = torch.randn(rows, 32)
            assert torch.equal(compiled(x), block(x)), rows
    assert compilations <= 2


def test_shapes_and_gradients_through_aot() -> None:
    block = Block(W8A8Dynamic())
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (4, 9):
        x = torch.randn(rows, 32, requires_grad=True)
        y = torch.randn(rows, 32)
        compiled(x).backward(y)
        x2 = x.detach().clone().requires_grad_()
        block(x2).backward(y)
        assert x.grad is not None
        assert torch.equal(compiled(x), block(x))
        torch.testing.assert_close(x.grad, x2.grad)


def test_codes_between_compiled_layers() -> None:
    first = layer(CODES_OUT[0], 32, 48)
    second = QLinear.from_float(nn.Linear(48, 16), W8A8(), input_scale=first.output_scale)
    chain = nn.Sequential(first, second)
    compiled = torch.compile(chain, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for rows in (3, 6):
            x = torch.randn(rows, 32)
            assert torch.equal(compiled(x), chain(x))
            out = torch.compile(first, fullgraph=True, backend="aot_eager")(x)
            assert isinstance(out, QTensor)
            assert torch.equal(out.data, first(x).data)


@pytest.mark.slow
def test_inductor_gives_equal_bits() -> None:
    block = Block(W8A8Dynamic())
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (4, 17):
            x = torch.randn(rows, 32)
            assert torch.equal(compiled(x), block(x))


@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W8A8(), W4A16(16)], ids=str)
def test_export_round_trip(scheme: pyquant.QScheme) -> None:
    block = Block(scheme).eval()
    rows = torch.export.Dim("rows", min=1, max=4096)
    with torch.no_grad():
        program = torch.export.export(block, (torch.randn(4, 32),), dynamic_shapes={"x": {0: rows}})
        for m in (1, 4, 33):
            x = torch.randn(m, 32)
            assert torch.equal(program.module()(x), block(x))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("pyquant" in target for target in targets)


def test_wrong_shapes_are_refused_while_tracing() -> None:
    block = torch.compile(layer(W8A8Dynamic(), 32, 24), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"argument 'x'|last dimension"):
        block(torch.randn(3, 31))
