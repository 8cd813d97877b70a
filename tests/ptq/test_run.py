"""A recipe, run: prepare_, calibrate_recipe_, quantize_recipe_, and calibration files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from blocks import Net, batches, is_unchanged, snapshot

import pyquant
from pyquant import Recipe, SelectiveQuantizer, calibrate_recipe_, convert_, prepare_, quantize_recipe_
from pyquant.calibrate import Range
from pyquant.errors import ArgumentError, CheckpointError, PyquantError
from pyquant.nn.qlinear import QLinear
from pyquant.ptq.calibrator import apply_ranges_
from pyquant.ptq.ranges_file import load_ranges, save_ranges

RECIPE = {
    "selective_quantizer_params": {"skip_modules": ["head"]},
    "calib_params": {"num_calib_batches": 4, "histogram_calib_method": "entropy"},
    "layers": {"stage1": {"scheme": "W8A8Dynamic"}, "stage2.0.fc1": {"inputs": {"calibrator": "max"}}, "stem": "FP16"},
}


def test_a_recipe_decides_about_layers_and_blocks() -> None:
    model = prepare_(Net(), RECIPE)
    assert type(model.head) is nn.Linear
    assert str(model.stem.scheme) == "FP16"
    assert str(model.stage1[1].fc2.scheme) == "W8A8Dynamic"  # a rule for a block holds for its layers
    assert model.stage2[0].fc1.scheme.inputs.calibrator == "max"
    assert model.stage2[0].fc2.scheme.inputs.calibrator == "entropy"
    assert set(calibrate_recipe_(model, RECIPE, batches())) == {"stage2.0.fc1.input", "stage2.0.fc2.input"}
    convert_(model)
    assert model(batches()[0]).isfinite().all()


def test_the_three_steps_equal_the_one_call(tmp_path: Path) -> None:
    x = batches()[0]
    steps = prepare_(Net(), RECIPE)
    ranges = calibrate_recipe_(steps, RECIPE, batches())
    expected = convert_(steps)(x)
    assert torch.equal(quantize_recipe_(Net(), RECIPE, batches())(x), expected)
    assert torch.equal(quantize_recipe_(Net(), Recipe.from_dict(RECIPE), ranges=ranges)(x), expected)
    file = tmp_path / "r.json"
    file.write_text(json.dumps(RECIPE))
    assert torch.equal(quantize_recipe_(Net(), file, batches())(x), expected)
    saved, recipe = load_ranges(save_ranges(tmp_path / "c", ranges, Recipe.load(file)))
    assert recipe == Recipe.from_dict(RECIPE)
    assert torch.equal(quantize_recipe_(Net(), str(file), ranges=saved)(x), expected)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["calibration.json"]


def test_a_recipe_equals_the_calls_that_it_stands_for() -> None:
    block = {"calib_params": {"num_calib_batches": 4}, "selective_quantizer_params": {"skip_modules": ["head"]}}
    by_recipe = quantize_recipe_(Net(), block, batches())
    quantizer = SelectiveQuantizer()
    quantizer.register_skip_quantization(layer_names={"head"})
    by_calls = quantizer.quantize_module(Net())
    pyquant.QuantizationCalibrator().calibrate_model(by_calls, batches(), "percentile", 4)
    convert_(by_calls)
    assert torch.equal(by_recipe(batches()[0]), by_calls(batches()[0]))


@pytest.mark.parametrize("what", ["no data", "both", "few", "missing range", "unknown key", "recipe"])
def test_all_or_nothing(what: str) -> None:
    model = Net()
    before = snapshot(model)
    ranges = {"stem.input": Range(torch.tensor(-1.0), torch.tensor(1.0))}
    calls = {
        "no data": lambda: quantize_recipe_(model, RECIPE),
        "both": lambda: quantize_recipe_(model, RECIPE, batches(), ranges=ranges),
        "few": lambda: quantize_recipe_(model, RECIPE, batches(3)),
        "missing range": lambda: quantize_recipe_(model, RECIPE, ranges=ranges),
        "unknown key": lambda: quantize_recipe_(model, {**RECIPE, "layers": {"heda": None}}, batches()),
        "recipe": lambda: quantize_recipe_(model, 3),
    }
    told = {
        "no data": "stage2.0.fc1.input",
        "both": "one of the two",
        "few": "3",
        "missing range": "no range for",
        "unknown key": "'recipe.layers': got 'heda' (no such module; did you mean",
        "recipe": "int",
    }
    with pytest.raises(PyquantError) as error:
        calls[what]()
    assert told[what] in str(error.value)
    assert is_unchanged(model, before)


def test_models_without_static_or_simulated_layers() -> None:
    assert type(quantize_recipe_(Net(), {"default": "W8A8Dynamic"}).head) is QLinear
    halves = quantize_recipe_(Net(), {"default": "FP16"})
    assert str(halves.head.scheme) == "FP16"
    only = quantize_recipe_(Net(), {"default": None, "layers": {"head": "W4A16(group_size=4)"}})
    assert [type(only.stem), type(only.head)] == [nn.Linear, QLinear]
    with pytest.raises(ArgumentError, match="no layer would be quantised"):
        quantize_recipe_(Net(), {"default": None})


def test_chains_and_residuals_of_a_recipe() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        return nn.Sequential(first, pyquant.QResidualAdd(nn.Linear(8, 8), "relu")).eval()

    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = build()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.parts[0](x)
            return self.parts[1](y, y)

    x = batches()[0]
    found = {}
    for chains in ("off", "auto"):
        for residuals in ("quantize", "float"):
            recipe = {"chains": chains, "residuals": residuals, "calib_params": {"num_calib_batches": 4}}
            found[chains, residuals] = quantize_recipe_(Runs().eval(), recipe, batches())
    assert found["off", "quantize"].parts[0][0].scheme.outputs is None
    assert str(found["auto", "quantize"].parts[0][0].scheme.outputs) == str(
        found["off", "quantize"].parts[0][2].scheme.inputs
    )
    assert torch.equal(found["off", "quantize"](x), found["auto", "quantize"](x))
    assert type(found["off", "quantize"].parts[1].residual).__name__ == "QResidual"
    assert type(found["off", "float"].parts[1].residual) is pyquant.Residual
    model = Runs()
    before = snapshot(model.train())
    with pytest.raises(ArgumentError):  # linking needs evaluation mode: everything is taken back
        quantize_recipe_(model, {"chains": "auto", "calib_params": {"num_calib_batches": 4}}, batches())
    assert is_unchanged(model, before)
    with pytest.raises(ArgumentError, match="chains"):
        quantize_recipe_(Runs().eval(), {**recipe, "chains": [["a", "b"]]}, batches())


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A16(group_size=4)"])
def test_chains_of_a_recipe_without_static_inputs_fuse_activations(scheme: str) -> None:
    """There is nothing to link, so that the model may be in training mode."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).train()

    x = torch.randn(3, 8)
    model = quantize_recipe_(build(), {"default": scheme, "chains": "auto"})
    assert (model[0].fused_activation, type(model[1])) == ("1", nn.Identity)
    plain = quantize_recipe_(build(), {"default": scheme})
    assert type(plain[1]) is nn.GELU
    assert torch.equal(model(x), pyquant.nn.fuse.fuse_(plain)(x))


