"""Embeddings with a forward of their own stay what they are, around int8 rows."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant import W8A8Dynamic
from pyquant.nn.qembedding import QEmbedding

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is a demo extra and not installed"
)


class Scaled(nn.Embedding):
    """A factor that is an unsaved buffer, and an offset: what Gemma, BART and OPT have."""

    def __init__(self, rows: int, width: int) -> None:
        self.offset = 2
        super().__init__(rows + self.offset, width, padding_idx=0)
        self.register_buffer("factor", torch.tensor(width**0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids + self.offset) * self.factor.to(self.weight.dtype)  # type: ignore[operator]


class Reader(nn.Embedding):
    """Reads rows of its weight itself, as Whisper's positions do."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[: ids.shape[-1]]


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.fc = Scaled(20, 24), Reader(16, 24), nn.Linear(24, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.words(ids) + self.places(ids))  # type: ignore[no-any-return]


def body() -> Body:
    torch.manual_seed(0)
    return Body()


def test_the_forward_of_the_class_runs_around_int8_rows(tmp_path: Path) -> None:
    model, ids = body(), torch.arange(16)[None]
    reference = copy.deepcopy(model)
    pyquant.quantize_(model, W8A8Dynamic(), embeddings=True)
    for name in ("words", "places"):
        layer = model.get_submodule(name)
        assert isinstance(layer, QEmbedding)
        assert isinstance(layer, type(reference.get_submodule(name)))
        assert set(layer.state_dict()) == {"weight", "weight_scale"}
        assert not any(p.numel() for p in layer.parameters())
    with torch.no_grad():
        exact = model.words.to_float()
        assert type(exact) is Scaled
        assert torch.equal(exact(ids), model.words(ids))
        assert (model.words(ids) - reference.words(ids)).abs().max() < 0.02 * reference.words(ids).abs().max()
        assert torch.equal(model.places(ids), model.places.weight.dequantize()[:16])  # type: ignore[operator]
        got = model(ids)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(ids), got)
        pyquant.save_pretrained(model, tmp_path)
        assert torch.equal(pyquant.load_pretrained(tmp_path, body)(ids), got)
        assert [type(m).__name__ for m in pyquant.dequantize_(model).children()] == ["Scaled", "Reader", "Linear"]


def test_types_and_moves_reach_the_buffers_of_the_class() -> None:
    model = pyquant.quantize_(body(), W8A8Dynamic(), embeddings=True)
    ids = torch.arange(16)[None]
    assert model.bfloat16().words(ids).dtype == torch.bfloat16  # type: ignore[operator,union-attr]
    assert model.to("meta").words.factor.device.type == "meta"  # type: ignore[union-attr]


def test_a_second_conversion_leaves_them() -> None:
    model = pyquant.quantize_(body(), {"fc": None, "_default": W8A8Dynamic()}, embeddings=True)
    words = model.words
    pyquant.quantize_(model, W8A8Dynamic(), embeddings=True)
    assert model.words is words
    assert {r.name: r.scheme for r in pyquant.quantization_report(model)} == {
        "words": "int8 per row",
        "places": "int8 per row",
        "fc": "W8A8Dynamic",
    }


def test_further_tensors_are_no_business_of_ours() -> None:
    class More(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(20, 24)
            self.shift = nn.Parameter(torch.zeros(24))

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.shift

    model = nn.ModuleDict({"more": More(), "fc": nn.Linear(24, 8)})
    with pytest.warns(pyquant.QuantizationWarning, match=r"more \(More.*tensors of its own \(shift\)"):
        pyquant.quantize_(model, W8A8Dynamic(), embeddings=True)
    assert type(model["more"]) is More


SIZES: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLM: dict[str, Any] = {
    **SIZES,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
SEQ: dict[str, Any] = {
    **SIZES,
    "d_model": 48,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 1,
}


def architecture(name: str) -> tuple[Callable[[], Any], dict[str, Tensor]]:
    import transformers as t

    ids = torch.arange(3, 27).reshape(2, 12)
    decoder = {"decoder_input_ids": ids[:, :5]}
    opt = {k: v for k, v in LLM.items() if k not in ("intermediate_size", "num_key_value_heads", "head_dim")}
    makers: dict[str, tuple[Any, Any, dict[str, Tensor]]] = {
        "gemma": (t.GemmaModel, t.GemmaConfig(**LLM), {"input_ids": ids}),
        "gemma2": (t.Gemma2Model, t.Gemma2Config(**LLM), {"input_ids": ids}),
        "gemma3": (t.Gemma3TextModel, t.Gemma3TextConfig(**LLM), {"input_ids": ids}),
        "opt": (t.OPTModel, t.OPTConfig(**opt, ffn_dim=96, word_embed_proj_dim=48), {"input_ids": ids}),
        "bart": (t.BartModel, t.BartConfig(**SEQ, scale_embedding=True), {"input_ids": ids, **decoder}),
        "whisper": (
            t.WhisperModel,
            t.WhisperConfig(**SEQ, num_mel_bins=8, max_source_positions=12, max_target_positions=16),
            {"input_features": torch.randn(2, 8, 24), **decoder},
        ),
    }
    kind, config, inputs = makers[name]
    return lambda: kind(config).eval(), inputs


@needs_transformers
@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3", "opt", "bart", "whisper"])
def test_models_of_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build, inputs = architecture(name)
    model = build()
    reference = copy.deepcopy(model)
    pyquant.quantize_(model, W8A8Dynamic(), embeddings=True)
    left = [m for m in model.modules() if isinstance(m, nn.Embedding) and not isinstance(m, QEmbedding)]
    assert not left
    with torch.no_grad():
        got, want = model(**inputs)[0], reference(**inputs)[0]
        assert 20 * torch.log10(want.norm() / (got - want).norm()) > 25
        pyquant.save_pretrained(model, tmp_path)
        assert torch.equal(pyquant.load_pretrained(tmp_path, build).eval()(**inputs)[0], got)
