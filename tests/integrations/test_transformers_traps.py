"""Where transformers gives wrong numbers without an error: each case is there, and pyquant in it would be seen."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import switches
import torch

import pyquant
from pyquant.integrations import transformers as ours

T = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
IDS = torch.arange(4, 20)[None]


_enabled = switches.on(ours)


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    config = T.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    return pyquant.quantize_(T.LlamaForCausalLM(config).eval(), "W8A8Dynamic", check_speed=False)


@pytest.fixture
def codes(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "codes")
    return tmp_path / "codes"


def is_the_same(folder: Path, model: Any) -> None:
    """What tests ask of a directory that transformers loads: all layers, all bits."""
    read = T.AutoModelForCausalLM.from_pretrained(folder)
    counts = [sum(isinstance(m, pyquant.QLinear) for m in one.modules()) for one in (read, model)]
    assert counts[0] == counts[1], "a layer in floating point"
    with torch.no_grad():
        assert torch.equal(read(IDS).logits, model(IDS).logits), "other numbers"


def method(folder: Path, name: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["quant_method"] = name
    (folder / "config.json").write_text(json.dumps(config))


def test_buffers_that_no_file_has_are_emptied_after_loading(codes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a QLinear keeps its codes in."""
    from pyquant.integrations.transformers.quantizer import PyquantCompressedTensorsHfQuantizer as Quantizer

    honest = Quantizer._process_model_before_weight_loading

    def planted(self: Quantizer, model: Any, **given: Any) -> None:
        honest(self, model, **given)
        model.register_buffer("mark", torch.full((4096,), 7.0), persistent=False)

    monkeypatch.setattr(Quantizer, "_process_model_before_weight_loading", planted)
    assert not (T.AutoModelForCausalLM.from_pretrained(codes).mark == 7).all()


def test_layers_that_stand_in_the_model_while_it_is_loaded_are_seen(
    codes: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyquant.integrations.transformers.takeover import Takeover

    is_the_same(codes, model)
    begin, finish = Takeover.__init__, Takeover.finish

    def at_once(self: Takeover, held: Any, *given: Any) -> None:
        begin(self, held, *given)
        finish(self, held, lambda _: torch.device("cpu"))

    monkeypatch.setattr(Takeover, "__init__", at_once)
    monkeypatch.setattr(Takeover, "finish", lambda *_: 0)
    with pytest.raises((AssertionError, RuntimeError), match=r"other numbers|an error"):
        is_the_same(codes, model)


def test_an_unknown_method_is_a_warning_and_codes_become_weights(
    codes: Path, model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So no file of pyquant's names a method of its own, and one that does is an error where pyquant is there."""
    from transformers.quantizers import auto

    method(codes, "pyquant")
    with pytest.raises(pyquant.UnsupportedError, match=r"config\.json with quant_method 'pyquant'"):
        is_the_same(codes, model)
    for table in (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING):
        monkeypatch.delitem(table, "pyquant")  # planted: as where pyquant is not imported
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="transformers"):
        patch.setattr(logging.getLogger("transformers"), "propagate", True)
        with pytest.raises(AssertionError, match="a layer in floating point"):
            is_the_same(codes, model)
    assert "Unknown quantization type, got pyquant" in caplog.text
    read = T.AutoModelForCausalLM.from_pretrained(codes)
    assert read.model.layers[0].mlp.up_proj.weight.abs().max() == 127


def test_a_save_that_named_a_method_of_its_own_is_seen(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyquant.integrations.transformers import saving

    honest = saving.as_compressed_tensors

    def planted(one: Any) -> Any:
        tensors, words, keys = honest(one)
        return tensors, words | {"quant_method": "pyquant"}, keys

    monkeypatch.setattr(saving, "as_compressed_tensors", planted)
    model.save_pretrained(tmp_path)
    with pytest.raises(pyquant.UnsupportedError, match=r"config\.json with quant_method 'pyquant'"):
        is_the_same(tmp_path, model)


def test_a_config_of_another_class_name_is_refused_by_transformers(
    codes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares names of classes: planted, a config of pyquant's own for files of compressed-tensors."""
    from transformers.quantizers import auto

    def dequantised() -> Any:
        given = T.CompressedTensorsConfig(dequantize=True)
        return T.AutoModelForCausalLM.from_pretrained(codes, quantization_config=given)

    assert dequantised().model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    own = type("PyquantCompressedTensorsConfig", (T.CompressedTensorsConfig,), {})
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "compressed-tensors", own)
    with pytest.raises(ValueError, match="quantized with PyquantCompressedTensorsConfig but you are passing"):
        dequantised()


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("by", ["transformers", "pyquant"])
def test_scaled_embeddings_that_are_quantised_come_back(by: str, heads: bool, tmp_path: Path) -> None:
    """Gemma's scale is a buffer that no file holds: transformers makes it, on the meta device at first."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 16}
    config = T.Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=heads)
    model = T.Gemma2ForCausalLM(config).eval()
    pyquant.quantize_(model, "W8A8Dynamic", embeddings=True, heads=heads or None, check_speed=False)
    model.save_pretrained(tmp_path) if by == "transformers" else pyquant.save_pretrained(model, tmp_path)
    read = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(read(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_pooling_head_of_multihead_attention_is_quantised_on_the_fly(tmp_path: Path) -> None:
    """SigLIP's initialisation looks at in_proj_weight of a module that has been taken out by then."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = T.SiglipVisionModel(T.SiglipVisionConfig(**sizes, image_size=32, patch_size=8)).eval()
    model.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 32, 32)
    read = T.SiglipVisionModel.from_pretrained(tmp_path, quantization_config=ours.PyquantConfig("W8A8Dynamic")).eval()
    pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    with torch.no_grad():
        assert torch.equal(read(images).pooler_output, model(images).pooler_output)
