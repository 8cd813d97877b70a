"""Fake quantisation goes into a model and out of it, or becomes integer layers with the very same codes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import pyquant
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.insert import convert_, insert_fake_quantize_, remove_fake_quantize_
from pyquant.simulate.kinds import SIMULATED, is_simulated


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))


CONFIGS: dict[str, Callable[[], QScheme]] = {
    "W8A8": pyquant.W8A8,
    "W8A8 affine": lambda: pyquant.W8A8(symmetric_inputs=False),
    "W8A8Dynamic": pyquant.W8A8Dynamic,
    "W4A8": lambda: pyquant.W4A8(group_size=8),
    "W4A8TwoLevel": lambda: pyquant.W4A8TwoLevel(group_size=8),
    "W4A4Dynamic": pyquant.W4A4Dynamic,
    "W8A16": pyquant.W8A16,
    "per tensor": lambda: QScheme(TensorScheme(), TensorScheme()),
    "mse": lambda: QScheme(TensorScheme(bits=4, granularity="per_channel", calibrator="mse"), TensorScheme()),
    "mse groups": lambda: QScheme(
        TensorScheme(bits=4, granularity="per_group", group_size=8, calibrator="mse"),
        TensorScheme(calibrator="entropy"),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_converted_layers_have_the_codes_of_the_simulation(name: str) -> None:
    net = insert_fake_quantize_(model(), CONFIGS[name]())
    x = torch.randn(64, 24)
    calibrate_(net, [x], 1)
    simulated = net(x)
    weights = {i: net[i].weight_fake_quant(net[i].weight).detach() for i in (0, 2, 4)}
    convert_(net)
    assert [type(net[i]).__name__ for i in range(5)] == ["QLinear", "ReLU"] * 2 + ["QLinear"]
    for i, real in weights.items():
        assert torch.equal(net[i].dequantised_weight(), real)
    assert torch.allclose(net(x), simulated, rtol=1e-4, atol=2e-2 if "A4" in name else 1e-2)


def test_max_calibrated_codes_equal_those_of_quantize_() -> None:
    a, b = insert_fake_quantize_(model(), pyquant.W8A8Dynamic()), pyquant.quantize_(model(), pyquant.W8A8Dynamic())
    convert_(a)
    x = torch.randn(7, 24)
    assert torch.equal(a[0].weight, b[0].weight)
    assert torch.equal(a(x), b(x))


def test_parameters_stay_the_same_objects() -> None:
    net = model()
    before = dict(net.named_parameters())
    insert_fake_quantize_(net, pyquant.W8A8())
    assert {n: id(p) for n, p in net.named_parameters()} == {n: id(p) for n, p in before.items()}
    remove_fake_quantize_(net)
    assert not any(is_simulated(m) for m in net.modules())
    assert {n: id(p) for n, p in net.named_parameters()} == {n: id(p) for n, p in before.items()}


def test_shared_modules_stay_shared() -> None:
    net = nn.ModuleDict({"a": nn.Linear(8, 8)})
    net["b"] = net["a"]
    insert_fake_quantize_(net, pyquant.W8A8Dynamic())
    assert net["a"] is net["b"]
    convert_(net)
    assert net["a"] is net["b"]


def test_layers_of_16_bits_and_of_none_are_left_alone() -> None:
    net = insert_fake_quantize_(model(), {"0": None, "2": pyquant.FP16(), "_default": pyquant.W8A8Dynamic()})
    assert [is_simulated(net[i]) for i in (0, 2, 4)] == [False, False, True]


def test_encoder_layers_take_the_path_that_calls_their_linears() -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    x = torch.randn(2, 5, 16)
    plain = net(x)
    insert_fake_quantize_(net, pyquant.W4A4Dynamic())
    with torch.no_grad():
        assert not torch.allclose(net(x), plain, atol=1e-3), "the fused path of torch would read the float weights"


@pytest.mark.parametrize("at", [0, 2, 4])
def test_uncalibrated_layers_are_named_and_nothing_changes(at: int) -> None:
    net = insert_fake_quantize_(model(), pyquant.W8A8())
    for i in (0, 2, 4):
        if i != at:
            net[i].input_fake_quant.set_qparams(torch.tensor([0.1]))
    with pytest.raises(ArgumentError, match=f"'{at}: scale'"):
        convert_(net)
    assert all(is_simulated(net[i]) for i in (0, 2, 4))


@pytest.mark.parametrize(
    "scheme", ["W8A8Dynamic", "W4A8Dynamic(group_size=8)", "W4A16(group_size=8)", "W4A8TwoLevelDynamic(group_size=8)"]
)
@pytest.mark.parametrize("learn_amax", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_do_not_become_codes(scheme: str, learn_amax: bool, value: float) -> None:
    net = pyquant.prepare_qat_(model(), scheme, learn_amax=learn_amax and "TwoLevel" not in scheme)
    with torch.no_grad():
        net[2].weight[3, 5] = value
    with pytest.raises(NonFiniteError, match=rf"'2: weight'.*{value} at \[3, 5\]"):
        convert_(net)
    assert all(is_simulated(net[i]) for i in (0, 2, 4))


def test_convolutions_with_weights_that_are_not_finite_are_named() -> None:
    net = insert_fake_quantize_(nn.Sequential(nn.Conv2d(2, 3, 3)), "W4A8Dynamic(group_size=None)")
    with torch.no_grad():
        net[0].weight[1].fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"'0: weight'.*nan at \[1, 0\]"):
        convert_(net)


@pytest.mark.parametrize("tensor", ["weight", "bias"])
def test_a_layer_pruned_since_is_refused_until_the_pruning_is_removed(tensor: str) -> None:
    """Its weights are computed before each forward: those that it holds may be older than the last step."""
    net = insert_fake_quantize_(model(), pyquant.W8A8Dynamic())
    prune.l1_unstructured(net[2], tensor, 0.5)
    net(torch.randn(4, 24)).sum().backward()
    for leave in (convert_, remove_fake_quantize_):
        with pytest.raises(ArgumentError, match=rf"layer '2' has a computed {tensor}.*pruning.*prune\.remove"):
            leave(net)
    assert all(is_simulated(net[i]) for i in (0, 2, 4))
    prune.remove(net[2], tensor)
    zeros = getattr(net[2], tensor).detach() == 0
    assert zeros.any()
    convert_(net)
    assert not (net[2].dequantised_weight() if tensor == "weight" else net[2].bias_)[zeros].any()
    assert net(torch.randn(4, 24)).isfinite().all()


def test_a_layer_parametrised_since_is_converted_with_the_weights_that_it_computes() -> None:
    net = insert_fake_quantize_(model(), pyquant.W8A8Dynamic())
    parametrizations.weight_norm(net[2])
    with torch.no_grad():
        net[2].parametrizations.weight.original0.mul_(2)
        real = net[2].weight_fake_quant(net[2].weight)
    convert_(net)
    assert torch.equal(net[2].dequantised_weight(), real)


def test_refuses_what_it_cannot_do() -> None:
    net = insert_fake_quantize_(model(), pyquant.W8A8Dynamic())
    with pytest.raises(ArgumentError, match="fake quantisation"):
        insert_fake_quantize_(net, pyquant.W8A8Dynamic())
    with pytest.raises(ArgumentError, match="without fake"):
        convert_(model())
    with pytest.raises(ArgumentError, match="without layers"):
        insert_fake_quantize_(nn.Sequential(nn.ReLU()), pyquant.W8A8())
    with pytest.raises(ArgumentError, match="no layer for 'nope'"):
        insert_fake_quantize_(model(), {"nope": pyquant.W8A8()})
    with pytest.raises(ArgumentError, match="contains"):
        insert_fake_quantize_(nn.Linear(2, 2), pyquant.W8A8())


def test_every_kind_is_simulated_by_a_class_with_the_protocol() -> None:
    for twin in SIMULATED.values():
        assert all(hasattr(twin, name) for name in ("from_float", "fake_quantizers", "to_quantized", "to_float"))


def test_training_moves_the_weights_through_the_rounding() -> None:
    net = insert_fake_quantize_(model(), pyquant.W4A8(group_size=8))
    x = torch.randn(32, 24)
    calibrate_(net, [x], 1)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(net(x), torch.ones(32, 5))
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