def test_pairs_of_a_recipe_are_linked_and_no_others() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).eval()

    recipe = {"chains": [["1", "2"]], "calib_params": {"num_calib_batches": 4}}
    model, x = quantize_recipe_(build(), recipe, batches()), batches()[0]
    assert [layer.scheme.outputs is not None for layer in model] == [False, True, False, False]
    assert torch.equal(model(x), quantize_recipe_(build(), {**recipe, "chains": "off"}, batches())(x))
    model = build()
    before = snapshot(model)
    for wrong, told in (
        ({"chains": [["1", "5"]]}, "'5', no quantised layer"),
        ({"chains": [["0", "2"]], "layers": {"2": "W8A8Dynamic"}}, "'0' to '2': .*run time"),
    ):
        with pytest.raises(ArgumentError, match=f"recipe.chains.*{told}"):
            quantize_recipe_(model, {**recipe, **wrong}, batches())
        assert is_unchanged(model, before)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    model = quantize_recipe_(Net(), RECIPE, batches())
    pyquant.save_pretrained(model, tmp_path / "q")
    again = pyquant.load_pretrained(tmp_path / "q", Net)
    assert torch.equal(again(batches()[0]), model(batches()[0]))
    assert again.stage2[0].fc2.scheme.inputs.calibrator == "entropy"


def test_ranges_of_another_model_are_refused() -> None:
    model = prepare_(Net(), RECIPE)
    ranges = calibrate_recipe_(model, RECIPE, batches())
    before = snapshot(model)
    for wrong, told in (
        ({**ranges, "x.input": next(iter(ranges.values()))}, "x.input"),
        (dict(list(ranges.items())[:1]), "no range for"),
    ):
        with pytest.raises(ArgumentError, match=told):
            apply_ranges_(model, wrong)
    assert is_unchanged(model, before)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d.update(pyquant_calibration=2), "version 2"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.update(ranges=[1]), "ranges is a list"),
        (lambda d: d["ranges"].update(x=3), "ranges: x"),
        (lambda d: d["ranges"].update(x={"low": 1, "high": 2}), "low <= 0 <= high"),
        (lambda d: d["ranges"].update(x={"low": -1, "high": "2"}), "finite numbers"),
        (lambda d: d["ranges"].update(x={"low": -1, "high": 1e300}), "float32"),
        (lambda d: d["ranges"].update(x={"low": [-1], "high": 1}), "ranges: x"),
        (lambda d: d["recipe"].update(what=1), "'what'"),
    ],
)
def test_damaged_calibration_files(change: object, told: str, tmp_path: Path) -> None:
    file = save_ranges(tmp_path / "c.json", {"a.input": Range(torch.tensor(-1.0), torch.tensor(1.0))}, Recipe())
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    with pytest.raises((CheckpointError, ArgumentError)) as error:
        load_ranges(file)
    assert told in str(error.value)
    assert "c.json" in str(error.value)


def test_calibration_files_hold_float32_exactly(tmp_path: Path) -> None:
    numbers = torch.tensor([0.1, 1e-38, 3.4e38, 1 / 3])
    ranges = {"a": Range(-numbers, numbers), "b": Range(-numbers[0], numbers[3])}
    found, _ = load_ranges(save_ranges(tmp_path / "c.json", ranges, Recipe()))
    assert all(torch.equal(found[n].low, r.low) and torch.equal(found[n].high, r.high) for n, r in ranges.items())
    with pytest.raises(ArgumentError, match="no such file"):
        load_ranges(tmp_path / "gone.json")
