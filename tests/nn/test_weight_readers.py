"""Layers that a model never calls: another module multiplies by their weights itself, in floating point. None of the
flows takes them for layers of integers in silence."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import pyquant
from pyquant import QLinear, W8A8Dynamic
from pyquant.nn.flow import Calls


class Windows(nn.Module):
    """Reads both weights, as torchvision's ShiftedWindowAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj: nn.Linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        return F.linear((q @ k.transpose(-1, -2)).softmax(-1) @ v, self.proj.weight, bias=self.proj.bias)


class ByAMethod(nn.Module):
    """Reads the weights in a method that forward calls, as transformers' WavLMAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.k = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self._both(x)

    def _both(self, x: Tensor) -> Tensor:
        weight = torch.cat((self.q.weight, self.k.weight))
        return F.linear(x, weight, torch.cat((self.q.bias, self.k.bias)))[..., :16]


class Convolves(nn.Module):
    """Asks for the class of its layer, and speaks of it in a comment, as Wav2Vec2's TDNNLayer does."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.kernel, nn.Linear):
            x = x + 0
        # `self.kernel` is a convolution here
        weight = self.kernel.weight.view(16, 3, 16).transpose(1, 2)
        return F.conv1d(x.transpose(1, 2), weight, self.kernel.bias, padding=1).transpose(1, 2)


class Sometimes(nn.Module):
    """Calls its layer or reads its weight, as timm's EvaAttention does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.own = nn.Linear(16, 16), True

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.fc.weight, self.fc.bias) if self.own else self.fc(x)


class Switched(nn.Module):
    """Calls its layer where a switch is on, as timm's attention of BEiT, EVA02 and SwinV2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.separate = nn.Linear(16, 16, bias=False), nn.Linear(16, 16), False
        self.q_bias: nn.Parameter | None = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        if self.q_bias is None:
            qkv = self.qkv(x)
        else:
            qkv_bias = torch.cat((self.q_bias,))
            if self.separate:
                qkv = self.qkv(x)
                qkv += qkv_bias
            else:
                qkv = F.linear(x, weight=self.qkv.weight, bias=qkv_bias)
        return self.proj(qkv)


class QuickWay(nn.Module):
    """Reads the weight in forward and calls the layer elsewhere, as torch's TransformerEncoderLayer does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc: nn.Module = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.fc.weight is None else self._block(x)

    def _block(self, x: Tensor) -> Tensor:
        return self.fc(x)


class ByAnotherName(QuickWay):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.fc.weight is None else super()._block(x)


class AsksForTheType(nn.Module):
    """Looks at the weight's type alone, and calls the layer, as T5 does; and another one that calls it by a name."""

    def __init__(self) -> None:
        super().__init__()
        self.wo, self.wi = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.wi
        return self.wo(layer(x.to(self.wo.weight.dtype)).to(self.wi.weight.device))


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn, self.mlp = attention, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn(x))


