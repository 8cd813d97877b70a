"""pyquant convert: checkpoints of others on the command line, into checkpoints that verify and load."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import foreign
import pytest
import torch

import pyquant
from pyquant.cli.main import main

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (pip install transformers)"
)
NETS = """\
import foreign

def build():
    return foreign.Net()

def data():
    return 2 * [foreign.torch.zeros(2, 64)]

def one():
    return data()[:1]
"""
GPTQ = {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    return tmp_path


def layer(n: int, k: int, seed: int) -> dict[str, torch.Tensor]:
    q, z, scales = foreign.unsigned(4, k, n, k // 16, torch.Generator().manual_seed(seed))
    return foreign.gptq_layer(q, torch.full_like(z, 8), scales, 4, 1)


def written(folder: Path) -> Path:
    tensors = foreign.floats()
    for name, (n, k) in foreign.LAYERS.items():
        tensors |= foreign.of_layer(name, layer(n, k, n))
    return foreign.write(folder / "theirs", GPTQ, tensors)


@pytest.mark.parametrize("activations", ["file", "int8"])
def test_a_checkpoint_of_others_becomes_ours(
    activations: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(folder)
    words = ["convert", str(path), "ours", "--model", "nets:build", "--activations", activations]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "gptq -> ours" in told
    assert "(group_size=16), weights full range fixed" in told
    assert main(["verify", "ours"]) == 0
    direct = pyquant.load_quantized_(foreign.Net(), path, activations=activations)
    again = pyquant.load_pretrained("ours", foreign.Net)
    x = torch.randn(4, 64)
    assert torch.equal(again(x), direct(x))


def test_what_is_refused_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(folder)
    foreign.write(path, {**GPTQ, "bits": 3}, {})
    assert main(["convert", str(path), "ours", "--model", "nets:build"]) == 1
    assert "bits: got 3; allowed: 4 or 8" in capsys.readouterr().err
    assert not (folder / "ours").exists()
    (folder / "file").write_text("")
    assert main(["convert", str(path), "file"]) != 0


BATCHES = "package.module:callable that returns batches, or, with the folder of a Hugging Face model, a text file"
MODEL = "package.module:callable that returns an nn.Module, or a folder of a Hugging Face model"
PATH = "folder with config.json and safetensors files, or FILE.gguf"
PRESET = ["--preset", "llm-w4a4", "--data"]
WRONG: dict[str, tuple[list[str], str]] = {
    "data": ([*PRESET, "/none"], f"'--data': got '/none', no such file or folder; allowed: {BATCHES}"),
    "data of a folder": ([*PRESET, "floats"], f"'--data': got 'floats', a folder; allowed: {BATCHES}"),
    "data of another form": ([*PRESET, "a:b c"], f"'--data': got 'a:b c', not a name of that form; allowed: {BATCHES}"),
    "no tokenizer": ([*PRESET, "file", "--model", "nets:build"], "'PATH': got floats: "),
    "model": (
        ["--scheme", "W8A8Dynamic", "--model", "/none"],
        f"'--model': got '/none', no such file or folder; allowed: {MODEL}",
    ),
    "cache": (
        [*PRESET, "nets:data", "--model", "nets:build", "--cache", "file"],
        "'--cache': got file: a file, or below one; allowed: a folder",
    ),
    "device": (
        [*PRESET, "nets:data", "--model", "nets:build", "--device", "x"],
        "'--device': got 'x'; allowed: a device",
    ),
    "batches": (
        [*PRESET, "nets:data", "--model", "nets:build", "--batches", "0"],
        "'--batches': got 0; allowed: a whole number >= 1",
    ),
    "one batch": ([*PRESET, "nets:one", "--model", "nets:build"], "got 1, with this data; allowed: at least 2"),
    "preset": (["--preset", "x", "--data", "nets:data"], "'--preset': got 'x'; allowed: llm-w8a8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_option_is_named_with_what_it_may_be(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, told = WRONG[case]
    foreign.write(folder / "floats", None, foreign.Net().state_dict())
    (folder / "file").write_text("a text")
    assert main(["convert", "floats", "ours", *words]) == 2
    assert told in capsys.readouterr().err
    assert not (folder / "ours").exists()


def test_paths_are_looked_at_before_the_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    floats = foreign.write(folder / "floats", None, foreign.Net().state_dict())
    (folder / "file").write_text("")
    words = ["--scheme", "W8A8Dynamic", "--model", "nets:build"]
    for path, got in (("none", "no such file or folder"), ("file", "a file, with --scheme")):
        assert main(["convert", path, "ours", *words]) == 2
        assert f"'PATH': got {path}, {got}; allowed: {PATH}" in capsys.readouterr().err
    before = {file.name: file.read_bytes() for file in floats.iterdir()}
    assert main(["convert", "floats", "floats", *words]) == 1
    told = capsys.readouterr().err
    assert "is not of pyquant; allowed: a directory without weights and config.json of others" in told
    assert "quantising" not in told
    assert before == {file.name: file.read_bytes() for file in floats.iterdir()}


@needs_transformers
def test_the_model_is_what_config_json_names(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=30, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    model = BertForMaskedLM(config)
    tensors = {}
    for name, tensor in model.state_dict().items():
        inner = name.removesuffix(".weight")
        if ".layer." in name and name.endswith(".weight") and tensor.dim() == 2:
            tensors |= foreign.of_layer(inner, layer(*tensor.shape, len(name)))
        elif "decoder" not in name:
            tensors[name] = tensor.half()
    words = {**config.to_dict(), "architectures": ["BertForMaskedLM"], "dtype": "float16"}
    path = foreign.write(folder / "bert", GPTQ, tensors, shards=2, **words)
    (path / "vocab.txt").write_text("a\nb\n")
    assert main(["convert", str(path), "ours"]) == 0
    told = capsys.readouterr().out
    assert "float Linear" in told
    assert (folder / "ours/vocab.txt").read_text() == "a\nb\n"
    again = pyquant.load_pretrained("ours", lambda: BertForMaskedLM(config)).float().eval()
    direct = pyquant.load_quantized_(BertForMaskedLM(config), path).eval()
    ids = torch.arange(30).reshape(2, 15)
    assert torch.equal(again(input_ids=ids).logits, direct(input_ids=ids).logits)


@pytest.mark.parametrize("out", ["", "dangling", "file/inside", "file"])
def test_where_nothing_can_be_saved_is_told_before_the_work(
    out: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "dangling").symlink_to("nowhere")
    (folder / "file").write_text("")
    monkeypatch.setattr("pyquant.cli.convert.open_foreign", lambda *_, **__: pytest.fail("the work has begun"))
    assert main(["convert", str(written(folder)), out, "--model", "nets:build"]) == 2
    assert "argument 'OUT'" in capsys.readouterr().err


def test_a_gguf_file_needs_a_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gguf_file

    gguf_file.write(folder / "m.gguf", {"general.architecture": "toy"}, {"a": gguf_file.plain(torch.zeros(2, 2))})
    assert main(["convert", "m.gguf", "ours"]) == 2
    assert "argument '--model': got none, for a GGUF file" in capsys.readouterr().err
