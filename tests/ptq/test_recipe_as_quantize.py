"""One content as a mapping, a --config file, a --recipe file and a Recipe gives the same codes."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.cli.main import main
from pyquant.nn.forms import register_linear_form
from pyquant.recipe import Recipe


class Transposed(nn.Module):
    """x @ weight + bias, as transformers' Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def _back(linear: nn.Linear, module: Transposed) -> None:
    module.weight, module.bias = nn.Parameter(linear.weight.detach().t().contiguous()), linear.bias


def _linear_of(module: Transposed) -> nn.Linear:
    linear = nn.Linear(16, 24)
    linear.weight, linear.bias = nn.Parameter(module.weight.detach().t()), module.bias
    return linear


register_linear_form(Transposed, _linear_of, _back)


class Decoder(nn.Module):
    """Embedding tied to lm_head, attention, LSTM, a class with a linear form."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.attn = nn.Embedding(32, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.fc, self.rnn, self.conv = nn.Linear(16, 16), nn.LSTM(16, 8, batch_first=True), Transposed()
        self.out, self.lm_head = nn.Linear(8, 4), nn.Linear(16, 32, bias=False)
        self.lm_head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        h = self.emb(ids)
        h = self.fc(h + self.attn(h, h, h, need_weights=False)[0])
        return self.lm_head(h), self.out(self.rnn(h)[0]), self.conv(h)


def plain() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8)).eval()


def decoder() -> nn.Module:
    torch.manual_seed(2)
    return Decoder().eval()


class Tied(nn.Module):
    """Linears of one weight: two that see the same numbers, one that sees others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.b.weight = self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x) + self.b(x))


def tied() -> nn.Module:
    torch.manual_seed(5)
    return Tied().eval()


def rows() -> list[Tensor]:
    return list(torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(3)))


def tokens() -> list[Tensor]:
    return list(torch.randint(0, 32, (4, 2, 5), generator=torch.Generator().manual_seed(4)))


CASES: list[tuple[str, dict[str, Any], bool]] = [
    ("plain", {"default": "W8A8Dynamic"}, False),
    ("plain", {"default": "W8A8", "layers": {"2": "W4A8(group_size=8)"}}, True),
    ("plain", {"layers": {"0": "W8A8Dynamic"}}, False),
    ("tied", {"default": "W8A8Dynamic"}, False),
    ("tied", {"default": "W8A16", "layers": {"c": "W8A8Dynamic"}}, False),
    ("tied", {"default": "W8A8"}, True),
    ("tied", {"default": "W8A8Dynamic", "layers": {"c": "W8A8"}}, True),
    ("decoder", {"default": "W8A8Dynamic"}, False),
    ("decoder", {"default": "W8A8Dynamic", "embeddings": True}, False),
    ("decoder", {"default": "W8A8Dynamic", "embeddings": True, "layers": {"lm_*": "W8A16"}}, False),
    ("decoder", {"default": "W8A8", "layers": {"fc": "FP16", "out": "W8A8Dynamic", "attn.q_proj": None}}, True),
    ("decoder", {"default": "W8A8", "embeddings": True, "heads": True, "layers": {"conv": None}}, True),
    ("decoder", {"layers": {"attn": "W8A8Dynamic", "rnn": "W4A8Dynamic(group_size=8)"}}, False),
]


