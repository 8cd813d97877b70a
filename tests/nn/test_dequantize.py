"""dequantize_: exact weights, the float model's keys and types, ties, fused activations, all or nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import pyquant
from pyquant import W4A16, W8A8Dynamic


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(20, 32, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(approximate="tanh"), nn.Linear(64, 32, bias=False))
        self.clip = nn.Sequential(nn.Linear(32, 32), nn.ReLU6())
        self.again = self.clip[0]
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(32, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.clip(self.body(self.embed(ids)))))


IDS = torch.arange(20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fuse", [False, True])
def test_the_float_model_with_the_weights_of_the_codes(dtype: torch.dtype, fuse: bool) -> None:
    plain = Net().to(dtype).eval()
    model = pyquant.quantize_(copy.deepcopy(plain), W8A8Dynamic(), embeddings=True)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (pyquant.QLinear, pyquant.QEmbedding))}
    exact = {n: m.to_float(torch.float32).weight.detach() for n, m in layers.items()}
    model = pyquant.fuse_(model) if fuse else model
    calls: list[int] = []
    model.head.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[operator]
    assert pyquant.dequantize_(model) is model
    assert [type(m) for m in model.modules() if not isinstance(m, nn.Hardtanh)] == [
        type(m) for m in plain.modules() if not isinstance(m, nn.Hardtanh)
    ]
    assert {n: (t.dtype, t.shape) for n, t in model.state_dict().items()} == {
        n: (t.dtype, t.shape) for n, t in plain.state_dict().items()
    }
    for name, weight in exact.items():
        assert torch.equal(model.get_parameter(f"{name}.weight"), weight.to(dtype)), name
    assert model.again is model.clip[0]  # type: ignore[index]
    assert model.head.weight is model.embed.weight  # type: ignore[union-attr]
    assert not model.training
    with torch.no_grad():
        got, want = model(IDS).float(), plain(IDS).float()
    assert float((got - want).norm() / want.norm()) < 0.02
    assert calls == [1]
    assert pyquant.quantize_(model, "W4A16(group_size=None)").head.scheme == W4A16(None)  # type: ignore[union-attr]


def test_weights_that_only_look_tied_are_not_tied() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(4, 8), "b": nn.Linear(8, 4, bias=False), "c": nn.Linear(8, 8)})
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    pyquant.dequantize_(pyquant.quantize_(model, W8A8Dynamic(), embeddings=True))
    assert model["a"].weight is not model["b"].weight


def test_chains_residuals_and_activations_of_their_own() -> None:
    chain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    model = pyquant.quantize_(copy.deepcopy(chain), pyquant.W8A8(), input_scales={"0": 0.02, "2": 0.02})
    pyquant.link_(pyquant.fuse_(model))
    assert model[0].scheme.outputs is not None or model[0].activation == "relu"  # type: ignore[index]
    back = pyquant.dequantize_(model)
    x = torch.randn(5, 8)
    assert float((back(x) - chain(x)).detach().norm() / chain(x).norm()) < 0.05
    own = nn.Sequential(pyquant.QLinear.from_float(nn.Linear(8, 8), W8A8Dynamic(), activation="silu"))
    want = torch.nn.functional.silu(own[0].to_float()(x))
    assert torch.equal(pyquant.dequantize_(own)(x), want)


def test_refusals_leave_the_model_alone() -> None:
    with pytest.raises(pyquant.ArgumentError, match="without quantised layers"):
        pyquant.dequantize_(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(pyquant.ArgumentError, match="use to_float"):
        pyquant.dequantize_(pyquant.QLinear(4, 4))
    with pytest.raises(pyquant.ArgumentError, match="Module"):
        pyquant.dequantize_(3)  # type: ignore[arg-type]
    waiting = nn.Sequential(pyquant.QLinear(4, 4), pyquant.QLinear(4, 4, scheme=pyquant.W8A8()))
    with pytest.raises(pyquant.ArgumentError, match=r"layer '1' without input_scale"):
        pyquant.dequantize_(waiting)
    assert all(isinstance(layer, pyquant.QLinear) for layer in waiting)


@pytest.mark.parametrize("config", ["W8A8Dynamic", W8A8Dynamic, W8A8Dynamic(), {"_default": "W8A8Dynamic"}])
def test_a_scheme_by_name_by_preset_or_itself(config: object) -> None:
    model = pyquant.quantize_(nn.Sequential(nn.Linear(8, 8)), config)  # type: ignore[arg-type]
    assert model[0].scheme == W8A8Dynamic()  # type: ignore[index]


@pytest.mark.parametrize("config", ["W9A9", int, print, nn.Linear, 8, "W4A16(grup=3)"])
def test_what_names_no_scheme_is_refused(config: object) -> None:
    with pytest.raises(pyquant.ArgumentError, match=r"W8A8Dynamic|group_size"):
        pyquant.quantize_(nn.Sequential(nn.Linear(8, 8)), config)  # type: ignore[arg-type]


def test_activations_that_were_moved_come_back_as_they_were() -> None:
    """Their class too: ReLU6 is no Hardtanh to who asks for it, nor transformers' GELU torch's."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU6(), nn.Linear(8, 8), nn.ReLU6(inplace=True), nn.Linear(8, 8)).eval()
    before = [model[1], model[3]]
    pyquant.fuse_(pyquant.quantize_(model, "W8A8Dynamic", check_speed=False))
    assert type(model[1]) is type(model[3]) is nn.Identity
    assert not any("moved" in key for key in model.state_dict())
    copied = copy.deepcopy(model)
    pyquant.dequantize_(model)
    assert model[1] is before[0]
    assert model[3] is before[1]
    pyquant.dequantize_(copied.train())
    assert type(copied[1]) is nn.ReLU6
    assert copied[3].inplace
    assert copied[1].training


def test_activations_of_other_libraries_come_back() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=40
    )
    model = transformers.BertModel(config).eval()
    before = model.encoder.layer[0].intermediate.intermediate_act_fn
    pyquant.fuse_(pyquant.quantize_(model, "W8A8Dynamic", check_speed=False))
    assert type(model.encoder.layer[0].intermediate.intermediate_act_fn) is nn.Identity
    pyquant.dequantize_(model)
    assert model.encoder.layer[0].intermediate.intermediate_act_fn is before


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A16(group_size=16)", "FP16"])
@pytest.mark.parametrize("simulated", [False, True])
def test_frozen_parameters_stay_frozen(scheme: str, simulated: bool) -> None:
    """A backbone that was frozen before quantisation is after it, and what is trained is; in a copy too."""
    if simulated and scheme == "FP16":
        return
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Conv2d(2, 4, 1), nn.Embedding(8, 16))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[3].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    assert len(set(before.values())) == 2
    if simulated:
        pyquant.convert_(pyquant.insert_fake_quantize_(model, pyquant.scheme_from_name(scheme)))
    else:
        pyquant.quantize_(model, scheme, embeddings=scheme != "FP16", check_speed=False)
    pyquant.dequantize_(copied := copy.deepcopy(model))
    for one in (copied, pyquant.dequantize_(model)):
        assert {name: p.requires_grad for name, p in one.named_parameters()} == before
