"""quantize, inspect and verify on a toy model: what goes in comes out, and damage is found."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import toy

import pyquant
from pyquant.cli.main import main

MODEL = "toy_models:build"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy_models.py").write_text(toy.SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "toy_models", raising=False)
    return tmp_path


def quantize(*words: str) -> None:
    assert main(["quantize", MODEL, *words, "--out", "q"]) == 0


def verdict(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    main(["verify", "q", "--json", *words])
    found: dict = json.loads(capsys.readouterr().out)
    return found


def summary(capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert main(["inspect", "q", "--json"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A8Dynamic(group_size=32)", "W4A4Dynamic", "W8A16", "FP16"])
def test_quantize_inspect_verify(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    quantize("--scheme", scheme)
    assert "smaller" in capsys.readouterr().out
    layers = {layer["name"]: layer for layer in summary(capsys)["layers"]}
    assert set(layers) == {"1", "3"}
    assert layers["1"]["scheme"] == str(pyquant.scheme_from_name(scheme))
    assert (layers["1"]["out_features"], layers["1"]["in_features"]) == (96, 64)
    assert layers["1"]["kernel"] != "none"
    assert main(["verify", "q", "--against", MODEL, "--inputs", "toy_models:example_inputs"]) == 0
    assert "all is well" in capsys.readouterr().out
    found = verdict(capsys, "--against", MODEL, "--inputs", "toy_models:example_inputs")
    exact = True if pyquant.scheme_from_name(scheme).is_integer else None
    assert [layer["exact"] for layer in found["layers"]] == [exact, exact]
    assert all(layer["sqnr_db"] > 8 and layer["cosine"] > 0.95 for layer in found["layers"])
    assert found["model"]["cosine"] > 0.9


def test_what_is_saved_is_what_python_gives() -> None:
    quantize("--scheme", "W8A8Dynamic", "--embeddings")
    import toy_models

    expected = pyquant.quantize_(toy_models.build(), pyquant.W8A8Dynamic(), embeddings=True)
    loaded = pyquant.load_pretrained("q", toy_models.build)
    x = toy_models.example_inputs()
    assert torch.equal(loaded(x), expected(x))


def test_config_file_decides_by_layer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    Path("c.yaml").write_text(
        'default: W8A8Dynamic\nembeddings: true\nlayers:\n  "re:3": {scheme: W4A16, group_size: 32}\n'
    )
    quantize("--config", "c.yaml")
    found = {layer["name"]: layer["scheme"] for layer in summary(capsys)["layers"]}
    assert found["1"] == "W8A8Dynamic"
    assert found["3"] == "W4A16(group_size=32)"
    assert "0" in found
    digests = [_recipe_digest()]
    quantize("--config", "c.yaml")
    digests.append(_recipe_digest())
    quantize("--config", "c.yaml", "--skip", "1")  # what the options add is part of the recipe
    assert digests[0] == digests[1] != _recipe_digest() != ""
    quantize("--scheme", "W8A8Dynamic")
    assert _recipe_digest() == ""


def _recipe_digest() -> str:
    config = json.loads(Path("q/config.json").read_text())
    return config["quantization_config"]["pyquant"]["recipe_sha256"]


def test_skip_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    quantize("--scheme", "W8A8Dynamic", "--skip", "3")
    found = summary(capsys)
    assert [layer["name"] for layer in found["layers"]] == ["1"]
    assert found["layers"][0]["bytes"] == 64 * 96 + 96 * 4 + 96 * 4
    assert found["bytes"]["other tensors"] == (20 * 64 + 96 * 32 + 32) * 4
    assert main(["inspect", "q"]) == 0
    assert "W8A8Dynamic" in capsys.readouterr().out


def test_verify_tells_what_a_checkpoint_holds_in_floating_point(capsys: pytest.CaptureFixture[str]) -> None:
    quantize("--scheme", "W8A8Dynamic", "--skip", "3")
    capsys.readouterr()
    assert main(["verify", "q"]) == 0
    total = 20 * 64 + 64 * 96 + 96 * 32
    share = (20 * 64 + 96 * 32) / total
    assert f"floating point: {share:.1%} of the weights: 3.weight ({96 * 32 / total:.1%})" in capsys.readouterr().out
    main(["verify", "q", "--json"])
    assert list(json.loads(capsys.readouterr().out)["float"]) == ["3.weight", "0.weight"]


PAIR = """
import torch
from torch import nn


def build(more=0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 32), nn.LayerNorm(32))
    with torch.no_grad():
        model[0].weight[3, 4] += more
    return model