def flat(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert [(n, type(m)) for n, m in one.named_modules()] == [(n, type(m)) for n, m in other.named_modules()]
    first, second = flat(one), flat(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert pyquant.quantization_report(one) == pyquant.quantization_report(other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "content", "has_data"), CASES)
def test_every_way_gives_the_same(
    name: str, content: dict[str, Any], has_data: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, batches = {"plain": (plain, rows), "tied": (tied, rows), "decoder": (decoder, tokens)}[name]
    data = {"data": batches()} if has_data else {}
    config = {**content.get("layers", {}), **({"_default": content["default"]} if "default" in content else {})}
    switches = {key: content[key] for key in ("embeddings", "heads") if key in content}
    expected = pyquant.quantize_(build(), config, **switches, **data)
    assert any(isinstance(module, pyquant.QLinear) for module in expected.modules())

    said = {"default": None, "heads": None, "selective_quantizer_params": {"calibrator_i": "max"}}
    whole = {**said, "calib_params": {"num_calib_batches": 4}, **content}
    assert_same(pyquant.quantize_(build(), Recipe.from_dict(whole), **data), expected)
    (tmp_path / "recipe.json").write_text(json.dumps(whole))
    (tmp_path / "config.json").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "models_here", sys.modules[__name__])
    for option in ("recipe", "config"):
        saved: list[nn.Module] = []
        monkeypatch.setattr(pyquant, "save_pretrained", lambda model, *_, saved=saved, **__: saved.append(model))
        words = ["quantize", f"models_here:{build.__name__}", f"--{option}", f"{option}.json", "--out", "q"]
        assert main(words + (["--data", f"models_here:{batches.__name__}"] if has_data else [])) == 0
        assert_same(saved[0], expected)


def test_linears_of_one_weight_share_a_twin_where_it_is_the_same() -> None:
    """Also where simulation was put in first; a hook is run by the layer that it was registered on, and no other."""
    for config in ("W8A8Dynamic", Recipe.from_dict({"default": "W8A8Dynamic"})):
        new = pyquant.quantize_(tied(), config)
        assert new.a is new.b is new.c
        model, seen = tied(), []
        model.a.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        new = pyquant.quantize_(model, config)
        assert new.a is not new.b is new.c
        new(torch.ones(2, 16))
        assert seen == [1]
    for config in ("W8A8", Recipe.from_dict({"default": "W8A8", "calib_params": {"num_calib_batches": 4}})):
        new = pyquant.quantize_(tied(), config, data=rows())
        assert new.a is new.b is not new.c  # the input of c has another range
    simulating = pyquant.insert_fake_quantize_(tied(), {"a": "W8A8Dynamic", "b": "W8A8Dynamic", "c": "W8A16"})
    new = pyquant.convert_(simulating)
    assert new.a is new.b is not new.c


@pytest.mark.filterwarnings("ignore")
def test_dequantised_models_are_what_they_were() -> None:
    recipe = Recipe.from_dict({"default": "W8A8Dynamic", "embeddings": True})
    before = [type(module) for module in decoder().modules()]
    model = pyquant.quantize_(decoder(), recipe)
    assert nn.MultiheadAttention not in [type(module) for module in model.modules()]
    assert [type(module) for module in pyquant.dequantize_(model).modules()] == before


class Named(nn.Linear):
    """A Linear of another name, whose forward is nn.Linear's."""


@pytest.mark.filterwarnings("ignore")
def test_every_way_remembers_what_stood_there_and_why_a_layer_stays() -> None:
    model = nn.Sequential(Named(16, 16), nn.Linear(24, 16))
    config = {"default": "W4A8Dynamic(group_size=16)", "on_indivisible": "skip"}
    ways = [
        pyquant.quantize_(copy.deepcopy(model), config["default"], on_indivisible="skip"),
        pyquant.quantize_(copy.deepcopy(model), Recipe.from_dict(config)),
        pyquant.convert_(pyquant.insert_fake_quantize_(copy.deepcopy(model), config["default"], on_indivisible="skip")),
    ]
    for new in ways:
        assert_same(new, ways[0])
        assert "does not divide K = 24" in pyquant.quantization_report(new)[1].reason
        assert type(pyquant.dequantize_(copy.deepcopy(new))[0]) is Named


@pytest.mark.filterwarnings("ignore")
def test_a_recipe_without_heads_quantises_heads_and_adapters() -> None:
    model = decoder()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("fc"))
    for heads, kinds in (("everything", (True, True)), (True, (True, False)), (None, (False, False))):
        new = pyquant.quantize_(copy.deepcopy(model), Recipe.from_dict({"default": "W8A8Dynamic", "heads": heads}))
        assert tuple(isinstance(m, pyquant.QLinear) for m in (new.lm_head, new.fc)) == kinds
    with pytest.warns(pyquant.QuantizationWarning, match="lm_head .*an output head"):
        pyquant.quantize_(copy.deepcopy(model), Recipe.from_dict({"default": "W8A8Dynamic", "heads": None}))


def test_ranges_of_before_leave_attention_as_it_was() -> None:
    """A calibration made where recipes did not rewrite attention has no ranges for the layers in it."""
    model, recipe = decoder(), Recipe.from_dict({"layers": {"emb": None}})
    prepared = pyquant.prepare_(copy.deepcopy(model), recipe)
    found = pyquant.calibrate_recipe_(prepared, Recipe.from_dict({"calib_params": {"num_calib_batches": 4}}), tokens())
    assert "attn.q_proj.input" in found
    old = {name: value for name, value in found.items() if not name.startswith("attn.")}
    with pytest.warns(pyquant.QuantizationWarning, match="attn"):
        new = pyquant.quantize_recipe_(copy.deepcopy(model), recipe, ranges=old)
    assert isinstance(new.attn, nn.MultiheadAttention)
    assert isinstance(new.rnn.ih_l0, pyquant.QLinear)
    assert isinstance(pyquant.quantize_recipe_(model, recipe, ranges=found).attn.q_proj, pyquant.QLinear)
