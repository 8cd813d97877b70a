"""The layers of a Llama at their real sizes, with random weights and a KV cache: what `pyquant bench decode` times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEAD: Final = 128


@dataclass(frozen=True)
class Sizes:
    """Width of a model, of its feed-forward blocks, and how many heads (of 128) ask and are asked."""

    hidden: int
    feed: int
    heads: int
    kv_heads: int


CONFIGS: Final[Mapping[str, Sizes]] = {
    "tiny": Sizes(256, 512, 2, 1),
    "llama-3.2-1b": Sizes(2048, 8192, 16, 4),
    "llama-3-8b": Sizes(4096, 14336, 32, 8),
    "llama-3-70b": Sizes(8192, 28672, 64, 8),
}


class Feed(nn.Module):
    """A gated feed-forward block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.feed, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.feed, bias=False)
        self.down_proj = nn.Linear(sizes.feed, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and a gated feed-forward block, each behind an RMSNorm and beside an identity; no rotary embedding."""

    cache: tuple[Tensor, Tensor]  # keys and values [B, kv_heads, T, HEAD]

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        wide, narrow = sizes.heads * HEAD, sizes.kv_heads * HEAD
        self.norm1, self.norm2 = nn.RMSNorm(sizes.hidden, eps=1e-5), nn.RMSNorm(sizes.hidden, eps=1e-5)
        self.q_proj = nn.Linear(sizes.hidden, wide, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, sizes.hidden, bias=False)
        self.feed = Feed(sizes)

    def forward(self, x: Tensor, at: int) -> Tensor:
        """x [B, T, hidden], whose first token is the at-th of its sequence."""
        batch, count = x.shape[:2]
        y = self.norm1(x)
        heads = self.q_proj(y), self.k_proj(y), self.v_proj(y)
        q, k, v = (one.view(batch, count, -1, HEAD).transpose(1, 2) for one in heads)
        for held, new in zip(self.cache, (k, v), strict=True):
            held[:, :, at : at + count] = new
        keys, values = (held[:, :, : at + count] for held in self.cache)
        z = F.scaled_dot_product_attention(q, keys, values, is_causal=count > 1, enable_gqa=True)
        x = x + self.o_proj(z.transpose(1, 2).reshape(batch, count, -1))
        return x + self.feed(self.norm2(x))


class Decoder(nn.Module):
    """Some layers of a configuration. forward: [B, T, hidden] -> the same, at a place of the sequence."""

    def __init__(self, sizes: Sizes, layers: int) -> None:
        super().__init__()
        self.sizes, self.blocks = sizes, nn.ModuleList(Block(sizes) for _ in range(layers))

    def members(self) -> list[Block]:
        """The blocks, in order."""
        return [cast(Block, block) for block in self.blocks]

    def make_room(self, batch: int, length: int) -> None:
        """An empty cache for so many sequences of that length."""
        shape = batch, self.sizes.kv_heads, length, HEAD
        for block in self.members():
            where = block.norm1.weight
            block.cache = where.new_zeros(shape), where.new_zeros(shape)

    def forward(self, x: Tensor, at: int = 0) -> Tensor:
        for block in self.blocks:
            x = block(x, at)
        return x


def make_decoder(sizes: Sizes, layers: int, device: str, seed: int = 0) -> Decoder:
    """A Decoder in bfloat16 with normal weights of variance 1 / K, made where it runs."""
    with torch.device("meta"):
        model = Decoder(sizes, layers).to(torch.bfloat16)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    rng = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, parameter.shape[1] ** -0.5, generator=rng)
        else:
            parameter.fill_(1.0)
    return model
