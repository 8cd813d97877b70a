"""A vision transformer in 8 and 4 bits: patches, attention and feed-forward layers, quantised without data.

python examples/vision_transformer.py    handwritten digits of scikit-learn, on the CPU, under a minute; no download

Every image of 8 x 8 becomes 16 patches of 2 x 2. Layer norms, softmax and the products inside of attention stay in
floating point; the projections, where the weights are, run in integers.
"""

from __future__ import annotations

import argparse
import copy
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyquant

DIM, HEADS, DEPTH = 64, 4, 2


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and beside an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.project = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.norm2, self.up, self.act, self.down = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 4 * DIM),
            nn.GELU(),
            nn.Linear(4 * DIM, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, DIM)
        x = x + self.project(attended)
        return x + self.down(self.act(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Patches [B, 16, 4] -> classes [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Linear(4, DIM), nn.Parameter(torch.randn(16, DIM) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 10)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.blocks(self.embed(patches) + self.position)
        return self.head(self.norm(x).mean(1))


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Patches and labels: 1257 to train with, 540 held out."""
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32) / 16, torch.tensor(data.target)
    patches = images.view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1257], order[1257:]
    return patches[train], labels[train], patches[test], labels[test]


def train_float(patches: Tensor, labels: Tensor, epochs: int) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer()
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, epochs * 20)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).chunk(20):
            optimiser.zero_grad()
            F.cross_entropy(model(patches[batch]), labels[batch]).backward()
            optimiser.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def figures(model: nn.Module, patches: Tensor, labels: Tensor, floats: Tensor) -> str:
    y = model(patches)
    signal = 10 * (floats.square().sum() / (y - floats).square().sum()).log10()
    told = "" if torch.equal(y, floats) else f", logits {signal:.1f} dB"
    return f"accuracy {(y.argmax(1) == labels).double().mean():6.2%}{told}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sixth of the training")
    epochs = 2 if parser.parse_args(argv).quick else 12
    patches, labels, *test = load()
    model = train_float(patches, labels, epochs)
    with torch.no_grad():
        floats = model(test[0])
    print(f"float                     {figures(model, *test, floats)}")
    for scheme in (pyquant.W8A8Dynamic(), pyquant.W4A8Dynamic(group_size=32), pyquant.W4A4Dynamic()):
        # the patches have 4 features: too few for groups of 32, and where the pixels come in bits count most
        rules = {"embed": pyquant.W8A8Dynamic(), "_default": scheme}
        quantised = pyquant.quantize_(copy.deepcopy(model), rules)
        print(f"{str(scheme).split('(')[0]:<25} {figures(quantised, *test, floats)}")

    integers = pyquant.quantize_(copy.deepcopy(model), pyquant.W8A8Dynamic()).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pyquant.save_pretrained(integers, folder)
        again = pyquant.load_pretrained(folder, VisionTransformer).eval()
        same = torch.equal(again(test[0]), integers(test[0]))
    print(f"saved, reloaded           {figures(again, *test, floats)}; bits equal: {same}")


if __name__ == "__main__":
    main()