def other():
    return build(1.0)
"""


def test_verify_names_floats_that_are_not_the_models(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pair_models.py").write_text(PAIR)
    assert main(["quantize", "pair_models:build", "--scheme", "W8A8Dynamic", "--out", "q"]) == 0
    told = []
    for model in ("build", "other"):
        capsys.readouterr()
        assert main(["verify", "q", "--against", f"pair_models:{model}"]) == 0
        told.append(capsys.readouterr().out)
        assert main(["verify", "q", "--against", f"pair_models:{model}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["other_tensors"] == ([] if model == "build" else ["0.weight"])
    assert "not as in the float model" not in told[0]
    assert "not as in the float model: 0.weight (in floating point), which improvers and training change" in told[1]


def test_verify_runs_the_model_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "odd_models.py").write_text(ODD)
    assert main(["quantize", "odd_models:build", "--scheme", "W8A8Dynamic", "--out", "q"]) == 0
    capsys.readouterr()
    assert main(["verify", "q"]) == 0
    assert "Floating-point layers were not checked; pass --against MODEL to check them.\n" in capsys.readouterr().out
    assert main(["verify", "q", "--against", "odd_models:build"]) == 0
    assert "not checked; --inputs: none, and a Net does not say what it takes" in capsys.readouterr().out
    words = ["verify", "q", "--against", "odd_models:build", "--inputs", "odd_models:example"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "run once: 1 matrices are multiplied in floating point" in told
    assert "hidden (mm, 4" in told
    assert main([*words, "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["run"]
    assert (one["name"], one["use"]) == ("hidden", "multiplied")
    quantize("--scheme", "W8A8Dynamic")
    capsys.readouterr()
    assert main(["verify", "q", "--against", MODEL]) == 0
    assert "run once: nothing that the model holds is multiplied" in capsys.readouterr().out


ODD = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.hidden = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16))
    def forward(self, x):
        return self.fc(x) @ self.hidden
def build():
    torch.manual_seed(0)
    return Net()
def example():
    return torch.ones(2, 16)
"""


def test_progress_goes_to_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    quantize("--scheme", "W8A8Dynamic")
    captured = capsys.readouterr()
    for step in ("1/3 building the model", "2/3 quantising", "3/3 saving"):
        assert f"quantize: {step}" in captured.err
    assert "quantize: 1/3" not in captured.out


