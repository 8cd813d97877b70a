"""Models of sound and of series through transformers: some have no input embeddings, some hold LSTMs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyquant

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from pyquant.integrations.transformers import PyquantConfig, enable  # noqa: E402


def encodec() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    sizes = {
        "hidden_size": 32,
        "num_filters": 4,
        "upsampling_ratios": [4, 2],
        "codebook_size": 16,
        "num_lstm_layers": 1,
    }
    model = transformers.EncodecModel(transformers.EncodecConfig(**sizes, codebook_dim=32, target_bandwidths=[24.0]))
    return model, {"input_values": torch.randn(1, 1, 320)}


def patchtst() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    sizes = {"d_model": 32, "num_attention_heads": 2, "ffn_dim": 64, "num_hidden_layers": 1}
    config = transformers.PatchTSTConfig(
        **sizes, num_input_channels=2, context_length=32, patch_length=8, patch_stride=8, prediction_length=4
    )
    return transformers.PatchTSTForPrediction(config), {"past_values": torch.randn(2, 32, 2)}


def sewd() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1}
    conv: dict[str, Any] = {"conv_dim": (16, 32), "conv_kernel": (10, 4), "conv_stride": (5, 4), "vocab_size": 12}
    model = transformers.SEWDForCTC(transformers.SEWDConfig(**sizes, **conv, num_conv_pos_embeddings=16))
    return model, {"input_values": torch.randn(1, 1600)}


def wav2vec2() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Initialises two of its layers itself, by their reset_parameters."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1}
    conv: dict[str, Any] = {"conv_dim": (16, 32), "conv_kernel": (10, 4), "conv_stride": (5, 4), "vocab_size": 12}
    book = {"codevector_dim": 32, "proj_codevector_dim": 32, "num_codevectors_per_group": 8}
    config = transformers.Wav2Vec2Config(
        **sizes, **conv, **book, num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4
    )
    return transformers.Wav2Vec2ForPreTraining(config), {"input_values": torch.randn(1, 1600)}


MAKERS: list[Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]] = [encodec, patchtst, sewd, wav2vec2]


def first(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        y = model(**given)
    return next(value for value in y.values() if torch.is_tensor(value) and value.is_floating_point())


@pytest.mark.parametrize("make", MAKERS)
def test_quantised_while_it_is_read_and_saved(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, given = make()
    model.eval().save_pretrained(tmp_path / "float")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyquant.QuantizationWarning)
        read = type(model).from_pretrained(tmp_path / "float", quantization_config=PyquantConfig("W8A8Dynamic")).eval()
        pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
        assert torch.equal(first(read, given), first(model, given))
        pyquant.save_pretrained(model, tmp_path / "ours")
        again = pyquant.load_pretrained(tmp_path / "ours", lambda: make()[0]).eval()
    assert torch.equal(first(again, given), first(model, given))


def test_a_model_without_input_embeddings_saves_itself(tmp_path: Path) -> None:
    enable()
    torch.manual_seed(1)
    model, given = sewd()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyquant.QuantizationWarning)
        pyquant.quantize_(model.eval(), "W8A8Dynamic", check_speed=False)
        model.save_pretrained(tmp_path)
        read = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(first(read, given), first(model, given))


def test_heads_in_a_list_are_heads() -> None:
    """One for each codebook (MusicGen)."""
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_codebooks": 2}
    tokens = {"vocab_size": 64, "pad_token_id": 64, "bos_token_id": 64, "max_position_embeddings": 64}
    model = transformers.MusicgenForCausalLM(transformers.MusicgenDecoderConfig(**sizes, **tokens))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pyquant.QuantizationWarning)
        pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
        assert [type(head) for head in model.lm_heads] == [nn.Linear, nn.Linear]
        pyquant.quantize_(model, "W8A8Dynamic", heads=True, check_speed=False)
    assert [type(head) for head in model.lm_heads] == [pyquant.QLinear, pyquant.QLinear]
