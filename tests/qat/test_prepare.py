"""prepare_qat_: from a float model, from a calibrated one, all of it or nothing, and warnings of bad starts."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from qat_models import calibrate, draw, linear, mlp, prepared, train
from torch import nn

from pyquant import (
    ArgumentError,
    FqnConfig,
    QATMonitor,
    QATWarning,
    QLinear,
    QScheme,
    QuantizationCalibrator,
    Recipe,
    SelectiveQuantizer,
    convert_,
    expose_linears_,
    prepare_qat_,
    register_linear_form,
)
from pyquant.core.presets import FP16, W4A4, W4A8, W8A8, W4A8Dynamic, W8A8Dynamic
from pyquant.errors import SchemeError
from pyquant.qat.guards import looks_untrained
from pyquant.qat.learned import LearnedFakeQuantize
from pyquant.qat.weight import WeightFakeQuantize
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.insert import insert_fake_quantize_
from pyquant.simulate.linear import FakeQuantLinear


def test_from_a_float_model() -> None:
    model = mlp()
    parameters = [id(p) for p in model.parameters()]
    names = set(model.state_dict())
    largest = replace(W4A8Dynamic(16), weights=replace(W4A8Dynamic(16).weights, calibrator="max"))
    assert prepared(model, {"0": largest, "_default": W8A8Dynamic()}) is model
    assert [id(p) for p in model.parameters()] == parameters  # an optimiser made before goes on working
    assert set(model.state_dict()) == names
    assert str(model[0].scheme) == "W4A8Dynamic(group_size=16), weights max"
    assert isinstance(model[0].weight_fake_quant, WeightFakeQuantize)
    fixed = set(prepared(mlp(), {"0": W4A8Dynamic(16), "_default": W8A8Dynamic()}).state_dict()) - names
    assert fixed
    assert all(name.startswith("0.weight_fake_quant.") for name in fixed)  # whose range the preset fixes


def test_layers_left_alone() -> None:
    model = nn.Sequential(linear(32, 32, "a"), linear(32, 32, "b"), linear(32, 16, "c"))
    prepared(model, FqnConfig({"0": None, "1": FP16(), "_default": W8A8Dynamic()}))
    assert [type(m) for m in model] == [nn.Linear, nn.Linear, FakeQuantLinear]
    model = mlp()
    prepared(model, W8A8Dynamic(), filter_fn=lambda m, name: name != "2")
    assert [type(m) for m in model] == [FakeQuantLinear, nn.ReLU, nn.Linear]


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", W8A8Dynamic, {"2": "W8A8Dynamic"}])
def test_a_scheme_by_its_name_as_in_quantize(scheme: object) -> None:
    assert str(prepared(mlp(), scheme)[2].scheme) == "W8A8Dynamic"
    with pytest.raises(SchemeError, match="W8A8Dynamic"):
        prepared(mlp(), "W8A8Dynamik")


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("forward", ["simulated", "int8"])
def test_from_a_calibrated_model(learn: bool, forward: str) -> None:
    """The documented way: SelectiveQuantizer, QuantizationCalibrator, training, conversion without calibration."""
    d = draw("ptq", learn, forward)
    batches = [d.normal(16, 32) for _ in range(4)]
    model = mlp()
    quantizer = SelectiveQuantizer(
        default_quant_modules_calibrator_weights="max",
        default_quant_modules_calibrator_inputs="histogram",
        default_per_channel_quant_weights=True,
        default_learn_amax=False,
        verbose=False,
    )
    quantizer.quantize_module(model)
    QuantizationCalibrator(verbose=False).calibrate_model(
        model, method="percentile", calib_data_loader=batches, num_calib_batches=4, percentile=99.9
    )
    ranges = [model[i].input_fake_quant.scale.clone() for i in (0, 2)]
    y = model(batches[0]).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a good start warns of nothing
        prepare_qat_(model, learn_amax=learn, forward=forward)
    assert all(torch.equal(model[i].input_fake_quant.scale, r) for i, r in zip((0, 2), ranges, strict=True))
    torch.testing.assert_close(model(batches[0]).detach(), y, rtol=1e-5, atol=1e-5)
    assert isinstance(model[0].input_fake_quant, LearnedFakeQuantize) == learn
    losses = train(model, batches[0], d.normal(16, 16) * 0.2, 10, lr=0.05)
    assert losses[-1] < losses[0]
    y = model(batches[0]).detach()
    convert_(model)
    assert isinstance(model[0], QLinear)
    torch.testing.assert_close(model(batches[0]), y, rtol=1e-4, atol=1e-4)
    if not learn:
        assert torch.equal(model[0].input_scale.reshape(-1), ranges[0].reshape(-1))


def test_a_config_for_a_simulating_model_must_agree() -> None:
    model = insert_fake_quantize_(mlp(), W8A8Dynamic())
    with pytest.raises(ArgumentError, match=r"W4A8Dynamic.* for '0', which simulates W8A8Dynamic"):
        prepare_qat_(model, W4A8Dynamic(16))
    with pytest.raises(ArgumentError, match="filter_fn"):
        prepare_qat_(model, filter_fn=lambda m, n: True)
    assert type(model[0].weight_fake_quant) is FakeQuantize
    prepare_qat_(model, W8A8Dynamic())
    assert isinstance(model[0].weight_fake_quant, WeightFakeQuantize)


def test_wrong_models_and_configs() -> None:
    for model, config, match in (
        (nn.Linear(4, 4), W8A8Dynamic(), "model"),
        (nn.Sequential(nn.ReLU()), W8A8Dynamic(), "model"),
        ("model", W8A8Dynamic(), "model"),
        (mlp(), None, "config"),
        (mlp(), 8, "config"),
        (mlp(), "W8A9", "scheme"),
        (mlp(), {"nothing": W8A8Dynamic()}, "config"),
        (mlp(), {"0": None}, "config"),
    ):
        with pytest.raises(ArgumentError, match=match):
            prepared(model, config)


def test_all_or_nothing() -> None:
    """An exception in any layer, at any point, leaves model and state as they were."""
    for start in ("float", "simulating"):
        model = nn.Sequential(*(linear(32, 32, i) for i in range(4)))
        if start == "simulating":
            insert_fake_quantize_(model, W8A8Dynamic())
        before = dict(model.named_modules())
        state = {k: v.clone() for k, v in model.state_dict().items()}
        for k in range(4):
            calls = 0

            def wish(name: str, layer: nn.Module, stop: int = k) -> bool:
                nonlocal calls
                calls += 1
                if calls > 2 * stop:
                    raise KeyboardInterrupt
                return True

            with pytest.raises(KeyboardInterrupt):
                prepare_qat_(model, None if start == "simulating" else W8A8Dynamic(), learn_amax=wish)
            assert dict(model.named_modules()) == before
            assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items())
        prepared(model, None if start == "simulating" else W8A8Dynamic(), learn_amax=True)


def test_from_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    content = {"default": "W8A8", "layers": {"2": "W4A8Dynamic(group_size=16)"}, "selective_quantizer_params": {}}
    for learn in (False, True):
        content["selective_quantizer_params"] = {"learn_amax": learn, "calibrator_w": "max"}
        file.write_text(json.dumps(content))
        for config in (file, str(file), Recipe.load(file)):
            model = prepared(mlp(), config)
            assert str(model[2].scheme) == "W4A8Dynamic(group_size=16), weights max"
            assert model[0].scheme.inputs.calibrator == "percentile"
            assert isinstance(model[0].weight_fake_quant, LearnedFakeQuantize) == learn
        model = prepared(mlp(), file, learn_amax=["2"])  # an argument is stronger than the file
        assert not isinstance(model[0].weight_fake_quant, LearnedFakeQuantize)
        assert isinstance(model[2].weight_fake_quant, LearnedFakeQuantize)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("scheme", [W8A8(), W4A8(None), W8A8Dynamic()], ids=str)
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_train_as_well(scheme: QScheme, learn: bool, kernel: int) -> None:
    d = draw("conv", str(scheme), learn, kernel)
    conv = nn.Conv2d(4, 6, kernel, padding=kernel // 2)
    with torch.no_grad():
        conv.weight.copy_(d.normal(*conv.weight.shape) * 0.3)
    x, t = d.normal(2, 4, 5, 5), d.normal(2, 6, 5, 5) * 0.3
    model = prepared(nn.Sequential(conv), scheme, x, learn_amax=learn)
    with QATMonitor(model) as monitor:
        losses = train(model, x, t, 8, lr=0.01 if learn else 0.05)
        monitor(0)
    assert all(row["scale"] is not None and row["clip_share"] is not None for row in monitor.rows)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        before = model(x)
        conv.weight.mul_(1.5)
        assert not torch.equal(model(x), before)
    y = model(x).detach()
    convert_(model)
    torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-4)
    with pytest.raises(ArgumentError, match="only Linear layers"):
        prepared(nn.Sequential(nn.Conv2d(4, 6, 1)), W8A8(), forward="int8")


def test_hooks_and_modes_survive() -> None:
    model = mlp().eval()
    seen = []
    handle = model[0].register_forward_hook(lambda *_: seen.append(1))
    prepared(model, W8A8Dynamic(), forward="int8")
    assert not model[0].training
    model(draw("hook").normal(2, 32))
    handle.remove()
    model(draw("hook").normal(2, 32))
    assert seen == [1]


def test_encoder_layers_take_the_simulated_path() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True).eval()
    model = nn.Sequential(layer)
    x = draw("encoder").normal(2, 5, 32)
    with torch.no_grad():
        y = model(x)
        prepared(model, W4A8Dynamic(16))
        assert not torch.equal(model(x), y)


def test_warnings_of_bad_starts() -> None:
    with pytest.warns(QATWarning, match=r"without calibration: 0\.input, 2\.input"):
        model = prepare_qat_(mlp(), W8A8())
    with pytest.raises(ArgumentError, match="not calibrated"):
        model(torch.zeros(1, 32))
    with pytest.warns(QATWarning, match="with 4 bits the range decides"):
        prepare_qat_(mlp(), W4A4())
    fresh = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    with pytest.warns(QATWarning, match=r"untrained .*: 0, 2; 4 bits"):
        prepare_qat_(copy.deepcopy(fresh), W4A8Dynamic(16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_qat_(copy.deepcopy(fresh), W8A8Dynamic())  # 8 bits train from anywhere
        prepare_qat_(mlp(), W4A8Dynamic(16))  # trained weights
        model = calibrate(prepared(mlp(), W4A4()), draw("w").normal(4, 32))
        prepare_qat_(model)  # calibrated by now


def test_untrained_weights_are_recognised() -> None:
    shapes = [(k, n) for k in (16, 64, 300) for n in (32, 128)] * 200
    fresh = [looks_untrained(nn.Linear(k, n).weight.detach()) for k, n in shapes]
    assert all(fresh)
    conv = nn.Conv2d(8, 32, 3)
    assert looks_untrained(conv.weight.detach())
    assert not looks_untrained(nn.Linear(4, 4).weight.detach())  # too few to tell
    assert not looks_untrained(draw("trained").normal(64, 64) * 0.05)
    layer = nn.Linear(64, 64)
    train(layer, draw("t").normal(64, 64), draw("u").normal(64, 64), 30, lr=0.5)
    assert not looks_untrained(layer.weight.detach())


class Halved(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (0.5 * self.weight).T + self.bias


def test_a_layer_that_can_be_rewritten_is_refused_with_that_way() -> None:
    model = nn.Sequential(Halved(8, 8))
    with pytest.raises(ArgumentError) as caught:
        prepare_qat_(model, W8A8Dynamic())
    assert "expose_linears_" not in str(caught.value)
    register_linear_form(Halved, lambda layer: nn.Linear(layer.in_features, layer.out_features))
    with pytest.raises(
        ArgumentError, match=r"forward of its own; allowed: rewrite it with pyquant.expose_linears_, or"
    ):
        prepare_qat_(model, W8A8Dynamic())
    prepare_qat_(expose_linears_(model), W8A8Dynamic())
