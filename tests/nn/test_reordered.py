"""Reordered: the layer of a float twin with its columns sorted, through every way in and out."""

from __future__ import annotations

from pathlib import Path

import accept
import pytest
import torch
from torch import nn

import pyquant
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import load_checkpoint, save_checkpoint
from pyquant.nn.qlinear import QLinear
from pyquant.nn.reordered import Reordered

ORDER = torch.tensor([5, 0, 7, 1, 2, 6, 4, 3])


def layer(scheme: pyquant.QScheme) -> Reordered:
    torch.manual_seed(0)
    return Reordered(QLinear.from_float(nn.Linear(8, 12), scheme), ORDER)


@pytest.mark.parametrize("scheme", [pyquant.W8A8Dynamic(), pyquant.W4A16(4), pyquant.W4A8Dynamic(4)])
def test_it_is_the_layer_of_sorted_inputs(scheme: pyquant.QScheme) -> None:
    one, x = layer(scheme), torch.randn(2, 3, 8)
    accept.t1(one(x), one.linear(x[..., ORDER]))
    residual = torch.randn(2, 3, 12)
    accept.t1(one(x, residual), one.linear(x[..., ORDER], residual))
    accept.t1(one.weight[:, ORDER], one.linear.to_float().weight.detach())
    accept.t1(one.bias, one.linear.bias)


def test_activations_have_the_codes_that_they_have_in_their_own_order() -> None:
    """Sorting columns of both sides changes no integer sum: the result is that of the unsorted layer, to the bit."""
    sorted_, x = layer(pyquant.W8A8Dynamic()), torch.randn(5, 8)
    back = torch.argsort(ORDER)
    inner = sorted_.linear
    plain = QLinear.from_codes(inner.codes[:, back], inner.weight_scale, scheme=inner.scheme, bias=inner.bias_)
    accept.t1(sorted_(x), plain(x))


def test_wrong_orders() -> None:
    linear = nn.Linear(3, 2)
    for order in (torch.tensor([0, 1]), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 3]), torch.arange(3).int(), None):
        with pytest.raises(ArgumentError, match=r"'order'.*int64 \[3\], each of 0 to 2 once"):
            Reordered(linear, order)  # type: ignore[arg-type]


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(layer(pyquant.W4A16(4)), nn.ReLU(), nn.Linear(12, 3)).eval()
    x = torch.randn(4, 8)
    pyquant_warning = pytest.warns(pyquant.QuantizationWarning, match="transformers cannot read this folder")
    with pyquant_warning:
        pyquant.save_pretrained(model, tmp_path)
    again = pyquant.load_pretrained(tmp_path, lambda: nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)))
    accept.t1(again.eval()(x), model(x))
    pyquant.load_pretrained(tmp_path, again)
    accept.t1(again(x), model(x))
    with pytest.raises(CheckpointError, match="'0' was saved as a Linear; the model has a ReLU there"):
        pyquant.load_pretrained(tmp_path, nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(12, 3)))


def test_a_forged_order_is_refused(tmp_path: Path) -> None:
    with pytest.warns(pyquant.QuantizationWarning):
        pyquant.save_pretrained(nn.Sequential(layer(pyquant.W4A16(4))), tmp_path)
    found = load_checkpoint(tmp_path)
    for order in (torch.full((8,), 10**12), torch.zeros(8, dtype=torch.int64), torch.arange(7)):
        tensors = {**found.tensors, "0.order": order}
        save_checkpoint(tmp_path, found.layers, tensors, extra=found.extra)
        net = nn.Sequential(nn.Linear(8, 12))
        with pytest.raises(CheckpointError, match="reordered '0'"):
            pyquant.load_pretrained(tmp_path, net)
        assert isinstance(net[0], nn.Linear)


def test_dequantize_gives_a_float_model() -> None:
    model = nn.Sequential(layer(pyquant.W4A16(4)))
    x = torch.randn(4, 8)
    want = x.double() @ model[0].weight.double().T + model[0].bias.double()
    pyquant.dequantize_(model)
    torch.testing.assert_close(model(x).double(), want, rtol=1e-5, atol=1e-5)
    assert type(model[0]) is nn.Linear
    assert set(model.state_dict()) == {"0.weight", "0.bias"}
