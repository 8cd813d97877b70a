"""What a user registers is named in a recipe and on the command line like what pyquant has; errors list it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import fresh
import pytest

from pyquant.cli.main import main
from pyquant.core.registry import CALIBRATORS, SCORERS, SEARCH_ALGORITHMS
from pyquant.errors import ArgumentError
from pyquant.recipe import Recipe

MINE = """
import torch
from torch import nn

from pyquant.calibrate import Range, calibrator
from pyquant.mixed_precision.loss.scorers import Scorer, Work, sensitivity_metric
from pyquant.mixed_precision.solve import search_algorithm

@calibrator("half")
def half(statistics, scheme):
    return Range.symmetric(statistics.amax() / 2)

@sensitivity_metric("numel")
class Numel(Scorer):
    unit = "weights"

    def work(self):
        return [Work("all")]

    def measure(self, work):
        return [1.0]

    def table(self, rows):
        switchable = self.scoring.switchable
        return [[0.0] + [float(n)] * (len(switchable.formats) - 1) for n in switchable.numel]

@search_algorithm("lowest")
def lowest(search):
    search.measure([search.problem.uniform(len(search.problem.formats) - 1)])

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

def batches():
    return [torch.linspace(-4, 4, 16).view(2, 8)] * 3
"""
RECIPE = """
default: W8A8
selective_quantizer_params: {calibrator_i: histogram, calibrator_w: half}
calib_params: {histogram_calib_method: half, num_calib_batches: 3}
layers:
  "2": {scheme: W8A8, inputs: {calibrator: half}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    if sys.modules.pop("mine", None):
        CALIBRATORS.remove("half")
        SCORERS.remove("numel")
        SEARCH_ALGORITHMS.remove("lowest")


def test_a_calibrator_in_a_recipe_and_its_file_read_without_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["mine:build", "--data", "mine:batches", "--recipe", "r.yaml", "--out"]
    assert main(["calibrate", *words, "calibration.json"]) == 0
    assert capsys.readouterr().out.count("half") == 2
    assert main(["quantize", *words, "out"]) == 0
    code = """
import json, pyquant, torch
from torch import nn
model = pyquant.load_pretrained("out", nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
print(json.dumps([model[0].input_scale.item(), str(model[0].scheme.inputs), str(model[0].scheme.weights)]))
"""
    scale, inputs, weights = fresh.python(code, folder)
    assert scale == pytest.approx(2 / 127)
    assert inputs == "int8 per_tensor fixed"
    assert weights == "int8 per_channel fixed"


def test_a_name_that_nobody_registered_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").write_text(RECIPE.replace("half", "halt"))
    assert main(["quantize", "mine:build", "--data", "mine:batches", "--recipe", "r.yaml", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert "'halt'; allowed: max, entropy, mse, percentile, half" in error


def test_a_scorer_and_an_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mine:build", "--data", "mine:batches"]
    assert main(["sensitivity", *words, "--metric", "numel", "--formats", "float", "int8"]) == 0
    assert "weights" in capsys.readouterr().out
    assert main(["sensitivity", *words, "--metric", "numeld"]) == 2
    assert "'--metric': got 'numeld'" in (error := capsys.readouterr().err)
    assert "'numel'; did you mean" in error
    Path("s.yaml").write_text("search: {formats: [float, int8], metric: mse, sensitivity: numel, algorithm: lowest}")
    words += ["--objective", "size", "--max-loss", "1", "--record", "record.json"]
    assert main(["search", *words, "--recipe", "s.yaml"]) == 0
    settings = json.loads(Path("record.json").read_text())["settings"]
    assert (settings["algorithm"], settings["sensitivity"]) == ("lowest", "numel")
    assert Recipe.load("recipe.yaml").search.sensitivity == "numel"
    assert main(["search", *words, "--algorithm", "highest"]) == 2
    assert "'--algorithm': got 'highest'; allowed: 'dp'" in capsys.readouterr().err


def test_the_recipe_reads_the_registry_when_it_is_checked() -> None:
    CALIBRATORS.register("late")(CALIBRATORS.find("max"))
    try:
        recipe = Recipe.from_dict({"calib_params": {"histogram_calib_method": "late"}})
    finally:
        CALIBRATORS.remove("late")
    assert recipe.calib_params.histogram_calib_method == "late"
    with pytest.raises(ArgumentError, match="allowed: max, entropy, mse, percentile"):
        Recipe.from_dict(recipe.to_dict())
