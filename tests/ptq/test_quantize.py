"""The front door: schemes, configs and recipes, with and without data, in one call; equal to its named steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import pyquant
from pyquant.errors import ArgumentError, CalibrationError, NonFiniteError

BATCHES = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i)) for i in range(8)]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).eval()


def same(a: nn.Module, b: nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def sqnr(model: nn.Module) -> float:
    x = torch.cat(BATCHES)
    with torch.no_grad():
        real, got = build()(x), model(x)
    return float(10 * torch.log10(real.square().sum() / (got - real).square().sum()))


def test_a_static_scheme_with_data_is_what_its_steps_give() -> None:
    model = pyquant.quantize_(build(), "W8A8", data=BATCHES)
    steps = pyquant.insert_fake_quantize_(build(), "W8A8")
    pyquant.QuantizationCalibrator().calibrate_model(steps, BATCHES, num_calib_batches=len(BATCHES))
    pyquant.convert_(steps)
    assert same(model, steps)
    assert torch.equal(model(BATCHES[0]), steps(BATCHES[0]))
    few = pyquant.quantize_(build(), "W8A8", data=iter(BATCHES), num_batches=2)
    assert not same(model, few)


def test_static_and_dynamic_layers_stand_side_by_side_and_data_may_be_unneeded() -> None:
    model = pyquant.quantize_(build(), {"1": pyquant.W8A8(), "_default": pyquant.W8A8Dynamic()}, data=BATCHES)
    assert [str(model[i].scheme) for i in (1, 3)] == ["W8A8", "W8A8Dynamic"]
    assert same(pyquant.quantize_(build(), "W8A8Dynamic", data=BATCHES), pyquant.quantize_(build(), "W8A8Dynamic"))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.down = nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.down(x + self.attention(x, x, x, need_weights=False)[0]))


@pytest.mark.filterwarnings("ignore::pyquant.errors.QuantizationWarning")
def test_classes_with_matrices_of_their_own_are_calibrated_and_heads_stay() -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 5, 32)
    real = model(x)
    pyquant.quantize_(model, "W8A8", data=[x])
    assert {name for name, m in model.named_modules() if isinstance(m, pyquant.QLinear)} == {
        "attention.q_proj",
        "attention.k_proj",
        "attention.v_proj",
        "attention.out_proj",
        "down",
    }
    assert float((model(x) - real).norm() / real.norm()) < 0.02


def test_shared_layers_and_hooks_survive_calibration() -> None:
    layer, calls = nn.Linear(32, 32), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    model = nn.Sequential(layer, nn.ReLU(), layer)
    pyquant.quantize_(model, "W8A8", data=BATCHES)
    assert model[0] is model[2]
    calls.clear()
    model(BATCHES[0])
    assert len(calls) == 2


@pytest.mark.parametrize("scheme", ["W4A8(group_size=16)", "W4A8Dynamic(group_size=16)", "W4A16(group_size=16)"])
def test_improvers_change_codes_and_do_not_lose(scheme: str) -> None:
    plain = pyquant.quantize_(build(), scheme, data=BATCHES)
    better = pyquant.quantize_(build(), scheme, data=BATCHES, improve=("gptq", "bias_correction"))
    assert not same(plain, better)
    assert sqnr(better) > sqnr(plain)
    assert str(better[1].scheme) == scheme


def test_smoothing_goes_first_and_its_function_is_the_same() -> None:
    skewed = [batch * torch.linspace(1, 60, 32) for batch in BATCHES]
    model = build()
    pyquant.quantize_(model, "W8A8", data=skewed, improve=("smooth",))
    assert not torch.equal(model[0].weight, build()[0].weight)
    by_hand = build()
    pyquant.smooth_(by_hand, skewed, len(skewed))
    assert same(model, pyquant.quantize_(by_hand, "W8A8", data=skewed))


def test_a_recipe_its_path_and_its_data_are_quantize_recipe_(tmp_path: Path) -> None:
    recipe = pyquant.Recipe.from_dict({"calib_params": {"num_calib_batches": 4}, "layers": {"3": None}})
    expected = pyquant.quantize_recipe_(build(), recipe, BATCHES)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.dumps())
    for given in (recipe, path, str(path)):
        assert same(pyquant.quantize_(build(), given, data=BATCHES), expected)
    improved = pyquant.quantize_(build(), recipe, data=BATCHES, improve=("bias_correction",))
    assert not torch.equal(improved[1].state_dict()["bias"], expected[1].state_dict()["bias"])


class Turned(nn.Module):
    """A residual stream that rotate_ is told about."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.norm, self.fc1 = nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 32)
        self.fc2, self.last, self.head = nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.read(x)
        return self.head(self.last(x + self.fc2(torch.relu(self.fc1(self.norm(x))))))


TURNED = pyquant.RotationSpec(["read", "fc2"], {"norm": ["fc1"], "last": ["head"]}, online=["fc2"])


