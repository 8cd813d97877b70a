"""A recommender in integers: tables of embeddings in 8 bits, and the networks below and above them.

python examples/recommender.py           clicks drawn from a hidden model, on the CPU, under a minute; no download

The form is that of DLRM (arXiv:1906.00091): numbers go through a bottom network, categories through tables, products of
all pairs and the bottom's output through a top network. Nearly all bytes lie in the tables: they are quantised for
memory, the networks for speed.
"""

from __future__ import annotations

import argparse
import copy
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyquant

NUMBERS, TABLES, ROWS, DIM = 13, 8, 2000, 16
Batch = tuple[tuple[Tensor, Tensor], Tensor]


class Recommender(nn.Module):
    """numbers float [B, 13] and categories int64 [B, 8] -> logits of a click [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + DIM, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        below = self.bottom(numbers)
        vectors = torch.stack([below, *(table(c) for table, c in zip(self.tables, categories.unbind(1)))], 1)
        products = vectors @ vectors.transpose(1, 2)
        i, j = torch.tril_indices(TABLES + 1, TABLES + 1, -1)
        return self.top(torch.cat([below, products[:, i, j]], 1)).squeeze(1)


def clicks(batches: int, size: int, seed: int) -> list[Batch]:
    """Clicks of a hidden model: tastes are products of what users and things are; popular categories are frequent."""
    hidden = torch.Generator().manual_seed(7)
    tastes = torch.randn(TABLES, ROWS, 4, generator=hidden)
    weights = torch.randn(NUMBERS, generator=hidden) * 0.4
    drawn = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(batches):
        numbers = torch.randn(size, NUMBERS, generator=drawn)
        categories = (torch.rand(size, TABLES, generator=drawn) ** 3 * ROWS).long()
        of = torch.stack([tastes[t, categories[:, t]] for t in range(TABLES)], 1)
        score = (of[:, 0::2] * of[:, 1::2]).sum((1, 2)) * 0.35 + numbers @ weights
        made.append(((numbers, categories), (torch.rand(size, generator=drawn) < score.sigmoid()).float()))
    return made


def train(batches: list[Batch], epochs: int) -> Recommender:
    torch.manual_seed(0)
    model = Recommender()
    optimiser = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for inputs, label in batches:
            optimiser.zero_grad()
            F.binary_cross_entropy_with_logits(model(*inputs), label).backward()
            optimiser.step()
    return model.eval()


@torch.no_grad()
def figures(model: nn.Module, test: Batch) -> str:
    """Area under the ROC curve, log loss and the bytes of all tensors."""
    (inputs, label), state = test, model.state_dict().values()
    y = model(*inputs)
    ranks = y.argsort().argsort().double() + 1
    positive = label.sum().double()
    auc = (ranks[label > 0].sum() - positive * (positive + 1) / 2) / (positive * (len(label) - positive))
    size = sum(t.numel() * t.element_size() for t in state if isinstance(t, Tensor))
    loss = F.binary_cross_entropy_with_logits(y, label)
    return f"AUC {auc:.4f}, log loss {loss:.4f}, {size / 1e6:.3f} MB"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the training")
    quick = parser.parse_args(argv).quick
    (test,) = clicks(1, 20000, seed=99)
    model = train(clicks(20 if quick else 200, 512, seed=1), epochs=1 if quick else 4)
    print(f"float                     {figures(model, test)}")
    networks = pyquant.quantize_(copy.deepcopy(model), pyquant.W8A8Dynamic())
    print(f"networks in W8A8Dynamic   {figures(networks, test)}")
    everything = pyquant.quantize_(copy.deepcopy(model), pyquant.W8A8Dynamic(), embeddings=True)
    print(f"tables in int8 as well    {figures(everything, test)}")

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pyquant.save_pretrained(everything, folder)
        again = pyquant.load_pretrained(folder, Recommender).eval()
        same = torch.equal(again(*test[0]), everything(*test[0]))
    print(f"saved, reloaded           {figures(again, test)}; bits equal: {same}")


if __name__ == "__main__":
    main()
