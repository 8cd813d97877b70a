"""Models of blocks, as users write them: arguments by keyword, tuples, what every block shares, no chains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16


class Block(nn.Module):
    """Attention in miniature: a mask and positions by keyword, a tuple as its result."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)
        self.forwards = 0

    def forward(self, x: Tensor, mask: Tensor | None = None, *, place: tuple[Tensor, float]) -> tuple[Tensor, None]:
        self.forwards += 1
        scores = x @ x.transpose(-1, -2) * place[1]
        if mask is not None:
            scores = scores.masked_fill(mask, -1e4)
        x = x + self.mix(scores.softmax(-1) @ self.norm(x) + place[0])
        return x + self.down(torch.tanh(self.up(x))), None


class Decoder(nn.Module):
    """A mask that only every second block is given. ends: Linears in front of the blocks and behind them."""

    def __init__(self, depth: int, width: int = WIDTH, ends: bool = True) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, width) if ends else nn.Identity()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5) if ends else nn.Identity()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.inlet(x)
        n = x.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        place = (torch.linspace(-1, 1, n)[:, None].expand(n, x.shape[2]), 0.5)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask if i % 2 else None, place=place)[0]
        return {"logits": self.head(self.norm(x))}


class Between(Decoder):
    """No chain: something is computed between the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = layer(self.norm(x), place=(x[:, :, :1], 0.5))[0]
        return self.head(x)


class Skips(Decoder):
    """A chain with more than one strand: the last block is given what the first one gave out."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.inlet(x)
        place = (torch.zeros(1), 1.0)
        for i, layer in enumerate(self.layers):
            x = layer(x, place=(first, 0.3) if i == len(self.layers) - 1 else place)[0]
            first = x if i == 0 else first
        return self.head(x)


class Cross(nn.Module):
    """Encoder and decoder: the second list of blocks is given what the first one gave out, in every block."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(depth)))
        self.between = nn.Linear(6, WIDTH)
        self.decoder = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.between(self.encoder(x))
        y = torch.ones_like(memory)
        for block in self.decoder:
            y = block(y, place=(memory, 0.5))[0]
        return y


class Images(nn.Module):
    """Two stages of convolutional blocks."""

    def __init__(self) -> None:
        super().__init__()

        def block(c: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())

        self.stem = nn.Conv2d(3, 6, 3, stride=2)
        self.one, self.two = nn.Sequential(block(6), block(6)), nn.Sequential(block(8), block(8))
        self.down, self.head = nn.Conv2d(6, 8, 2, stride=2), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.down(self.one(self.stem(x)))).mean((-1, -2)))


def sequences(count: int, rows: int = 4, width: int = 6) -> list[Tensor]:
    """Batches [rows, length, width] of several lengths, with correlated channels."""
    g = torch.Generator().manual_seed(1)
    mix = torch.randn(width, width, generator=g)
    return [torch.randn(rows, 5 + i % 3, width, generator=g) @ mix for i in range(count)]


def forwards(model: nn.Module) -> int:
    """How often its blocks ran."""
    return sum(m.forwards for m in model.modules() if isinstance(m, Block))
