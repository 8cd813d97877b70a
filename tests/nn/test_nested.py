"""Layers on nested tensors, as torch's own Linear and Embedding take them."""

from __future__ import annotations

import copy
import math

import accept
import pytest
import torch
from qlayers import ALL, layer
from torch import Tensor, nn

import pyquant
from pyquant.core.presets import W4A16, W8A8, W8A8Dynamic
from pyquant.nn.reordered import Reordered
from pyquant.nn.two_forms import TwoFormLinear

PIECES = [torch.randn(n, 32, generator=torch.Generator().manual_seed(n)) for n in (3, 0, 5)]
LAYOUTS = pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)


def nested(layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor(PIECES, layout=layout)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).eval()


@LAYOUTS
@pytest.mark.parametrize("scheme", [s for s in ALL if s.outputs is None], ids=str)
def test_each_token_has_the_numbers_that_it_has_alone(scheme: pyquant.QScheme, layout: torch.layout) -> None:
    q, x = layer(scheme), nested(layout).requires_grad_()
    y = q(x)
    assert y.is_nested
    assert y.layout == layout
    assert y.size(-1) == 24
    for got, piece in zip(y.unbind(), PIECES, strict=True):
        if scheme.is_integer:
            accept.t1(got.detach(), q(piece))
        else:  # sums of floats have the order that their number of rows gives them
            torch.testing.assert_close(got, q(piece), rtol=1e-2, atol=1e-2)
    torch.cat(y.unbind()).sum().backward()
    rows = torch.cat(PIECES).requires_grad_()
    q(rows).sum().backward()
    grad = x.grad.values() if layout == torch.jagged else torch.cat([g.reshape(-1, 32) for g in x.grad.unbind()])
    torch.testing.assert_close(grad, rows.grad, rtol=1e-2, atol=1e-2)


def test_the_lengths_stay_the_same_ones() -> None:
    """torch adds nested tensors only where their lengths are one object."""
    q = pyquant.quantize_(model(), W8A8Dynamic(), check_speed=False)
    x = nested()
    assert (q(x) + x).shape == x.shape
    dense, starts, lengths = torch.randn(3, 9, 32), torch.tensor([1, 0, 2]), torch.tensor([3, 9, 4])
    holes = torch.nested.narrow(dense, 1, starts, lengths, layout=torch.jagged)
    for got, piece in zip(q[0](holes).unbind(), holes.unbind(), strict=True):
        accept.t1(got, q[0](piece))


@pytest.mark.parametrize("scheme", [W8A8Dynamic(), W4A16(16)], ids=str)
def test_one_graph(scheme: pyquant.QScheme) -> None:
    q = pyquant.quantize_(model(), scheme, check_speed=False)
    torch._dynamo.reset()  # other tests compiled the same Sequential.forward
    compiled = torch.compile(q, fullgraph=True, backend="aot_eager")
    accept.t1(compiled(nested()).values(), q(nested()).values())


def test_calibration_and_training_see_every_token_once() -> None:
    plain, states = model(), []
    for data in (torch.cat(PIECES), nested(), nested(torch.strided)):
        states.append(pyquant.quantize_(copy.deepcopy(plain), W8A8(), data=[data], check_speed=False).state_dict())
    for name, one in states[0].items():
        assert all(torch.equal(one, state[name]) for state in states), name
    trained = pyquant.prepare_qat_(model(), W8A8Dynamic())
    trained(nested()).values().sum().backward()
    assert bool(trained[0].weight.grad.any())


def test_tables_transforms_and_choices() -> None:
    table = pyquant.quantize_(nn.Sequential(nn.Embedding(10, 32)), W8A8Dynamic(), embeddings=True)
    ids = [torch.tensor([1, 2]), torch.tensor([3])]
    for got, piece in zip(table(torch.nested.nested_tensor(ids, layout=torch.jagged)).unbind(), ids, strict=True):
        accept.t1(got, table(piece))
    turned = nn.Sequential(pyquant.HadamardLinear.from_linear(nn.Linear(32, 8)))
    pyquant.quantize_(turned, W8A8Dynamic(), check_speed=False)
    accept.t1(turned(nested()).values(), turned(torch.cat(PIECES)))
    choices = pyquant.auto_(pyquant.quantize_(model(), W8A8Dynamic(), check_speed=False), nested())
    assert len(choices) == 2
    assert {tuple(call.shape) for one in choices for call in one.calls} <= {(8, 32), (8, 48)}


def test_what_stands_around_a_layer_counts_tokens() -> None:
    rows, one = torch.cat(PIECES), layer(W8A8Dynamic())
    for first, is_exact in ((8, False), (9, True)):  # eight tokens are eight rows, whatever their sequences
        two = TwoFormLinear.of(one, [(first, math.inf)])
        assert torch.equal(two(nested()).values(), one(rows)) is is_exact
        torch.testing.assert_close(two(nested()).values(), two(rows))
    sorted_first = Reordered(one, torch.arange(32).flip(0))
    accept.t1(sorted_first(nested()).values(), sorted_first(rows))


def test_what_has_no_meaning_is_refused() -> None:
    q = layer(W8A8Dynamic())
    with pytest.raises(pyquant.ArgumentError, match=r"'residual'.*None where x is a nested tensor"):
        q(nested(), torch.randn(8, 24))
    with pytest.raises(pyquant.ArgumentError, match=r"'x': got float32 \[8, 31\]"):
        q(torch.nested.nested_tensor([torch.cat(PIECES)[:, :31]], layout=torch.jagged))
    heads = torch.nested.nested_tensor([torch.randn(n, 4, 32) for n in (3, 5)], layout=torch.jagged)
    assert q(heads).shape[2:] == (4, 24)
    with pytest.raises(pyquant.ArgumentError, match="lengths in dimension 2"):
        q(heads.transpose(1, 2))
    with pytest.raises(pyquant.ArgumentError, match=r"'to_output'.*values"):
        pyquant.sensitivity(model(), [nested()] * 2, metric="sqnr")
    plain = model()
    by_values = pyquant.sensitivity(plain, [nested()] * 2, metric="sqnr", to_output=lambda y: y.values())
    assert by_values.loss == pyquant.sensitivity(plain, [torch.cat(PIECES)] * 2, metric="sqnr").loss
