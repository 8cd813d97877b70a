"""A text file as calibration data: by the function, and by the commands as a page shows them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import accept
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is a demo extra and not installed"
)

from bench.lm import train  # noqa: E402
from pyquant import QLinear, load_pretrained  # noqa: E402
from pyquant.cli.main import main  # noqa: E402
from pyquant.errors import ArgumentError  # noqa: E402
from pyquant.integrations.transformers import text_batches  # noqa: E402
from pyquant.integrations.transformers.text import longest_of  # noqa: E402

TEXT = "".join(f"Line {i}: the quick brown fox, čtyři žluté ježky.\n" for i in range(40))
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}


def _saved(folder: Path, kind: str = "llama", **settings: Any) -> Path:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    torch.manual_seed(0)
    given = {"vocab_size": 256, "max_position_embeddings": 96, **SMALL, **settings}
    if kind == "t5":
        given = {"vocab_size": 256, "d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 2, "d_kv": 32}
    config = AutoConfig.for_model(kind, **given)
    (AutoModelForCausalLM if kind == "llama" else AutoModel).from_config(config).save_pretrained(folder)
    train.byte_tokenizer(96).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = _saved(tmp_path_factory.mktemp("text") / "llama")
    (folder.parent / "book.txt").write_text(TEXT, encoding="utf-8")
    return folder


def test_windows_are_the_texts_own_tokens(llama: Path) -> None:
    batches = text_batches(llama, llama.parent / "book.txt", length=50, windows=10, rows=4)
    accept.t0([tuple(b["input_ids"].shape) for b in batches], [(4, 50), (4, 50), (2, 50)])
    accept.t0([list(b) for b in batches], [["input_ids"]] * 3)
    data, whole = TEXT.encode(), len(TEXT.encode()) // 50
    starts = [i * whole // 10 * 50 for i in range(10)]
    windows = torch.cat([b["input_ids"] for b in batches]).tolist()
    accept.t0([bytes(w) for w in windows], [data[s : s + 50] for s in starts])
    every = text_batches(llama, llama.parent / "book.txt", length=50, windows=None)
    accept.t0(sum(len(b["input_ids"]) for b in every), whole)
    usual = text_batches(llama, llama.parent / "book.txt")
    accept.t0(usual[0]["input_ids"].shape[1], 96)  # what the model takes, below the usual 512


@pytest.mark.parametrize("kind", ["bert", "roberta", "t5", "gpt2"])
def test_other_models_take_their_batches(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    more = {"pad_token_id": 1} if kind == "roberta" else {}
    more |= {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 96} if kind == "gpt2" else {}
    folder = _saved(tmp_path / kind, kind, **more)
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    model = AutoModel.from_pretrained(folder).eval()
    batches = text_batches(folder, tmp_path / "book.txt", windows=2)
    assert ("decoder_input_ids" in batches[0]) == (kind == "t5")
    with torch.no_grad():
        assert model(**batches[0])[0].isfinite().all()
    longest = {"bert": 96, "roberta": 94, "t5": None, "gpt2": 96}[kind]
    accept.t0(longest_of(model.config), longest)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"folder": "none"}, r"'folder'.*no config\.json"),
        ({"path": "none.txt"}, r"'path'.*no such file"),
        ({"path": "binary"}, r"'path'.*byte 0 is not UTF-8"),
        ({"path": "short.txt"}, r"'path'.*3 tokens.*one window of 96"),
        ({"length": 97}, r"'length'.*97.*96"),
        ({"rows": 0}, r"'rows'"),
        ({"windows": 0}, r"'windows'"),
    ],
)
def test_what_is_wrong_is_named(llama: Path, given: dict[str, Any], told: str) -> None:
    (llama.parent / "binary").write_bytes(b"\xff\xfe\x00")
    (llama.parent / "short.txt").write_text("abc")
    words: dict[str, Any] = {"folder": llama, "path": llama.parent / "book.txt"} | given
    for name in ("folder", "path"):
        words[name] = llama.parent / words[name]
    with pytest.raises(ArgumentError, match=told):
        text_batches(**words)


def test_a_tokenizer_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = _saved(tmp_path / "small", vocab_size=100)
    with pytest.raises(ArgumentError, match=r"'folder'.*ids below 100"):
        text_batches(folder, llama.parent / "book.txt")


def test_a_preset_that_improves_takes_a_text(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    out, book = tmp_path / "quantised", str(llama.parent / "book.txt")
    words = ["quantize", str(llama), "--preset", "llm-w4a8", "--out", str(out)]
    assert main(words) == 2
    assert "argument '--data': got none, and --preset asks for gptq" in capsys.readouterr().err
    assert main([*words, "--data", book]) == 0
    model = AutoModelForCausalLM.from_pretrained(llama)
    load_pretrained(out, model)
    assert sum(isinstance(m, QLinear) for m in model.modules()) == 7
    assert main(["quantize", "torch.nn:Identity", "--scheme", "W8A8", "--data", book, "--out", str(out)]) == 2
    assert "the folder of a Hugging Face model alone" in capsys.readouterr().err
    assert main([*words, "--data", str(llama.parent)]) == 2  # a folder is no text
    capsys.readouterr()


def test_the_other_commands_take_a_text(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = str(llama.parent / "book.txt")
    assert main(["sensitivity", str(llama), "--data", book, "--batches", "1", "--formats", "W8A8Dynamic"]) == 0
    assert "mlp.down_proj" in capsys.readouterr().out
