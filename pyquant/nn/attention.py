"""Attention: nn.MultiheadAttention whose four projections are layers of their own, so that they can be quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn import functional as F

from pyquant.nn.linear_state import traced


class Attention(nn.Module):
    """What nn.MultiheadAttention computes, from children q_proj, k_proj, v_proj and out_proj (nn.Linear).

    Made by from_float; the Linears share the memory of the module's parameters. forward takes and gives what
    nn.MultiheadAttention's does: masks, need_weights, average_attn_weights, is_causal, batch_first, unbatched inputs,
    other widths of keys and values (kdim, vdim), add_bias_kv, add_zero_attn, dropout in training.
    """

    # torch's encoder layers look at these before they read weights; they say: no fused path
    _qkv_same_embed_dim = False
    in_proj_weight = None
    in_proj_bias = None
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(self, embed_dim: int, num_heads: int, dropout: float, batch_first: bool, add_zero_attn: bool) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.batch_first, self.add_zero_attn = dropout, batch_first, add_zero_attn
        self.register_parameter("bias_k", None)
        self.register_parameter("bias_v", None)

    @classmethod
    def from_float(cls, module: nn.MultiheadAttention) -> Attention:
        """The same attention around the parameters of a module (views of them; nothing is copied)."""
        new = cls(module.embed_dim, module.num_heads, module.dropout, module.batch_first, module.add_zero_attn)
        new.kdim, new.vdim = module.kdim, module.vdim
        if module.in_proj_weight is None:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        else:
            weights = module.in_proj_weight.chunk(3)
        biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        for name, weight, bias in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
            new.add_module(name, linear_of(weight, bias))
        new.add_module("out_proj", linear_of(module.out_proj.weight, module.out_proj.bias))
        for name in ("bias_k", "bias_v"):
            new.register_parameter(name, module._parameters.get(name))
        return new.train(module.training)

    def into_float(self, module: nn.MultiheadAttention) -> None:
        """Put the numbers of the projections, float Linears, into a module whose parameters are None."""
        projections: list[Any] = [self.q_proj, self.k_proj, self.v_proj]
        weights = [p.weight for p in projections]
        if module._qkv_same_embed_dim:
            module._parameters["in_proj_weight"] = _joined(weights)
        else:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            module._parameters.update(zip(names, weights, strict=True))
        if projections[0].bias is not None:
            module._parameters["in_proj_bias"] = _joined([p.bias for p in projections])
        module._parameters.update(bias_k=self.bias_k, bias_v=self.bias_v)
        module.out_proj._parameters.update(self.out_proj._parameters)
        module.out_proj.train(self.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Arguments and result of nn.MultiheadAttention.forward."""
        if isinstance(query, Proxy):
            how = {"attn_mask": attn_mask, "average_attn_weights": average_attn_weights, "is_causal": is_causal}
            return traced(self, query, key, value, key_padding_mask, need_weights, **how)  # type: ignore[no-any-return]
        is_batched = query.dim() == 3
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask and needs one")
        if not is_batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        batch, length = query.shape[:2]
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(batch, 1, -1)], 1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(batch, 1, -1)], 1)
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        use_hint = is_causal and key_padding_mask is None and not need_weights and not extra
        mask = None if use_hint else self._mask(attn_mask, key_padding_mask, q.dtype, batch, extra)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=use_hint)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(batch, length, self.embed_dim))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _mask(
        self, attention: Tensor | None, padding: Tensor | None, dtype: torch.dtype, batch: int, extra: int
    ) -> Tensor | None:
        """What is added to the scores [batch, heads, L, S + extra]; the extra keys are open to every query."""
        masks = []
        if attention is not None:
            wide = _added(attention, dtype)
            if wide.dim() == 3:
                wide = wide.unflatten(0, (batch, self.num_heads))
            masks.append(wide)
        if padding is not None:
            masks.append(_added(padding, dtype)[:, None, None, :])
        if not masks:
            return None
        total = masks[0] if len(masks) == 1 else masks[0] + masks[1]
        return F.pad(total, (0, extra)) if extra else total

    def extra_repr(self) -> str:
        """The module in one line, as print(model) shows it."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask in which True forbids, or numbers, as numbers that are added."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """An nn.Linear around tensors [N, K] and [N]; parameters stay the same objects, views become parameters."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = _parameter(weight)
    if bias is not None:
        layer.bias = _parameter(bias)
    return layer


def _joined(tensors: list[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat([t.detach() for t in tensors]), any(t.requires_grad for t in tensors))


def _parameter(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    base = tensor if tensor._base is None else tensor._base
    return nn.Parameter(tensor.detach(), requires_grad=base.requires_grad)
