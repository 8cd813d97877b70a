"""pyquant search: writes the plan of the Python call, and what it writes is what quantize takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import pyquant
from pyquant.cli.main import main
from pyquant.report.records.record import load_record
from pyquant.report.records.search import SearchReport

SOURCE = """
import torch
from searched import batches, net as build

def accuracy(model):
    return float(torch.cat([model(x).argmax(-1) == build()(x).argmax(-1) for x in batches(seed=5)]).float().mean())

def not_a_number(model):
    return float("nan")

def two_arguments(model, data):
    return 1.0
"""
QUANTIZE = ["toy_search:build", "--recipe", "recipe.yaml", "--calibration", "calibration.json"]
WORDS = [
    "search",
    "toy_search:build",
    "--data",
    "toy_search:batches",
    "--objective",
    "size",
    "--batches",
    "4",
    "--budget",
    "12",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy_search.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_search", raising=False)
    return tmp_path


def test_it_writes_what_quantize_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--eval", "toy_search:accuracy", "--max-drop", "0.05", "--record", "search.json", "--report"]
    assert main([*words, "a.html", "a.md", "a.csv"]) == 0
    shown = capsys.readouterr()
    assert "less bytes than floating point" in shown.out
    assert "wrote recipe.yaml, calibration.json, search.json, a.html, a.md, a.csv" in shown.out
    assert "search: sensitivities: 8/8" in shown.err
    words = "--recipe recipe.yaml --calibration calibration.json --out quantised"
    assert f"next: pyquant quantize toy_search:build {words}" in shown.out
    record = load_record("search.json", SearchReport)
    assert record.plan.drop is not None
    assert record.plan.drop <= 0.05
    quantise = ["quantize", "toy_search:build", "--recipe", "recipe.yaml", "--calibration", "calibration.json"]
    assert main([*quantise, "--out", "out"]) == 0
    import toy_search

    x = toy_search.batches()[0]
    expected = pyquant.quantize_recipe_(toy_search.build(), "recipe.yaml", toy_search.batches())
    assert torch.equal(pyquant.load_pretrained("out", toy_search.build)(x), expected(x))
    assert main(["report", "search.json", "--out", "again", "--format", "md"]) == 0
    assert Path("again/search.md").read_text() == Path("a.md").read_text()


def test_a_recipe_gives_defaults_and_its_training_goes_on() -> None:
    Path("base.yaml").write_text(
        "search: {formats: [fp32, W8A8Dynamic], algorithm: greedy, max_drop: 0.5}\nqat: {optimizer: adamw}\n"
    )
    assert main([*WORDS, "--recipe", "base.yaml", "--record", "r.json"]) == 0
    record = load_record("r.json", SearchReport)
    assert record.formats == ("fp32", "W8A8Dynamic")
    assert (record.settings["algorithm"], record.settings["max_drop"]) == ("greedy", "0.5")
    found = pyquant.Recipe.load("recipe.yaml")
    assert found.qat is not None
    assert found.qat.optimizer == "adamw"
    # a plan without static layers writes a file without ranges: the command that follows names it
    assert main(["quantize", *QUANTIZE, "--out", "all_dynamic"]) == 0


def test_a_plan_of_floats_says_that_there_is_nothing_to_quantise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--formats", "float", "int4", "--max-loss", "0"]) == 0
    shown = capsys.readouterr().out
    assert "every layer in floating point: there is nothing to quantise" in shown
    assert "pyquant quantize" not in shown
    assert main(["quantize", *QUANTIZE, "--out", "quantised"]) == 2
    assert "'--recipe': got recipe.yaml, which leaves every layer in floating point" in capsys.readouterr().err


def test_an_eval_function_without_a_number_is_called_by_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--eval", "toy_search:not_a_number"]) == 2
    assert "argument '--eval': got nan" in capsys.readouterr().err


def test_limits_without_a_metric() -> None:
    assert main([*WORDS, "--max-effective-bits", "10", "--record", "r.json"]) == 0
    record = load_record("r.json", SearchReport)
    assert record.plan.effective_bits <= 10
    assert json.loads(Path("calibration.json").read_text())["ranges"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--report", "a.pdf"], "--report"),
        (["--metric", "taste"], "metric"),
        (["--formats", "int9"], "formats"),
        (["--eval", "toy_search:nothing"], "--eval"),
        (["--eval", "toy_search:two_arguments"], "allowed: a callable that takes (model)"),
        (["--algorithm", "greedi"], 'did you mean "greedy"?'),
        (["--max-size-bytes", "1"], "no configuration"),
    ],
)
def test_wrong_calls_are_named(more: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *more]) in (1, 2)
    assert named in capsys.readouterr().err


def test_layers_that_are_left(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a pattern, by a recipe; one that nothing calls stops a search by static formats otherwise."""
    source = (
        SOURCE.replace("net as build", "net")
        + """
class Wider(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.never = net(), torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.net(x)

build = Wider
"""
    )
    (folder / "toy_search.py").write_text(source)
    words = [*WORDS, "--max-drop", "0.5"]
    assert main(words) == 1
    assert "never.input" in (told := capsys.readouterr().err)
    assert "--skip" in told
    Path("skip.yaml").write_text("pyquant_recipe: 1\nselective_quantizer_params: {skip_modules: ['nev*']}\n")
    for more in (["--skip", "never"], ["--recipe", "skip.yaml"]):
        assert main([*words, *more]) == 0
        capsys.readouterr()
        assert set(pyquant.Recipe.load("recipe.yaml").layers) == {"net.0", "net.2", "net.4", "net.6"}
    assert main([*words, "--skip", "never", "net.0", "--objective", "size"]) == 0
    assert set(pyquant.Recipe.load("recipe.yaml").layers) == {"net.2", "net.4", "net.6"}
    assert main([*words, "--skip", "net"]) == 1  # a block: what is left of the model is never called
    assert "1 of 1 layers saw no data: never.input" in capsys.readouterr().err
    assert main([*words, "--skip", "nver"]) == 2
    assert "'--skip': got 'nver', which matches nothing; did you mean \"never\"?" in capsys.readouterr().err
