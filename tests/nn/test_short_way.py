"""The short way of weight-only layers to their op: taken where nobody misses what it leaves out, and only there."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import pyquant
from pyquant import QLinear, ops
from pyquant.errors import ArgumentError

pytestmark = pytest.mark.skipif(not ops.native_available(), reason="without the compiled library")

SCHEMES = [pyquant.W8A16(), pyquant.W4A16(32), pyquant.W4A16(32, symmetric=False), pyquant.W4A16(None)]
SHORT, LONG = "_weight_only", "weight_only_linear"


def layer_of(scheme: pyquant.QScheme = SCHEMES[1], dtype: torch.dtype = torch.float32, **given: Any) -> QLinear:
    torch.manual_seed(3)
    return QLinear.from_float(nn.Linear(64, 24).to(dtype), scheme, **given)


def by_the_long_way(layer: QLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
    return layer._forward_general(x, residual)  # type: ignore[no-any-return]


def ops_of(call: Any, *args: Any) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(*args)
    found = {event.key.removeprefix("pyquant::") for event in profile.key_averages()}
    return found & {SHORT, LONG}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_equal_bits(scheme: pyquant.QScheme, dtype: torch.dtype) -> None:
    layer = layer_of(scheme, dtype, activation="silu")
    for shape in ((64,), (1, 64), (3, 64), (2, 5, 64), (0, 64), (70, 64)):
        x = torch.randn(shape, dtype=dtype)
        y = layer(x)
        assert (y.shape, y.dtype) == ((*shape[:-1], 24), dtype)
        assert torch.equal(y, by_the_long_way(layer, x))
    wide = torch.randn(4, 128, dtype=dtype)[:, ::2]
    assert torch.equal(layer(wide), by_the_long_way(layer, wide))


def test_it_is_taken_where_nothing_else_is_asked_for() -> None:
    layer, x = layer_of(), torch.randn(2, 64)
    assert ops_of(layer, x) == {SHORT}
    with torch.inference_mode():
        assert ops_of(layer, x) == {SHORT}
    assert ops_of(layer, torch.randn(2, 64, requires_grad=True)) == {LONG}
    assert ops_of(layer, x, torch.randn(2, 24)) == {LONG}
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert SHORT not in ops_of(layer, dual)


def test_gradients_are_those_of_the_dequantised_weight() -> None:
    layer, x = layer_of(), torch.randn(2, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantised_weight().sum(0).expand(2, -1))
    torch.testing.assert_close(grad(lambda v: layer(v).sum())(x.detach()), x.grad)


def test_graphs_have_the_op_that_compilers_know() -> None:
    layer, x = layer_of().eval(), torch.randn(2, 64)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    assert torch.equal(torch.compile(layer, backend=backend, fullgraph=True)(x), layer(x))
    exported = torch.export.export(layer, (x,))
    for code in (*graphs, exported.graph_module.code):
        assert LONG in code
        assert SHORT not in code
    scripted = torch.jit.trace(layer, x)
    assert torch.equal(scripted(x), layer(x))


def test_transforms_have_rules() -> None:
    layer, x = layer_of(), torch.randn(5, 3, 64)
    assert torch.equal(vmap(layer)(x), layer(x))
    assert torch.equal(vmap(layer, in_dims=1, out_dims=1)(x), layer(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), layer(x.bfloat16()))
        assert layer(x).dtype == torch.bfloat16
    state = {name: tensor.clone() for name, tensor in layer.state_dict(keep_vars=True).items()}
    state["weight_scale"] = state["weight_scale"] * 2
    doubled = functional_call(layer, {"weight_scale": state["weight_scale"], "bias": state["bias"] * 2}, (x,))
    torch.testing.assert_close(doubled, 2 * layer(x))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (5, 3, 24)


def test_it_sees_what_becomes_of_the_layer() -> None:
    layer, x = layer_of(), torch.randn(2, 64)
    before = layer(x)
    layer.bias = torch.ones(24)
    assert torch.equal(layer(x), by_the_long_way(layer, x))
    assert not torch.equal(layer(x), before)
    relu = layer.with_activation("relu")
    assert torch.equal(relu(x), layer(x).relu())
    kept = io.BytesIO()
    torch.save(layer, kept)
    kept.seek(0)
    for twin in (copy.deepcopy(layer), torch.load(kept, weights_only=False)):
        assert torch.equal(twin(x), layer(x))
        assert ops_of(twin, x) == {SHORT}
    other = layer_of(pyquant.W4A16(32))
    other.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict(keep_vars=True).items()})
    assert torch.equal(other(x), layer(x))
    half = copy.deepcopy(layer).half()
    assert half(x.half()).dtype == torch.float16
    assert half.to("meta")(x.half().to("meta")).shape == (2, 24)
    empty = layer.to("meta").to_empty(device="cpu")
    with pytest.warns(UserWarning, match="to_empty"):
        empty(x)


def test_a_column_less_is_told_from_codes_two_a_byte() -> None:
    layer = layer_of(pyquant.W4A16(None))
    for columns in (63, 65):
        with pytest.raises(ArgumentError, match=f"{columns}"):
            layer(torch.zeros(2, columns))


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(2, 63),
        torch.zeros(2, 64, dtype=torch.int8),
        torch.zeros(2, 64, dtype=torch.float64),
        torch.zeros(()),
        torch.zeros(2, 64, device="meta"),
        torch.zeros(2, 64).to_sparse(),
    ],
    ids=lambda x: f"{x.dtype}{list(x.shape)}{x.device}{x.layout}",
)
def test_wrong_inputs_are_told_in_the_words_of_the_layer(x: Tensor) -> None:
    layer = layer_of()
    with pytest.raises(ArgumentError) as short:
        layer(x)
    with pytest.raises(ArgumentError) as long:
        by_the_long_way(layer, x)
    assert str(short.value) == str(long.value)
