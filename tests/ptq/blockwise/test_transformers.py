"""Models of transformers block by block: every family's way of calling its layers, to the bits of the whole model."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyquant import W4A16, bias_correction_, insert_fake_quantize_

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is a demo extra and not installed", allow_module_level=True)
import transformers

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60}
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
T5 = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 60}


def ids(low: int = 0) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    padded = [torch.tensor([[0] * 2 + [1] * (4 + i), [1] * (6 + i)]) for i in range(2)]
    return [{"input_ids": torch.randint(low, 60, m.shape, generator=g), "attention_mask": m} for m in padded]


def pairs() -> list[dict[str, Tensor]]:
    return [{**batch, "decoder_input_ids": batch["input_ids"][:, :4]} for batch in ids(3)]


def causal(name: str, **config: Any) -> nn.Module:
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))


# family -> the model, its batches, blocks
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]], int]] = {
    "llama": (lambda: causal("Llama", **GROUPED), ids, 2),
    "a mask for every kind of layer": (
        lambda: transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(**{**GROUPED, "num_hidden_layers": 7}, head_dim=8, sliding_window=3)
        ),
        ids,
        7,
    ),
    "experts": (lambda: causal("Mixtral", **GROUPED, num_local_experts=4), ids, 2),
    "encoder": (lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)), ids, 2),
    "position biases from the first block": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0)),
        pairs,
        4,
    ),
}


def use_cache(model: nn.Module) -> list[Any]:
    return [getattr(m.config, "use_cache", None) for m in model.modules() if hasattr(m, "config")]


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_bit_to_the_whole_model_way(family: str) -> None:
    make, data, blocks = FAMILIES[family]
    torch.manual_seed(0)
    model = insert_fake_quantize_(make().eval(), W4A16(group_size=None))
    whole, seen, caches = copy.deepcopy(model), [], use_cache(model)
    found = bias_correction_(model, data(), 2, progress=lambda _, __, what: seen.append(what))
    assert found == bias_correction_(whole, data(), 2, blocks=None)
    assert len(found) > 3 * blocks
    assert len([name for name in seen if not name.startswith("layers ")]) == blocks
    a, b = model.state_dict(), whole.state_dict()
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert use_cache(model) == caches
