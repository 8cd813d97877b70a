"""A configuration on the switchable model is bit for bit what its recipe gives; the model itself never changes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.choices.switchable import SwitchableModel, output_tensor
from pyquant.nn.qlinear import QLinear
from pyquant.ptq import quantize_recipe_
from pyquant.recipe import CalibrationParams, LayerRule, Recipe

FORMATS = ("fp32", "int8", "int4")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 5)).eval()


def _data(batches: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(6, 24) for _ in range(batches)]


def test_every_configuration_equals_its_recipe() -> None:
    model, data = _model(), _data()
    switchable = SwitchableModel(model, FORMATS, data, num_batches=4)
    for config in itertools.product(range(3), repeat=3):
        layers = {name: switchable.formats[f].rule for name, f in switchable.chosen(config).items()}
        recipe = Recipe(layers=layers, default=LayerRule("float"), calib_params=CalibrationParams(num_calib_batches=4))
        twin = copy.deepcopy(model)
        if any(config):
            quantize_recipe_(twin, Recipe.loads(recipe.dumps()), data)
            ranged = quantize_recipe_(copy.deepcopy(model), recipe, ranges=switchable.ranges(config))
            assert torch.equal(ranged(data[0]), twin(data[0]))
        for batch, found in zip(data, switchable.outputs(config), strict=True):
            assert torch.equal(twin(batch), found), config


def test_the_model_is_restored_also_after_an_exception() -> None:
    model = _model()
    before = {name: id(module) for name, module in model.named_modules()}
    model.train()
    switchable = SwitchableModel(model, FORMATS, _data(), num_batches=4)
    with switchable.using((1, 2, 0)):
        assert [type(m) for m in model] == [QLinear, nn.ReLU, QLinear, nn.GELU, nn.Linear]
        assert not model.training
    with pytest.raises(RuntimeError, match="inside"), switchable.using((1, 2, 0)):
        raise RuntimeError("inside")
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert all(module.training for module in model.modules())


def test_encoder_layers_leave_their_fused_path_and_return_to_it() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    data = [torch.randn(2, 3, 16)]
    switchable = SwitchableModel(model, ("fp32", "W4A8Dynamic(group_size=8)"), data, num_batches=1)
    plain = model(data[0])
    assert [g.name for g in switchable.groups] == ["layers.0.linear1", "layers.0.linear2"]
    assert not torch.equal(switchable.outputs((0, 1))[0], switchable.outputs((0, 0))[0])
    assert torch.equal(model(data[0]), plain)
    assert model.layers[0].activation_relu_or_gelu == 1


def test_a_format_that_a_layer_cannot_take_is_told_and_left_out() -> None:
    switchable = SwitchableModel(_model(), ("fp32", "W4A8Dynamic(group_size=16)"))
    assert switchable.allowed == ((True, False), (True, True), (True, True))
    assert "divisor of in_features = 24" in switchable.refusals["0", "W4A8Dynamic(group_size=16)"]
    assert switchable.uniform(1) == (0, 1, 1)
    with pytest.raises(ArgumentError, match="in_features = 24"), switchable.using((1, 0, 0)):
        pass
    with pytest.raises(ArgumentError, match="3 numbers"), switchable.using((0, 0)):
        pass


def test_sizes_are_those_of_files() -> None:
    switchable = SwitchableModel(_model(), FORMATS, _data(), num_batches=4)
    assert switchable.numel == (24 * 32, 32 * 16, 16 * 5)
    for row, numel, outputs in zip(switchable.group_bytes(), switchable.numel, (32, 16, 5), strict=True):
        assert row[0] == 4 * (numel + outputs)
        assert numel <= row[1] <= numel + 8 * outputs + 16
        assert numel // 2 <= row[2] <= numel // 2 + 8 * outputs + 16
    assert switchable.other_bytes() == 0


@pytest.mark.parametrize(
    ("format", "bits"),
    [
        ("W8A8Dynamic", 8 + 32 / 128),
        ("W4A16(group_size=128)", 4 + 32 / 128),
        ("W4A16(group_size=32)", 4 + 32 / 32),
        ("W4A16(group_size=64, symmetric=False)", 4 + 64 / 64),
        ("W4A8TwoLevel(group_size=16)", 4 + 32 / 16),
    ],
)
def test_bits_of_a_weight_are_those_of_its_codes_and_scales(format: str, bits: float) -> None:
    model, data = nn.Sequential(nn.Linear(128, 24), nn.Linear(24, 4)), [torch.randn(4, 128)]
    filter_fn = lambda module, name: name == "0"  # noqa: E731
    switchable = SwitchableModel(model, ("float", format), data, filter_fn=filter_fn)
    assert switchable.group_bits() == [[32 * 128 * 24, bits * 128 * 24]]
    free = SwitchableModel(_Tied(bias=False), ("float", "W8A16"))
    bits_of = {g.name: row for g, row in zip(free.groups, free.group_bits(), strict=True)}
    assert (
        bits_of["one+two"] == [2 * row for row in bits_of["middle"]] == [2 * 16 * 16 * 32, 2 * (16 * 16 * 8 + 16 * 32)]
    )


class _Tied(nn.Module):
    """As a language model with tie_word_embeddings, and two layers of one weight, whose biases may be two."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.one, self.middle, self.two = nn.Linear(16, 16, bias=bias), nn.Linear(16, 16), nn.Linear(16, 16, bias=bias)
        self.two.weight = self.one.weight
        self.register_buffer("mask", torch.zeros(7))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.two(self.middle(self.one(self.embed(ids)))))


def _held(model: nn.Module) -> int:
    """Bytes of what the modules hold, one of two names once: layers of one weight become one."""
    states = [m.state_dict(keep_vars=True) for m in model.modules() if not list(m.children())]
    held = {id(t): t for state in (*states, {"mask": model.mask}) for t in state.values() if isinstance(t, Tensor)}
    return sum(t.nbytes for t in held.values())


@pytest.mark.parametrize("bias", [False, True])
def test_sizes_are_those_of_the_models_where_weights_are_shared(bias: bool) -> None:
    """Of every configuration: a head beside the embedding that keeps the floats, two layers that become one or two."""
    formats = ("float", "W8A8Dynamic", "W4A16(group_size=16)")
    switchable = SwitchableModel(_Tied(bias), formats)
    sizes = switchable.group_bytes()
    assert {g.name for g in switchable.groups} == {"head", "one+two", "middle"}
    for config in itertools.product(range(3), repeat=3):
        rules = {layer: switchable.formats[f].scheme for layer, f in switchable.chosen(config).items()}
        model = pyquant.quantize_(_Tied(bias).eval(), rules, heads=True) if any(rules.values()) else _Tied(bias)
        counted = switchable.other_bytes() + sum(row[f] for row, f in zip(sizes, config, strict=True))
        assert counted == _held(model), switchable.text(config)


def test_static_formats_need_data_and_enough_of_it() -> None:
    with pytest.raises(ArgumentError, match="W8A8Dynamic"):
        SwitchableModel(_model(), FORMATS)
    with pytest.raises(ArgumentError, match="at most 2"):
        SwitchableModel(_model(), FORMATS, _data(2), num_batches=4)


def test_what_counts_of_a_result() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    assert output_tensor(a) is a
    assert output_tensor((None, b)) is b
    assert output_tensor({"x": a, "logits": b}) is b
    assert output_tensor({"x": a}) is a
    with pytest.raises(ArgumentError, match="to_output"):
        output_tensor("text")
