"""pyquant calibrate, and quantize with a recipe: the same model as in Python, and errors that name the argument."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import toy

import pyquant
from pyquant.cli.main import main

MODEL = "toy_models:build"
DATA = """
def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        yield torch.randint(0, 20, (2, 6), generator=generator)

def labelled():
    return [{"input": x, "labels": 1} for x in batches()]
"""
RECIPE = {"calib_params": {"num_calib_batches": 5}, "layers": {"3": {"scheme": "W4A8", "group_size": 32}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy_models.py").write_text(toy.SOURCE + DATA)
    (tmp_path / "r.json").write_text(json.dumps(RECIPE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_models", raising=False)
    return tmp_path


def test_calibrate_then_quantize_equals_one_command_and_python(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", MODEL, "--data", "toy_models:batches", "--recipe", "r.json"]) == 0
    shown = capsys.readouterr()
    assert "1.input" in shown.out
    assert "percentile" in shown.out
    assert "calibrate: 6/6" in shown.err
    document = json.loads(Path("calibration.json").read_text())
    assert set(document["ranges"]) == {"1.input", "3.input"}
    words = ["quantize", MODEL, "--recipe", "r.json"]
    assert main([*words, "--calibration", "calibration.json", "--out", "a"]) == 0
    assert main([*words, "--data", "toy_models:batches", "--out", "b"]) == 0
    import toy_models

    expected = pyquant.quantize_recipe_(toy_models.build(), RECIPE, toy_models.batches())
    x = toy_models.example_inputs()
    for out in "ab":
        assert torch.equal(pyquant.load_pretrained(out, toy_models.build)(x), expected(x))
    assert main(["verify", "a"]) == 0


def test_a_static_scheme_with_data_needs_no_recipe() -> None:
    words = ["quantize", MODEL, "--scheme", "W8A8", "--data", "toy_models:batches", "--batches", "3"]
    for out, improve in (("a", ()), ("b", ("bias_correction",))):
        assert main([*words, "--out", out, *(["--improve", *improve] if improve else [])]) == 0
        import toy_models

        data = list(toy_models.batches())
        expected = pyquant.quantize_(toy_models.build(), "W8A8", data=data, num_batches=3, improve=improve)
        x = toy_models.example_inputs()
        assert torch.equal(pyquant.load_pretrained(out, toy_models.build)(x), expected(x))


def test_a_preset_is_the_recommended_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantize", MODEL, "--preset", "encoder-w4a8", "--data", "toy_models:batches"]
    assert main([*words, "--skip", "3", "--out", "a"]) == 0
    import toy_models

    recipe = pyquant.recommended("encoder-w4a8", num_batches=5)
    recipe = replace(recipe, layers={"3": pyquant.recipe.LayerRule("float")})
    expected = pyquant.quantize_(toy_models.build(), recipe, data=list(toy_models.batches()))
    x = toy_models.example_inputs()
    assert type(expected[3]) is torch.nn.Linear
    assert torch.equal(pyquant.load_pretrained("a", toy_models.build)(x), expected(x))
    capsys.readouterr()
    for wrong, told in (
        (["--preset", "encoder-w4a9", "--data", "toy_models:batches"], "did you mean"),
        (["--preset", "encoder-w4a8"], "data"),
        (["--preset", "encoder-w4a8", "--scheme", "W8A8"], "not allowed"),
        (["--preset", "encoder-w4a8", "--data", "toy_models:batches", "--improve", "gptq"], "nothing beside"),
    ):
        with contextlib.suppress(SystemExit):
            assert main(["quantize", MODEL, *wrong, "--out", "b"]) == 2
        assert told in capsys.readouterr().err
    assert not Path("b").exists()


def test_pictures_of_the_users_tensors_and_errors_on_the_users_data(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    words = ["calibrate", MODEL, "--data", "toy_models:batches", "--recipe", "r.json", "--plots", "pictures"]
    assert main(words) == 0
    assert "2 pictures in pictures" in capsys.readouterr().out
    assert sorted(file.name for file in Path("pictures").iterdir()) == ["1.input.png", "3.input.png"]
    assert main(["quantize", MODEL, "--recipe", "r.json", "--calibration", "calibration.json", "--out", "a"]) == 0
    capsys.readouterr()
    words = ["error", "a", "--against", MODEL, "--data", "toy_models:batches", "--batches", "5", "--out", "e.csv"]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "(whole model)" in shown.out
    assert len((folder / "e.csv").read_text().splitlines()) == 1 + 2 * 4 + 1
    assert "error: 5/5" in shown.err
    assert main([*words[:-3], "9"]) == 1
    assert "the data had 5" in capsys.readouterr().err


def test_a_folder_and_a_recipe_in_yaml(folder: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    (folder / "r.yaml").write_text(yaml.safe_dump(RECIPE))
    assert main(["calibrate", MODEL, "--data", "toy_models:labelled", "--recipe", "r.yaml", "--out", "ranges"]) == 0
    assert [p.name for p in (folder / "ranges").iterdir()] == ["calibration.json"]
    # the same recipe in another format is the same recipe
    assert main(["quantize", MODEL, "--recipe", "r.json", "--calibration", "ranges", "--out", "q"]) == 0


def test_a_recipe_without_static_tensors_needs_no_data() -> None:
    Path("d.json").write_text('{"default": "W8A8Dynamic"}')
    assert main(["quantize", MODEL, "--recipe", "d.json", "--out", "q"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["calibrate", MODEL, "--data", "toy_models:batches", "--recipe", "gone.json"], 2, "no such file"),
        (["calibrate", MODEL, "--data", "toy_models:gone", "--recipe", "r.json"], 2, "has no 'gone'"),
        (["calibrate", MODEL, "--data", "toy_models:not_a_model", "--recipe", "r.json"], 2, "returned a int"),
        (["calibrate", MODEL, "--data", "toy_models:batches", "--recipe", "d.json"], 2, "no static tensor"),
        (["calibrate", MODEL, "--data", "toy_models:batches", "--recipe", "many.json"], 1, "9 batches were asked for"),
        (["calibrate", MODEL, "--data", "toy_models:batches", "--recipe", "key.json"], 2, "'nothing'"),
        (
            ["calibrate", MODEL, "--data", "toy_models:batches", "--recipe", "r.json", "--out", "/proc/x.json"],
            2,
            "'--out': got /proc/x.json: /proc cannot be written to",
        ),
        (
            ["calibrate", MODEL, "--data", "toy_models:batches", "--recipe", "r.json", "--out", "r.json/x"],
            2,
            "'--out': got",
        ),
        (["quantize", MODEL, "--recipe", "r.json", "--out", "q"], 2, "1.input"),
        (["quantize", MODEL, "--recipe", "r.json", "--calibration", "c.json", "--out", "q"], 2, "another recipe"),
        (["quantize", MODEL, "--recipe", "r.json", "--calibration", "gone", "--out", "q"], 2, "no such file"),
        (["quantize", MODEL, "--scheme", "W8A8", "--calibration", "c.json", "--out", "q"], 2, "--recipe"),
        (["quantize", MODEL, "--scheme", "W8A8", "--improve", "gptq", "--out", "q"], 2, "'--data': got none"),
        (
            ["quantize", MODEL, "--scheme", "W8A8", "--data", "toy_models:batches", "--batches", "0", "--out", "q"],
            2,
            "--batches",
        ),
        (["quantize", MODEL, "--recipe", "r.json", "--batches", "3", "--out", "q"], 2, "--batches"),
        (["quantize", MODEL, "--recipe", "r.json", "--skip", "3", "--out", "q"], 2, "--skip"),
        (["quantize", MODEL, "--recipe", "r.json", "--embeddings", "--out", "q"], 2, "--embeddings"),
    ],
)
def test_errors_name_the_argument(
    words: list[str], code: int, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("d.json").write_text('{"default": "W8A8Dynamic"}')
    Path("many.json").write_text('{"calib_params": {"num_calib_batches": 9}}')
    Path("key.json").write_text('{"layers": {"nothing": null}}')
    Path("c.json").write_text(
        json.dumps({"pyquant_calibration": 1, "recipe": pyquant.Recipe().to_dict(), "ranges": {}})
    )
    before = sorted(p.name for p in folder.iterdir())
    assert main(words) == code
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.err.rstrip().splitlines()[-1].startswith("pyquant: error: ")
    assert sorted(p.name for p in folder.iterdir() if p.name != "__pycache__") == before


def test_data_and_calibration_exclude_each_other() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["quantize", MODEL, "--recipe", "r.json", "--data", "a:b", "--calibration", "c.json", "--out", "q"])
    assert stop.value.code == 2
