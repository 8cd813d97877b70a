"""Models of transformers that tie a head and an embedding, where either, or both, holds codes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import pyquant

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("call", ["tie_weights", "init_weights"])
@pytest.mark.parametrize(
    "options", [{"heads": True}, {"embeddings": True}, {"heads": True, "embeddings": True}], ids=str
)
@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_weights_that_are_tied_again_leave_codes_alone(family: str, options: dict[str, bool], call: str) -> None:
    """Only parameters can be tied; BERT's mapping is a pattern, which finds the buffers of a quantised head."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    ids = torch.arange(3, 13)[None]
    given: dict[str, Any] = {"input_ids": ids}
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=True)
        model: Any = transformers.LlamaForCausalLM(config)
    elif family == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, num_hidden_layers=1))
    else:
        config = transformers.T5Config(vocab_size=96, d_model=64, d_ff=128, num_heads=4, d_kv=16, num_layers=1)
        model, given = transformers.T5ForConditionalGeneration(config), given | {"decoder_input_ids": ids}
    ties = dict(model.all_tied_weights_keys)
    assert ties
    pyquant.quantize_(model.eval(), "W8A8Dynamic", check_speed=False, **options)
    with torch.no_grad():
        want, keys = model(**given).logits, list(model.state_dict())
        getattr(model, call)()
        assert torch.equal(model(**given).logits, want)
        assert list(model.state_dict()) == keys
    copied = copy.deepcopy(model)
    getattr(copied, call)()
    pyquant.dequantize_(model)
    assert model.all_tied_weights_keys == ties
    assert "pyquant_former_ties" not in vars(model)
    assert model._tied_weights_keys is type(model)._tied_weights_keys
