"""Small models that the tests of analyse share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PLANTED = "4"


def classifier(seed: int = 0) -> nn.Sequential:
    """24 -> 64 -> 48 -> 10, with logits of some size and an activation that works in place."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(inplace=True), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 10))
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.mul_(2)
    return model.eval()


def planted() -> nn.Sequential:
    """Five layers alike; every output of number 4 has one weight so large that 4 bits have little left for the rest."""
    torch.manual_seed(0)
    width = 128
    layers: list[nn.Module] = []
    for n in (width, width, width, width, 12):
        layers += [nn.Linear(width, n), nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.normal_(0, 1.3 / width**0.5)
        weight = model[int(PLANTED)].weight
        weight[torch.arange(width), torch.randint(0, width, (width,))] = 11 / width**0.5
    return model.eval()


def batches(count: int = 4, rows: int = 64, width: int = 24, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=generator) for _ in range(count)]


class Attention(nn.Module):
    """One causal block over bytes: [B, T] -> logits [B, T, 40]; q, k and v share a group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.norm = nn.Embedding(40, 32), nn.LayerNorm(32)
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = self.norm(x)
        q, k, v = (f(h).unsqueeze(1) for f in (self.q, self.k, self.v))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        y: Tensor = self.head(x)
        return y


def tokens(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 40, (8, 24), generator=generator) for _ in range(count)]