class Mixer(nn.Module):
    """Reads the weight unless its config says that it is quantised, as transformers' Jamba and FalconMamba do."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config, self.fc, self.out = config, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self.config, "_is_quantized"):
            x = self.fc(x) - self.fc.bias
        else:
            x = x @ self.fc.weight.mT
        return self.out(x)


X = torch.randn(2, 5, 16)
READ = "belongs to Windows, whose forward reads its weight and never calls it"


def test_weights_that_a_forward_reads_stay_and_are_named() -> None:
    model = Model(Windows()).eval()
    with pytest.warns(pyquant.QuantizationWarning, match=READ):
        pyquant.quantize_(model, W8A8Dynamic(), check_speed=False)
    told = {one.name: one for one in pyquant.quantization_report(model)}
    assert (told["attn.qkv"].scheme, told["attn.qkv"].reason) == ("float", READ)
    assert (told["attn.proj"].scheme, told["mlp"].scheme) == ("float", "W8A8Dynamic")
    model(X)


def test_static_ranges_of_the_others_are_found() -> None:
    model = Model(Windows()).eval()
    with pytest.warns(pyquant.QuantizationWarning, match=READ):
        pyquant.quantize_(model, "W8A8", data=[X], check_speed=False)
    assert type(model.attn.qkv) is nn.Linear
    assert isinstance(model.mlp, QLinear)


def test_what_training_saw_is_what_is_deployed() -> None:
    model = Model(Windows())
    with pytest.warns(pyquant.QuantizationWarning, match=READ):
        pyquant.prepare_qat_(model, W8A8Dynamic())
    simulated = model(X)
    pyquant.convert_(model.eval())
    torch.testing.assert_close(model(X), simulated, rtol=1e-5, atol=1e-6)


def test_codes_that_are_multiplied_as_floats_anyway_are_made() -> None:
    model = pyquant.quantize_(Model(Windows()).eval(), "W8A16", check_speed=False)
    assert isinstance(model.attn.qkv, QLinear)


def test_a_layer_that_is_named_is_refused() -> None:
    with pytest.raises(pyquant.ArgumentError, match=f"layer 'attn.qkv' {READ}; allowed: leave it out .* 16-bit scheme"):
        pyquant.quantize_(Model(Windows()), {"attn.qkv": W8A8Dynamic(), "mlp": W8A8Dynamic()})


@pytest.mark.parametrize("attention", [AsksForTheType, Sometimes, QuickWay, ByAnotherName])
def test_layers_that_are_or_may_be_called_are_quantised(attention: type[nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        model = pyquant.quantize_(Model(attention()).eval(), W8A8Dynamic(), check_speed=False)
    assert all(isinstance(layer, QLinear) for layer in model.attn.children())


def mixers() -> tuple[nn.Sequential, SimpleNamespace]:
    torch.manual_seed(0)
    config = SimpleNamespace(hidden_size=16)
    return nn.Sequential(Mixer(config), Mixer(config)).eval(), config


def test_a_config_says_that_its_layers_are_to_be_called() -> None:
    for scheme, data in (("W8A8Dynamic", None), ("W8A8", [X])):
        model, config = mixers()
        floats = model(X)
        pyquant.quantize_(model, scheme, data=data, check_speed=X)
        assert vars(config) == {"hidden_size": 16, "_is_quantized": True}
        assert all(one.use != "multiplied" for one in pyquant.trace_floats(model, X))
        torch.testing.assert_close(model(X), floats, atol=0.05, rtol=0.05)
        pyquant.dequantize_(model)
        assert vars(config) == {"hidden_size": 16}
        assert not any("pyquant" in name for module in model.modules() for name in module.__dict__)


def test_a_config_is_as_before_where_nothing_was_quantised() -> None:
    model, config = mixers()
    with pytest.raises(pyquant.NonFiniteError):
        pyquant.quantize_(model, "W8A8", data=[torch.full_like(X, float("nan"))])
    assert vars(config) == {"hidden_size": 16}
    config._is_quantized = True  # said by transformers: not ours to take away
    pyquant.dequantize_(pyquant.quantize_(model, "W8A8Dynamic", check_speed=False))
    assert config._is_quantized


def test_a_config_stays_while_a_layer_of_it_is_quantised() -> None:
    model, config = mixers()
    pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    pyquant.dequantize_(model[0])
    assert config._is_quantized
    assert not pyquant.trace_floats(model[1], X)
    pyquant.dequantize_(model)
    assert vars(config) == {"hidden_size": 16}


def test_a_run_names_what_it_did_not_call() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pyquant.quantize_(Model(Sometimes()).eval(), W8A8Dynamic(), check_speed=X)
    (text,) = [str(one.message) for one in told if "not called" in str(one.message)]
    assert "1 quantised layers were not called: attn.fc: these inputs do not reach them, or another module" in text
    report = pyquant.auto_(Model(Sometimes()).eval(), X, seconds=0.05)
    assert report.unreached == ("attn.fc",)
    assert "not called: attn.fc: these inputs" in str(report)
    called = Model(Sometimes()).eval()
    called.attn.own = False
    assert pyquant.auto_(called, X, seconds=0.05).unreached == ()


def test_calibration_names_ways_out() -> None:
    with pytest.raises(pyquant.CalibrationError) as caught:
        pyquant.quantize_(Model(Sometimes()).eval(), "W8A8", data=[X], check_speed=False)
    assert "1 of 2 layers saw no data: attn.fc.input. The model never called them in eval mode" in str(caught.value)
    assert "filter_fn, None in the config" in str(caught.value)


def test_hooks_that_were_interrupted_are_taken_out_again() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    model[1].register_forward_hook = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt), Calls(model).watched():
        pass
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class OwnForward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias).relu()


@pytest.mark.parametrize(
    "flow",
    [
        lambda model: pyquant.quantize_(model, "W8A8Dynamic", check_speed=False),
        lambda model: pyquant.prepare_qat_(model, "W8A8Dynamic"),
        lambda model: pyquant.insert_fake_quantize_(model, "W8A8Dynamic"),
        lambda model: pyquant.SelectiveQuantizer().quantize_module(model),
        lambda model: pyquant.LearnedPrecision(model, target=0.5, steps=10),
    ],
    ids=["quantize_", "prepare_qat_", "insert_fake_quantize_", "SelectiveQuantizer", "LearnedPrecision"],
)
def test_a_forward_of_its_own_is_left_and_named_by_every_flow(flow) -> None:
    model = nn.Sequential(nn.Linear(8, 8), OwnForward(8, 8))
    with pytest.warns(pyquant.QuantizationWarning, match="OwnForward with a forward of its own"):
        flow(model)
    assert type(model[0]) is not nn.Linear
    assert type(model[1]) is OwnForward


def test_a_model_in_which_nothing_can_be_simulated_says_why() -> None:
    with pytest.raises(pyquant.ArgumentError, match="OwnForward with a forward of its own"):
        pyquant.insert_fake_quantize_(nn.Sequential(OwnForward(8, 8)), "W8A8Dynamic")


@pytest.mark.parametrize("prepare", [pyquant.quantize_, pyquant.prepare_qat_])
def test_a_switch_between_both_ways_is_set_and_comes_back(prepare: Any) -> None:
    model = Model(Switched()).eval()
    before = model(X)
    prepare(model, W8A8Dynamic())
    called: list[str] = []
    model.attn.qkv.register_forward_hook(lambda *_: called.append("qkv"))
    assert_close(model(X), before, atol=0.1, rtol=0.1)
    assert (called, model.attn.separate) == (["qkv"], True)
    if prepare is pyquant.quantize_:
        assert {one.scheme for one in pyquant.quantization_report(model)} == {"W8A8Dynamic"}
        pyquant.dequantize_(model)
        assert (model.attn.separate, [name for name in vars(model.attn) if name.startswith("pyquant")]) == (False, [])


def test_a_switch_stays_where_its_layer_does() -> None:
    model = Model(Switched()).eval()
    pyquant.quantize_(model, {"attn.proj": W8A8Dynamic()})
    assert model.attn.separate is False
    model = Model(Switched()).eval()
    model.attn.separate = True
    pyquant.dequantize_(pyquant.quantize_(model, W8A8Dynamic()))
    assert model.attn.separate is True


@pytest.mark.parametrize(("kind", "names"), [(ByAMethod, {"attn.q", "attn.k"}), (Convolves, {"attn.kernel"})])
def test_readers_in_methods_and_beside_questions_are_seen(kind: Any, names: set[str]) -> None:
    model = Model(kind()).eval()
    want = model.attn(X)
    with pytest.warns(pyquant.QuantizationWarning, match="whose forward reads its weight and never calls it"):
        pyquant.quantize_(model, "W8A8", data=[X], check_speed=False)
    assert {one.name for one in pyquant.quantization_report(model) if one.scheme == "float"} == names
    assert torch.equal(model.attn(X), want)


class Clamps(nn.Module):
    """Changes one of its weights while it trains, as Gemma3n's AltUp does; sets another where it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight.data.zero_()

    def reset_parameters(self) -> None:
        self.other.weight.data.normal_()

    def mix(self, x: Tensor) -> Tensor:
        if self.training:
            self.mixed.weight.data.clamp_(-0.1, 0.1)
        return self.mixed(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.mix(x))


def test_a_layer_whose_weight_its_parent_changes_stays_in_floating_point() -> None:
    with pytest.warns(
        pyquant.QuantizationWarning, match="mixed .*belongs to Clamps, which changes its weight in place"
    ):
        model = pyquant.quantize_(nn.Sequential(Clamps()), "W8A8Dynamic", check_speed=False)
    assert type(model[0].mixed) is nn.Linear
    assert type(model[0].other) is pyquant.QLinear
    model.train()(torch.randn(2, 8)).sum().backward()
    assert float(model[0].mixed.weight.detach().abs().max()) <= 0.1 + 1e-6
    with pytest.raises(pyquant.errors.PyquantError, match="changes its weight in place"):
        pyquant.quantize_(nn.Sequential(Clamps()), {"0.mixed": "W8A8Dynamic"}, check_speed=False)
