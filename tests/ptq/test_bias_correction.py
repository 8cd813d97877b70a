"""bias_correction_: no channel has a mean error left, that of earlier layers included."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pyquant import W4A16, ArgumentError, NonFiniteError, W4A4Dynamic, W8A8Dynamic
from pyquant.ptq.improve import replay
from pyquant.ptq.improve.bias_correction import bias_correction_
from pyquant.simulate.insert import convert_, insert_fake_quantize_


def model_of(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(12, 20, bias), nn.ReLU(), nn.Linear(20, 20, bias), nn.ReLU(), nn.Linear(20, 5, bias)]
    return nn.Sequential(*layers).to(dtype)


def data(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(4)
    return [(torch.randn(rows, 12, generator=g) + 0.7).to(dtype) for rows in (30, 7, 50)]


def means(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """Mean output of every Linear, computed by hand from the layers' own results."""
    total: dict[str, Tensor] = {}
    x = torch.cat(batches)
    for name, layer in model.named_children():
        x = layer(x)
        if not isinstance(layer, nn.ReLU):
            total[name] = x.detach().double().mean(0)
    return total


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scheme", [W4A16(group_size=None), W4A4Dynamic()])
def test_every_mean_is_that_of_the_float_model(scheme, bias) -> None:
    floats = model_of(bias)
    model = insert_fake_quantize_(copy.deepcopy(floats), scheme)
    want = means(floats, data())
    before = max(float((m - want[name]).abs().max()) for name, m in means(model, data()).items())
    found = bias_correction_(model, iter(data()), 3)
    after = max(float((m - want[name]).abs().max()) for name, m in means(model, data()).items())
    assert list(found) == ["0", "2", "4"]
    assert max(found.values()) > 0.01
    assert before > 0.02
    assert after < 2e-6
    converted = means(convert_(model), data())
    assert max(float((m - want[name]).abs().max()) for name, m in converted.items()) < 1e-5
    assert all(layer.bias is not None for layer in model if not isinstance(layer, nn.ReLU))


def test_the_order_matters_so_a_wrong_one_would_be_seen() -> None:
    """Each layer corrected against float inputs, which forgets what the layers before it pass on, leaves an error."""
    floats = model_of()
    model = insert_fake_quantize_(copy.deepcopy(floats), W4A16(group_size=None))
    x = torch.cat(data())
    with torch.no_grad():
        for float_layer, layer in zip(floats, model):
            if not isinstance(layer, nn.ReLU):
                layer.bias -= (layer(x) - float_layer(x)).mean(0)
            x = float_layer(x)
    want = means(floats, data())
    assert max(float((m - want[name]).abs().max()) for name, m in means(model, data()).items()) > 1e-3


def test_types_and_repeated_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.relu(self.fc(x)))

    torch.manual_seed(0)
    model = insert_fake_quantize_(Twice().bfloat16(), W8A8Dynamic())
    assert list(bias_correction_(model, data(torch.bfloat16), 2)) == ["fc"]
    assert model.fc.bias.dtype == torch.bfloat16


def test_shared_biases_and_wrong_arguments_are_named() -> None:
    floats = model_of()
    floats[2].bias = nn.Parameter(torch.zeros(20))
    floats[0].bias = floats[2].bias
    with pytest.raises(ArgumentError, match="one bias in the layers 0, 2"):
        bias_correction_(insert_fake_quantize_(floats, W8A8Dynamic()), data(), 1)
    with pytest.raises(ArgumentError, match="fake quantisation"):
        bias_correction_(model_of(), data(), 1)


def test_on_an_error_the_model_is_as_before(monkeypatch) -> None:
    model = insert_fake_quantize_(model_of(), W4A16(group_size=None)).train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    ordinary, count = replay.Replay.watch, 0

    def breaks(*arguments) -> None:
        nonlocal count
        count += 1
        if count == 5:  # three float passes, then the second layer's
            raise KeyboardInterrupt
        ordinary(*arguments)

    monkeypatch.setattr(replay.Replay, "watch", breaks)
    with pytest.raises(KeyboardInterrupt):
        bias_correction_(model, data(), 3)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_batch_that_is_not_finite_is_refused(bad: float) -> None:
    model = insert_fake_quantize_(model_of(), W8A8Dynamic())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    batches = data()
    batches[1][0, 3] = bad
    with pytest.raises(NonFiniteError, match="batches under which outputs of 0 are NaN or infinite"):
        bias_correction_(model, batches, 3)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
