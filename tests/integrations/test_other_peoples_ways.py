"""What transformers does with a quantised model: it works, or our error says what to do first."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import with_transformers
from torch import nn

import pyquant
from pyquant import W4A8Dynamic, W8A8Dynamic

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is a demo extra and not installed"
)
needs_compressed_tensors = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"
)


def llama(**more: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    return transformers.LlamaForCausalLM(config).eval()


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("embeddings", "heads"), [(False, False), (True, False), (False, True), (True, True)])
def test_resizing_a_vocabulary(embeddings: bool, heads: bool, tied: bool) -> None:
    model = pyquant.quantize_(llama(tie_word_embeddings=tied), W8A8Dynamic(), embeddings=embeddings, heads=heads)
    holds_codes = any(
        isinstance(end, (pyquant.QEmbedding, pyquant.QLinear))
        for end in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    assert holds_codes == (heads or (embeddings and not tied))
    if holds_codes:
        with pytest.raises(pyquant.UnsupportedError, match=r"dequantize_\(model\) first, resize"):
            model.resize_token_embeddings(100)
        pyquant.dequantize_(model)
    model.resize_token_embeddings(100)
    with torch.no_grad():
        assert model(torch.tensor([[1, 99]])).logits.shape == (1, 2, 100)


GPT2 = """
import json, torch, warnings
import transformers as T
import pyquant
warnings.simplefilter("ignore")
gpt2 = T.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
siglip = T.SiglipVisionConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, image_size=32, patch_size=8
)
ids, told = torch.arange(8)[None], {}
cases = [(T.GPT2LMHeadModel, gpt2, ids, s) for s in ("W8A8Dynamic", "W4A16(group_size=16)", "FP16")]
cases.append((T.SiglipVisionModel, siglip, torch.randn(2, 3, 32, 32), "W8A8Dynamic"))
for cls, config, x, scheme in cases:
    torch.manual_seed(0)
    model = cls(config).eval()
    before = model(x)[0].detach()
    pyquant.quantize_(model, scheme)
    want = model(x)[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pyquant.save_pretrained(model, "q")
    warned = any("pyquant.load_pretrained" in str(w.message) for w in caught)
    again = pyquant.load_pretrained("q", cls(config)).eval()
    try:
        cls.from_pretrained("q")
        error = "none"
    except Exception as e:
        error = str(e)
    pyquant.save_pretrained(pyquant.dequantize_(model), "f")
    floats = float((cls.from_pretrained("f").eval()(x)[0] - model(x)[0]).abs().max())
    told[cls.__name__ + scheme] = [warned, torch.equal(again(x)[0], want), error, floats]
left = pyquant.quantize_(T.GPT2LMHeadModel(gpt2).eval(), {"lm_head": "W8A8Dynamic"}, heads=True)
pyquant.save_pretrained(left, "left")
read = T.GPT2LMHeadModel.from_pretrained("left").eval()
told["left"] = float((read(ids)[0] - left(ids)[0]).norm() / left(ids)[0].norm())
print(json.dumps(told))
"""


@needs_transformers
@needs_compressed_tensors
def test_layers_that_compressed_tensors_does_not_know_are_not_read_as_something_else(tmp_path: Path) -> None:
    told = with_transformers(GPT2, tmp_path)
    assert told.pop("left") < 0.02
    for name, (warned, equal, error, floats) in told.items():
        assert warned, name
        assert equal, name
        assert "read it with pyquant.load_pretrained" in error, (name, error)
        assert floats < 1e-5, (name, floats)  # dequantize_ brings the classes back that transformers knows


@needs_transformers
def test_a_folder_that_transformers_reads_has_no_such_words(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        pyquant.save_pretrained(pyquant.quantize_(llama(), W8A8Dynamic(), heads=True), tmp_path)
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [name.partition("_")[0] for name in groups] == ["group"]


@pytest.mark.parametrize("name", ["two\nlines", "nul\0", "\x1b[31mred", "bidi\u202e", "x" * 257])
def test_names_that_no_file_holds_are_refused_before_any_work(name: str) -> None:
    for convert in (
        lambda m: pyquant.quantize_(m, W8A8Dynamic()),
        lambda m: pyquant.quantize_(m, {nn.Conv2d: W8A8Dynamic(), "ok": W4A8Dynamic()}),
        lambda m: pyquant.insert_fake_quantize_(m, W8A8Dynamic()),
        lambda m: pyquant.SelectiveQuantizer(verbose=False).quantize_module(m),
    ):
        model = nn.Sequential()
        model.add_module("ok", nn.Linear(8, 8))
        model.add_module(name, nn.Linear(8, 8))
        with pytest.raises(pyquant.ArgumentError, match="printable characters") as caught:
            convert(model)
        assert str(caught.value).isprintable()
        assert all(type(m) is nn.Linear for m in model.children())
