"""Kept weights: computed once per change, and never stale."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from qat_models import SCHEMES, draw, linear, mlp, prepared, static_weights, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyquant.core.presets import W4A8, W8A8Dynamic
from pyquant.qat.kept import Kept, mark_of
from pyquant.qat.weight import WeightFakeQuantize
from pyquant.simulate.fake_quantize import FakeQuantize


def one_layer(scheme: object = None, learn: bool = False) -> nn.Module:
    return prepared(nn.Sequential(linear(32, 24)), scheme or W8A8Dynamic(), learn_amax=learn)[0]


def plain(layer: nn.Module) -> torch.Tensor:
    """What a quantiser that keeps nothing makes of the weight as it is now."""
    fake, w = layer.weight_fake_quant, layer.weight.detach()
    twin = FakeQuantize(fake.scheme, tuple(fake.scale.shape) if not fake.follows else (1,), follows=fake.follows)
    if not fake.follows:
        twin.set_qparams(*fake.qparams())
    return twin(w)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("scheme", [W8A8Dynamic(), static_weights(W4A8(None)), W4A8(16)], ids=str)
def test_once_per_change(scheme: object, learn: bool) -> None:
    layer = one_layer(scheme, learn)
    fake = layer.weight_fake_quant
    if layer.input_fake_quant is not None and not layer.input_fake_quant.follows:
        layer.input_fake_quant.set_qparams(torch.tensor([0.02]))
    x = draw("once").normal(4, 32)
    made = fake._kept.made
    for _ in range(3):  # micro-batches, and calls in one graph
        (layer(x) + layer(2 * x)).sum().backward()
    assert fake._kept.made == made + 1
    with torch.no_grad():
        layer(x)
        assert fake._kept.made == made + 1
        layer.weight.mul_(1.5)
        assert torch.equal(fake(layer.weight), plain(layer))
    assert fake._kept.made == made + 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 32), (7, 9), (1, 33)])
@pytest.mark.parametrize("learn", [False, True])
def test_one_element_that_changes_through_data_is_seen(dtype: torch.dtype, shape: tuple[int, int], learn: bool) -> None:
    """By the next forward, whichever element it is, by however little."""
    n, k = shape
    layer = prepared(nn.Sequential(linear(k, n)), W8A8Dynamic(), learn_amax=learn)[0].to(dtype)
    fake, at = layer.weight_fake_quant, draw("one element", n * k)
    for i in torch.randperm(n * k, generator=at.generator)[:16].tolist():
        fake(layer.weight)
        layer.weight.data.view(-1)[i] += 10
        assert torch.equal(fake(layer.weight).detach(), plain(layer)), i
        made = fake._kept.made
        layer.weight.data.view(torch.int16 if dtype == torch.bfloat16 else torch.int32).view(-1)[i] ^= 1  # the last bit
        fake(layer.weight)
        assert fake._kept.made == made + 1


def test_rows_and_columns_that_change_places_through_data_are_seen() -> None:
    layer = one_layer()
    fake = layer.weight_fake_quant
    for dim in (0, 1):
        fake(layer.weight)
        layer.weight.data.copy_(layer.weight.data.flip(dim))
        assert torch.equal(fake(layer.weight).detach(), plain(layer))


CHANGES = {
    "doubled": lambda row: row.mul_(2),
    "halved": lambda row: row.mul_(0.5),
    "negated": lambda row: row.neg_(),
    "reversed": lambda row: row.copy_(row.flip(0)),
    "every other one negated": lambda row: row[1::2].neg_(),
    "two of them negated": lambda row: row[101:104:2].neg_(),
    "shuffled": lambda row: row.copy_(row[torch.randperm(len(row), generator=draw("shuffled").generator)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [512, 1024])
@pytest.mark.parametrize("change", CHANGES)
def test_a_row_that_changes_as_a_whole_through_data_is_seen(change: str, k: int, dtype: torch.dtype) -> None:
    """No sum of bits does that: of 512 exponents it does not know a double, of as many signs of either kind no
    negative, and an even number of top bits is none."""
    layer = prepared(nn.Sequential(linear(k, 70)), W8A8Dynamic())[0].to(dtype)
    fake = layer.weight_fake_quant
    layer.weight.data[3] = torch.cat([draw("half").normal(k // 2)] * 2) * torch.tensor([1.0, -1.0]).repeat(k // 2)
    for part in (layer.weight.data[3], layer.weight.data[69], layer.weight.data[:, :128].t()):
        fake(layer.weight)
        CHANGES[change](part)
        assert torch.equal(fake(layer.weight).detach(), plain(layer))


def test_without_the_compiled_library_a_copy_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyquant.qat.kept.native_available", lambda: False)
    kept: Kept[float] = Kept()
    w = torch.tensor([1.0, torch.nan, 0.0])
    values = [kept.get(lambda old: w[2].item(), w) for _ in range(2)]
    w.data[2] = -0.0
    assert values == [0.0, 0.0]
    assert str(kept.get(lambda old: w[2].item(), w)) == "-0.0"
    assert kept.made == 2


def test_changes_that_versions_do_not_tell() -> None:
    layer = one_layer()
    fake = layer.weight_fake_quant
    x = draw("data").normal(4, 32)
    layer(x)
    layer.weight.data.mul_(3)  # as old optimisers and averages of weights do
    assert torch.equal(fake(layer.weight).detach(), plain(layer))
    layer.weight.data = layer.weight.data.clone() * 2
    assert torch.equal(fake(layer.weight).detach(), plain(layer))
    layer.weight = nn.Parameter(layer.weight.detach() * 5)
    assert torch.equal(fake(layer.weight).detach(), plain(layer))
    state = {k: v * 0.5 for k, v in layer.state_dict().items()}
    layer.load_state_dict(state)
    assert torch.equal(fake(layer.weight).detach(), plain(layer))


def test_the_staleness_check_can_fail() -> None:
    """Without the marks a change through .data is missed: the check above is not true by accident."""
    kept: Kept[float] = Kept()
    w = torch.ones(100)
    make = lambda old: w.sum().item()  # noqa: E731
    kept.get(make, w)
    kept._marks = [mark_of(w * 2)]
    w.data.mul_(2)
    assert kept.get(make, w) == 100.0  # stale: the forged marks say that nothing has changed


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("name", ["W8A8Dynamic", "W4A8 mse weights", "W4A16(group_size=16, symmetric=False)"])
def test_training_equals_a_quantiser_that_keeps_nothing(name: str, learn: bool) -> None:
    scheme = SCHEMES[name]
    d = draw("same", name)
    x, t = d.normal(8, 32), d.normal(8, 16)
    kept, fresh = (prepared(mlp(), scheme, x, learn_amax=learn) for _ in range(2))
    for module in fresh.modules():
        if isinstance(module, FakeQuantize) and hasattr(module, "_kept") and module._kept is not None:
            module._kept = _Never()
    assert train(kept, x, t, 6) == train(fresh, x, t, 6)
    for a, b in zip(kept.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)


class _Never(Kept):
    def get(self, make, *of):
        return make(None)


def test_a_graph_of_older_weights_is_refused_not_wrong() -> None:
    layer = one_layer()
    x = draw("older").normal(4, 32).requires_grad_()
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    layer(x)  # overwrites the buffer that y's graph needs
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_checkpointing_double_use_and_two_owners() -> None:
    shared = linear(16, 16, "shared")
    model = prepared(nn.Sequential(shared, nn.ReLU(), shared), W8A8Dynamic())
    assert model[0] is model[2]
    x = draw("ckpt").normal(4, 16)
    model(x).sum().backward()
    grad = model[0].weight.grad.clone()
    model[0].weight.grad = None
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert torch.equal(model[0].weight.grad, grad)
    a, b = linear(16, 16, "a"), linear(16, 16, "b")
    b.weight = a.weight  # one parameter in two layers
    tied = prepared(nn.Sequential(a, b), W8A8Dynamic())
    tied(x).sum().backward()
    manual = a.weight.detach().clone().requires_grad_()
    q = FakeQuantize(W8A8Dynamic().weights, follows=True)
    inputs = FakeQuantize(W8A8Dynamic().inputs)
    h = torch.nn.functional.linear(inputs(x), q(manual), a.bias)
    torch.nn.functional.linear(inputs(h), q(manual), b.bias).sum().backward()
    torch.testing.assert_close(tied[0].weight.grad, manual.grad, rtol=1e-6, atol=1e-6)


def test_copies_share_nothing() -> None:
    layer = one_layer()
    x = draw("copy").normal(4, 32)
    layer(x)
    twin = copy.deepcopy(layer)
    assert twin.weight_fake_quant._kept.value is None
    with torch.no_grad():
        twin.weight.mul_(2)
        y = twin(x)
    assert torch.equal(twin.weight_fake_quant(twin.weight).detach(), plain(twin))
    assert torch.equal(layer.weight_fake_quant(layer.weight).detach(), plain(layer))
    assert not torch.equal(y, layer(x))
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    assert set(layer.state_dict()) == {"weight", "bias"}  # names of a float Linear, nothing kept in a checkpoint


def test_inference_mode_and_no_grad() -> None:
    layer = one_layer()
    x = draw("inference").normal(4, 32)
    with torch.inference_mode():
        layer(x)
    assert layer.weight_fake_quant._kept.value is None  # an inference tensor in the buffer would break training
    with torch.no_grad():
        y = layer(x)
        assert not y.requires_grad
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert isinstance(layer.weight_fake_quant, WeightFakeQuantize)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_casts(dtype: torch.dtype) -> None:
    model = prepared(nn.Sequential(linear(32, 24)), W8A8Dynamic())
    x = draw("cast").normal(4, 32)
    model(x)
    if dtype == torch.float64:
        with pytest.raises(ValueError, match="float32"):
            model.double()(x.double())
        return
    model.to(dtype)
    y = model(x.to(dtype))
    assert y.dtype == dtype
    y.float().sum().backward()
    assert torch.equal(model[0].weight_fake_quant(model[0].weight).detach(), plain(model[0]))
