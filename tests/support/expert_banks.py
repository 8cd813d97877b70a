"""Banks of experts for tests, which need no other library; and small models of transformers that hold some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import pyquant

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DEEPSEEK = {
    "moe_intermediate_size": 48,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
# family -> what its configuration has beside SIZES
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"moe_intermediate_size": 48, "num_experts": 8, "shared_expert_intermediate_size": 64},
    "Qwen3Moe": {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "DeepseekV3": {**_DEEPSEEK, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2},
    "Llama4": {"num_local_experts": 4, "intermediate_size_mlp": 96, "head_dim": 16, "interleave_moe_layer_step": 1},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "Glm4Moe": {"moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
}


def model_of(family: str) -> Any:
    """A random model of a family, two layers deep."""
    import transformers

    torch.manual_seed(0)
    more = "Text" if family == "Llama4" else ""
    config = getattr(transformers, f"{family}{more}Config")(**{**SIZES, **FAMILIES[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.05)
    return model


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The banks of a model, float or quantised, by name."""
    return {name: m for name, m in model.named_modules() if name.endswith(".experts") or name == "experts"}


class Bank(nn.Module):
    """Experts as transformers writes them."""

    def __init__(self, experts: int, width: int, inner: int, is_transposed: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.num_experts, self.is_transposed = experts, is_transposed
        up, down = torch.randn(experts, 2 * inner, width), torch.randn(experts, width, inner)
        if is_transposed:
            up, down = up.mT.contiguous(), down.mT.contiguous()
        self.gate_up_proj, self.down_proj = nn.Parameter(up / width**0.5), nn.Parameter(down / inner**0.5)
        if bias:
            self.up_bias = nn.Parameter(torch.randn(experts, 2 * inner) / 4)
            self.down_bias = nn.Parameter(torch.randn(experts, width) / 4)
        self.act_fn = nn.SiLU()

    def layer(self, e: int, name: str, bias: str) -> nn.Linear:
        """One matrix as an nn.Linear of its own."""
        matrix, b = getattr(self, name)[e], getattr(self, bias)[e] if hasattr(self, bias) else None
        matrix = (matrix.t() if self.is_transposed else matrix).detach().clone()
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], b is not None, dtype=matrix.dtype)
        linear.weight.data = matrix
        if b is not None:
            linear.bias.data = b.detach().clone()
        return linear

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        layers = [(self.layer(e, "gate_up_proj", "up_bias"), self.layer(e, "down_proj", "down_bias")) for e in self]
        return one_by_one(layers, self.act_fn, hidden_states, top_k_index, top_k_weights)

    def __iter__(self) -> Any:
        return iter(range(self.num_experts))


class Biased(Bank):
    """Transposed parameters, and biases."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__(experts, width, inner, is_transposed=True, bias=True)


class Interleaved(Biased):
    """GPT-OSS's way: gate and up channels alternate and both are clamped, biases, transposed parameters."""

    limit = 1.5

    def gate(self, y: Tensor) -> Tensor:
        gate, up = y[..., ::2].clamp(max=self.limit), y[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        layers = [(self.layer(e, "gate_up_proj", "up_bias"), self.layer(e, "down_proj", "down_bias")) for e in self]
        return one_by_one(layers, None, hidden_states, top_k_index, top_k_weights, self.gate)


def one_by_one(layers: Any, act: Any, x: Tensor, ids: Tensor, weights: Tensor, gate: Any = None) -> Tensor:
    """Every token through its experts by itself: what a bank means, in the order of docs/experts.md."""
    gate = gate or (lambda y: act(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1])
    rows = []
    for token, experts, factors in zip(x, ids.tolist(), weights.float(), strict=True):
        total = torch.zeros_like(token, dtype=torch.float32)
        for j, e in enumerate(experts):
            if 0 <= e < len(layers):
                term = layers[e][1](gate(layers[e][0](token[None])))[0].float() * factors[j]
                total = total + term
        rows.append(total.to(x.dtype))
    return torch.stack(rows) if rows else x.clone()


def routing(tokens: int, experts: int, slots: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token; the last two experts get none where there are more than `slots` + 2."""
    torch.manual_seed(seed)
    open_to = max(slots, experts - 2)
    ids = torch.stack([torch.randperm(open_to)[:slots] for _ in range(tokens)] or [torch.zeros(slots)]).long()
    return ids[:tokens], torch.rand(tokens, slots)


def register_banks() -> None:
    """Make the banks of this file known, as a user would."""
    biased = pyquant.ExpertsRule(is_transposed=True, up_bias="up_bias", down_bias="down_bias")
    pyquant.register_experts(Bank, pyquant.ExpertsRule())
    pyquant.register_experts(Biased, biased)
    pyquant.register_experts(Interleaved, replace(biased, gate=Interleaved.gate))
