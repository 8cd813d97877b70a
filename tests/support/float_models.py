"""Small float models whose function a change of the weights has to keep."""

from __future__ import annotations

import torch
from torch import nn


def randomise(model: nn.Module) -> nn.Module:
    """Norms of fresh models are ones and zeros, which would hide a bias that was not divided."""
    g = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape, generator=g).to(parameter.dtype)
    return model.eval()


def tiny(family: str) -> nn.Module:
    import transformers as t

    torch.manual_seed(0)
    if family == "bert":
        config = t.BertConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=50
        )
        return t.BertModel(config)
    kind = {"llama": "Llama", "llama_gqa": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    config = getattr(t, f"{kind}Config")(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=50,
        num_key_value_heads=2 if family == "llama_gqa" else 4,
        head_dim=8,
        max_position_embeddings=64,
    )
    return getattr(t, f"{kind}Model")(config)