def test_improvers_of_the_float_model_are_their_functions() -> None:
    pyquant.register_rotation(Turned, TURNED)
    pyquant.register_smoothing(Turned, "norm", ["fc1"])
    for name, by_hand in (
        ("search_scales", lambda m: pyquant.search_scales_(m, "W4A8", BATCHES, 8)),
        ("rotate", lambda m: pyquant.rotate_(m, BATCHES[0])),
        ("rotate_online", lambda m: pyquant.rotate_(m, BATCHES[0], online=True)),
    ):
        expected = Turned().eval()
        by_hand(expected)
        pyquant.quantize_(expected, "W4A8", data=BATCHES)
        model = pyquant.quantize_(Turned().eval(), "W4A8", data=BATCHES, improve=(name,))
        assert same(model, expected), name
        assert (type(model.fc2) is pyquant.HadamardLinear) == (name == "rotate_online")


@pytest.mark.parametrize("name", ["search_scales", "rotate", "rotate_online"])
def test_improvers_of_the_float_model_are_taken_back(name: str) -> None:
    pyquant.register_rotation(Turned, TURNED)
    pyquant.register_smoothing(Turned, "norm", ["fc1"])
    model = Turned().eval()
    with pytest.raises(ArgumentError, match="'gone'"):
        pyquant.quantize_(model, {"gone": pyquant.W8A8(), "_default": "W4A8"}, data=BATCHES, improve=(name,))
    assert type(model.fc2) is nn.Linear
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), Turned().state_dict().values()))


def test_a_recipe_names_its_improvers() -> None:
    recipe = pyquant.Recipe.from_dict(
        {"default": "W4A8", "calib_params": {"num_calib_batches": 8}, "improve": ["smooth", "gptq"]}
    )
    plain = pyquant.Recipe.from_dict({k: v for k, v in recipe.to_dict().items() if k != "improve"})
    expected = pyquant.quantize_recipe_(build(), plain, BATCHES, improve=("smooth", "gptq"))
    assert same(pyquant.quantize_(build(), recipe, data=BATCHES), expected)
    assert pyquant.Recipe.loads(recipe.dumps()) == recipe
    with pytest.raises(ArgumentError, match=r"'improve'.*nothing beside the recipe's smooth, gptq"):
        pyquant.quantize_(build(), recipe, data=BATCHES, improve=("gptq",))
    with pytest.raises(ArgumentError, match=r"'data'.*None"):
        pyquant.quantize_(build(), recipe)


ERRORS: list[tuple[Callable[[nn.Module], object], str]] = [
    (lambda m: pyquant.quantize_(m, "W8A8"), "'data'.*nothing for 1, 3.*W8A8Dynamic"),
    (lambda m: pyquant.quantize_(m, "W8A8", data=iter(BATCHES)), "'num_batches'.*without a length"),
    (lambda m: pyquant.quantize_(m, "W8A8", data=[]), "'data'.*no batches"),
    (lambda m: pyquant.quantize_(m, "W8A8", data=BATCHES, num_batches=0), "'num_batches'"),
    (lambda m: pyquant.quantize_(m, "W8A8", data=BATCHES, input_scales={"1": 1.0}), "'input_scales'.*one of the two"),
    (lambda m: pyquant.quantize_(m, "W8A8", data=BATCHES, improve="gptq"), "'improve'.*sequence"),
    (lambda m: pyquant.quantize_(m, "W8A8", data=BATCHES, improve=("gtpq",)), "'improve'.*'gptq'"),
    (lambda m: pyquant.quantize_(m, "W8A8", improve=("gptq",)), "'data'.*None"),
    (lambda m: pyquant.quantize_(m, "W8A8", data=BATCHES, improve=("rotate", "rotate_online")), "one of the two"),
    (lambda m: pyquant.quantize_(m, "W8A8", data=BATCHES, improve=("rotate",)), "no rule knows.*register_rotation"),
    (lambda m: pyquant.quantize_(m, "W8A8", data=iter(BATCHES), improve=("gptq",), num_batches=4), "a list"),
    (lambda m: pyquant.quantize_(m, pyquant.Recipe(), heads=True), "'heads'.*recipe"),
    (lambda m: pyquant.quantize_(m, "gone.yaml"), "no such file"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS)
def test_wrong_arguments_are_named_and_change_nothing(call: Callable[[nn.Module], object], message: str) -> None:
    model = build()
    with pytest.raises(ArgumentError, match=message):
        call(model)
    assert same(model, build())


def test_data_that_fails_leaves_the_model_as_it_was_smoothing_included() -> None:
    poisoned = [*BATCHES[:7], torch.full((4, 32), float("nan"))]
    cases: list[tuple[list[torch.Tensor], int, type[Exception]]] = [
        (BATCHES, 9, CalibrationError),
        (poisoned, 8, NonFiniteError),
    ]
    for data, count, error in cases:
        model = build()
        with pytest.raises(error):
            pyquant.quantize_(model, "W8A8", data=data, num_batches=count)
        assert same(model, build())
    model = build()  # the smoothing is done and the config is wrong
    skewed = [batch * torch.linspace(1, 60, 32) for batch in BATCHES]
    with pytest.raises(ArgumentError, match="'gone'"):
        pyquant.quantize_(model, {"gone": pyquant.W8A8()}, data=skewed, improve=("smooth",))
    assert same(model, build())
