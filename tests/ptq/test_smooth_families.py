"""The rules of smooth_ and equalize_ for transformers' blocks: each family's function stays, in each of its forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from float_models import randomise
from torch import Tensor

from pyquant import ArgumentError
from pyquant.ptq.improve.equalize import equalize_
from pyquant.ptq.improve.smooth import smooth_
from pyquant.ptq.improve.smooth_families import CLASSES

T = pytest.importorskip("transformers")

IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(3))
NO_SPECIALS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 50}
LM = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **NO_SPECIALS}
LM |= {"num_key_value_heads": 4}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SEQ = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
SEQ |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, **NO_SPECIALS, "decoder_start_token_id": 1}
OPT = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **NO_SPECIALS}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, **NO_SPECIALS}
EYE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
EYE |= {"image_size": 16, "patch_size": 8}
EARS = {**SEQ, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4, **NO_SPECIALS}

# family, its configuration, pairs that smooth_ knows in two layers, of these those between Linears (equalize_)
FAMILIES: list[tuple[str, dict[str, Any], int, int]] = [
    ("OPT", OPT, 8, 4),
    ("OPT", {**OPT, "do_layer_norm_before": False}, 4, 4),
    ("OPT", {**OPT, "activation_function": "gelu"}, 6, 2),
    ("OPT", {**OPT, "layer_norm_elementwise_affine": False}, 4, 4),
    ("T5", T5, 8 + 12, 4 + 6),
    ("T5", {**T5, "feed_forward_proj": "gated-gelu"}, 8 + 12, 4 + 6),
    ("MT5", {**T5, "feed_forward_proj": "gated-gelu"}, 8 + 12, 4 + 6),
    ("UMT5", {**T5, "feed_forward_proj": "relu"}, 8 + 12, 4 + 6),
    ("Granite", LM, 8, 4),
    ("SmolLM3", LM, 8, 4),
    ("Phi3", LM, 4, 0),
    ("Phi", LM, 4, 2),
    ("Starcoder2", LM, 6, 2),
    ("StableLm", LM, 8, 4),
    ("StableLm", {**LM, "use_parallel_residual": True}, 6, 4),
    ("GPTNeoX", LM, 4, 0),
    ("GPTNeoX", {**LM, "use_parallel_residual": False}, 4, 0),
    ("Bloom", BLOOM, 4, 0),
    ("Bloom", {**BLOOM, "apply_residual_connection_post_layernorm": True}, 0, 0),
    ("Olmoe", {**LM, **MOE}, 6, 2),
    ("MBart", SEQ, 6 + 10, 2 + 4),
    ("Pegasus", SEQ, 6 + 10, 2 + 4),
    ("M2M100", SEQ, 8 + 12, 4 + 6),
    ("Blenderbot", SEQ, 6 + 10, 2 + 4),
    ("Whisper", EARS, 6 + 10, 2 + 4),
    ("Speech2Text", {**EARS, "max_source_positions": 16, "input_feat_per_channel": 8}, 8 + 12, 4 + 6),
    ("Bart", SEQ, 2 + 4, 2 + 4),
    ("Marian", SEQ, 2 + 4, 2 + 4),
    ("CLIPVision", EYE, 6, 2),
    ("SiglipVision", EYE, 6, 2),
    ("ViT", EYE, 6, 2),
    ("Dinov2", EYE, 6, 2),
]


def batch(family: str, index: int) -> dict[str, Tensor]:
    if family in ("CLIPVision", "SiglipVision", "ViT", "Dinov2"):
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(index))}
    if family in ("Whisper", "Speech2Text"):
        shape = (2, 8, 16) if family == "Whisper" else (2, 16, 8)
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(index))
        return {"input_features": x, "decoder_input_ids": IDS[:, :6]}
    ids = IDS.roll(index, 1)
    encodes = family in ("T5", "MT5", "UMT5", "MBart", "Pegasus", "M2M100", "Blenderbot", "Bart", "Marian")
    return {"input_ids": ids, "decoder_input_ids": ids[:, :6]} if encodes else {"input_ids": ids}


def made(family: str, words: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return randomise(getattr(T, f"{family}Model")(getattr(T, f"{family}Config")(**words)))


@pytest.mark.parametrize(("family", "words", "pairs", "linear"), FAMILIES)
def test_the_function_of_a_family_stays(family: str, words: dict[str, Any], pairs: int, linear: int) -> None:
    model, batches = made(family, words), [batch(family, i) for i in range(2)]
    want = model(**batches[1]).last_hidden_state
    if not pairs:
        with pytest.raises(ArgumentError, match="no rule finds a pair"):
            smooth_(model, batches, 2)
        return
    found = smooth_(model, batches, 2)
    assert len(found) == pairs, list(found)
    assert min(found.values()) > 1.05
    torch.testing.assert_close(model(**batches[1]).last_hidden_state, want, rtol=2e-3, atol=2e-4)
    if linear:
        model = made(family, words)
        assert len(equalize_(model)) == linear
        torch.testing.assert_close(model(**batches[1]).last_hidden_state, want, rtol=2e-3, atol=2e-4)


def test_the_classes_that_rules_name_are_those_of_families_tried() -> None:
    seen = {type(m).__name__ for family, words, *_ in FAMILIES for m in made(family, words).modules()}
    elsewhere = {"Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe", "Bert", "Roberta", "Electra"}
    others = {name for name in CLASSES - seen if name.split("DecoderLayer")[0].removesuffix("Layer") not in elsewhere}
    assert others == {"CamembertLayer", "Siglip2EncoderLayer"}, others
