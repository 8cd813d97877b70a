"""The models that are measured: small, trained here, and unlike each other in what quantisation does to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.accuracy.text import VOCABULARY, corpus, windows

CONTEXT, WIDTH, BLOCKS, HEADS = 64, 64, 3, 4  # of the transformer
HISTORY, EMBEDDED = 16, 32  # of the MLP on bytes: its first layer reads 16 x 32 = 512 numbers

Batch = tuple[Tensor, Tensor]  # inputs, and the class of every output row


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return hidden


class ByteTransformer(nn.Module):
    """ids [batch, length] -> logits of the next byte [batch, length, 128]. Quantised: the layers of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class ByteMLP(nn.Module):
    """The last 16 bytes [batch, 16] -> logits of the next byte [batch, 128]; six Linears with ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, EMBEDDED)
        self.layers = mlp(HISTORY * EMBEDDED, 256, 128, 64, 64, 32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.layers(self.embed(ids).flatten(1))
        return logits


def mlp(*widths: int) -> nn.Sequential:
    """Linears of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for k, n in itertools.pairwise(widths):
        layers += [nn.Linear(k, n), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Task:
    """A model with its data and its float schedule.

    batches   (split, count, size, seed) -> batches; split is 'train' or 'test', the same seed gives the same ones.
    left_alone   layers that stay in floating point: names that a config maps to None.
    """

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[str, int, int, int], Iterator[Batch]]
    steps: int
    batch_size: int
    learning_rate: float
    test_batches: int
    left_alone: tuple[str, ...] = ()


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats."""
    return loss_of_logits(model(batch[0]), batch)


def loss_of_logits(logits: Tensor, batch: Batch) -> Tensor:
    """The same, of a model's outputs."""
    return F.cross_entropy(logits.flatten(0, -2).float(), batch[1].flatten())


def _transformer_batches(split: str, count: int, size: int, seed: int) -> Iterator[Batch]:
    data, generator = corpus()[split == "test"], torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = windows(data, CONTEXT + 1, size, generator)
        yield ids[:, :-1], ids[:, 1:]


def _mlp_batches(split: str, count: int, size: int, seed: int) -> Iterator[Batch]:
    data, generator = corpus()[split == "test"], torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = windows(data, HISTORY + 1, size, generator)
        yield ids[:, :-1], ids[:, -1]


def _digits_batches(split: str, count: int, size: int, seed: int) -> Iterator[Batch]:
    """Test images are used several times with fresh noise: 540 of them alone resolve 0.2 points at best."""
    images, labels = digits()[split == "test"]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        chosen = torch.randint(len(images), (size,), generator=generator, device="cpu")
        noise = 0.05 * torch.randn(images[chosen].shape, generator=generator, device="cpu")
        yield images[chosen] + noise, labels[chosen]


def digits() -> tuple[Batch, Batch]:
    """(training, held out) of scikit-learn's 1797 handwritten digits, pixels in [0, 1], 30 % held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, labels = (
        torch.tensor(data.data, dtype=torch.float32, device="cpu") / 16,
        torch.tensor(data.target, device="cpu"),
    )
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0), device="cpu")
    train, test = order[:1257], order[1257:]
    return (images[train], labels[train]), (images[test], labels[test])


TASKS = {
    t.name: t
    for t in (
        Task("digits", lambda: mlp(64, 16, 16, 10), _digits_batches, 1000, 64, 3e-3, 8),
        Task("bytemlp", ByteMLP, _mlp_batches, 2000, 512, 2e-3, 16),
        Task("gpt3", ByteTransformer, _transformer_batches, 1200, 32, 3e-3, 16, ("head",)),
    )
}