def test_the_command_that_comes_next_can_be_copied(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", MODEL, "--scheme", "W8A8Dynamic", "--out", "a folder"]) == 0
    assert "check it with: pyquant verify 'a folder'" in capsys.readouterr().out


def test_verify_finds_a_flipped_bit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantize("--scheme", "W8A8Dynamic")
    shard = next((folder / "q").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 4
    shard.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", "q"]) == 1
    assert "pyquant: error:" in capsys.readouterr().err


def test_verify_finds_wrong_bits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quantize("--scheme", "W8A8Dynamic")
    from pyquant.nn.qlinear import QLinear

    true_forward = QLinear.forward
    monkeypatch.setattr(
        QLinear, "forward", lambda self, x, residual=None: true_forward(self, x, residual) * (1 + 2**-20)
    )
    assert main(["verify", "q"]) == 1
    assert "DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["quantize", "nowhere:build", "--scheme", "W8A8Dynamic", "--out", "q"], "no module named 'nowhere'"),
        (["quantize", "toy_models:missing", "--scheme", "W8A8Dynamic", "--out", "q"], "has no 'missing'"),
        (["quantize", "toy_models:NUMBER", "--scheme", "W8A8Dynamic", "--out", "q"], "is a int"),
        (["quantize", "toy_models:not_a_model", "--scheme", "W8A8Dynamic", "--out", "q"], "returned a int"),
        (
            ["quantize", "toy_models:needs", "--scheme", "W8A8Dynamic", "--out", "q"],
            "takes arguments (a, b=1); allowed: a callable without",
        ),
        (
            ["quantize", "bert-base-uncased", "--scheme", "W8A8Dynamic", "--out", "q"],
            "(download a model of the hub first: hf download bert-base-uncased --local-dir FOLDER)",
        ),
        (["quantize", "just words", "--scheme", "W8A8Dynamic", "--out", "q"], "just words"),
        (["quantize", ".", "--scheme", "W8A8Dynamic", "--out", "q"], "config.json"),
        (["quantize", MODEL, "--scheme", "W9A9", "--out", "q"], "W9A9"),
        (["quantize", MODEL, "--scheme", "W8A8Dynamc", "--out", "q"], 'did you mean "W8A8Dynamic"?'),
        (
            ["quantize", MODEL, "--scheme", "W4A8Dynamic(group_sise=64)", "--out", "q"],
            'group_size, symmetric_inputs; did you mean "group_size"?',
        ),
        (["quantize", MODEL, "--scheme", "W8A8", "--out", "q"], "'data': got nothing for"),
        (["quantize", MODEL, "--scheme", "W8A8", "--out", "q"], "pyquant quantize --data FN"),
        (["quantize", MODEL, "--scheme", "W4A8Dynamic(group_size=5)", "--on-indivisible", "error", "--out", "q"], "5"),
        (["quantize", MODEL, "--scheme", "W8A8Dynamic", "--skip", "nothing", "--out", "q"], "'--skip': got"),
        (["quantize", MODEL, "--scheme", "W8A8Dynamic", "--out", "toy_models.py"], "a file"),
        (["quantize", MODEL, "--config", "missing.yaml", "--out", "q"], "no such file"),
        (["verify", "q", "--inputs", "toy_models:example_inputs"], "--against"),
    ],
)
def test_wrong_words_are_refused_by_name(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.err.rstrip().splitlines()[-1].startswith("pyquant: error: ")
    assert not Path("q").exists()


def test_verify_against_another_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    quantize("--scheme", "W8A8Dynamic")
    assert main(["verify", "q", "--against", "toy_models:other_architecture"]) == 2
    assert "'1'" in capsys.readouterr().err
    for other, got in (("wider", r"[96, 128]"), ("longer", r"[100, 64]"), ("convolving", r"[96, 64, 1, 1]")):
        assert main(["verify", "q", "--against", f"toy_models:{other}"]) == 2
        told = capsys.readouterr().err.splitlines()[-1]
        assert f"'1' is a {'Conv2d' if other == 'convolving' else 'Linear'} with weights {got}" in told
        assert "a Linear of 64 weights for each of 96 outputs" in told


def test_nested_callables_and_missing_folders(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "toy_models:Nested.make", "--scheme", "W8A8Dynamic", "--out", "q"]) == 0
    for words in (["inspect", "gone"], ["verify", "gone"]):
        assert main(words) == 1
    assert "gone" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W4A16(group_size=None)"])
def test_convolutions(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "toy_models:build_images", "--scheme", scheme, "--out", "q"]) == 0
    assert "convolution" in capsys.readouterr().out
    layers = summary(capsys)["layers"]
    assert [(layer["kind"], layer["in_features"], layer["gives"]) for layer in layers] == [
        ("conv2d", 27, "real numbers"),
        ("conv2d", 16, "real numbers"),
    ]
    assert layers[1]["geometry"]["kernel_size"] == [2, 1]
    assert main(["inspect", "q"]) == 0
    assert "conv2d 3x3" in capsys.readouterr().out
    found = verdict(capsys, "--against", "toy_models:build_images", "--inputs", "toy_models:example_images")
    assert found["ok"]
    assert [layer["exact"] for layer in found["layers"]] == [True if "A8" in scheme else None] * 2
    assert all(layer["sqnr_db"] > 12 for layer in found["layers"])


@pytest.mark.parametrize("how", [("--scheme", "W8A8Dynamic"), ("--recipe", "recipe.json"), ("--config", "recipe.json")])
def test_auto_leaves_what_loses_in_floating_point(
    how: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyquant.nn import speed

    (folder / "recipe.json").write_text('{"default": "W8A8Dynamic"}')
    (folder / "batches.py").write_text("import toy_models\n\ndef make():\n    yield toy_models.example_inputs()\n")
    slow = {"QLinear96": 3.0, "Linear96": 2.0}
    monkeypatch.setattr(speed, "_seconds", lambda m, x: slow.get(f"{type(m).__name__}{x.shape[-1]}", 1.0) * 1e-6)
    quantize(*how, "--auto", "--data", "batches:make")
    told = capsys.readouterr().out
    assert "2 layers on cpu" in told
    assert "3.0 us against 2.0 us at 12 rows (0.67x)" in told
    assert {layer["name"] for layer in summary(capsys)["layers"]} == {"1"}
    assert main(["verify", "q", "--against", MODEL, "--inputs", "toy_models:example_inputs"]) == 0
    capsys.readouterr()
    assert main(["quantize", MODEL, *how, "--auto", "--out", "q2"]) == 2
    assert "--data, whose first batch is the example" in capsys.readouterr().err
