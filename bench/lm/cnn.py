"""Trains two small convolutional networks on scikit-learn's digits, and keeps them in pyquant's cache.

    python -m bench.lm.cnn [--again]

`resnet`: 3 x 3 convolutions, strided and beside identities (170 000 parameters). `mobilenet`: blocks of 1 x 1,
depthwise 3 x 3 and 1 x 1 (71 000). BatchNorm behind every convolution, ReLU. The images of 8 x 8 are noisy, as clean
ones are too easy: new noise at every step of training, one fixed draw where they judge. One thread; a minute each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from pyquant.errors import ArgumentError
from pyquant.io.atomic import write_file
from pyquant.measure.timing import using_threads
from pyquant.ops.tuned import cache_folder

EPOCHS: Final = 20
NOISE: Final = 0.3  # standard deviation, of pixels from 0 to 1
COPIES: Final = 4  # of a held-out image, each with noise of its own
_STEPS: Final = 20  # of an epoch
_RATE: Final = 3e-3
_DECAY: Final = 0.05


def normed(
    channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1, relu: bool = True
) -> list[nn.Module]:
    """A convolution, its BatchNorm and a ReLU."""
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out), *([nn.ReLU()] if relu else [])]


class Basic(nn.Module):
    """Two 3 x 3 convolutions beside an identity, or beside a 1 x 1 convolution where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*normed(channels, out, 3, stride), *normed(out, out, 3, relu=False))
        same = stride == 1 and channels == out
        self.shortcut = nn.Sequential(*([] if same else normed(channels, out, 1, stride, relu=False)))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, H, W] -> [B, out, H / stride, W / stride]."""
        return self.relu(self.body(x) + self.shortcut(x))


class Inverted(nn.Module):
    """1 x 1 to more channels, depthwise 3 x 3, 1 x 1 to fewer; beside an identity where the shape stays."""

    def __init__(self, channels: int, out: int, stride: int, wider: int = 4) -> None:
        super().__init__()
        inner = wider * channels
        self.body = nn.Sequential(
            *normed(channels, inner, 1),
            *normed(inner, inner, 3, stride, groups=inner),
            *normed(inner, out, 1, relu=False),
        )
        self.is_beside = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        """[B, channels, H, W] -> [B, out, H / stride, W / stride]."""
        y = self.body(x)
        return x + y if self.is_beside else y


class Network(nn.Module):
    """Images [B, 1, 8, 8] -> classes [B, 10]: a stem, blocks, the mean of the pixels, a head."""

    def __init__(self, stem: int, blocks: list[nn.Module], features: int) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Sequential(*normed(1, stem, 3)), nn.Sequential(*blocks)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(features, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


def resnet() -> Network:
    """Random weights; 8 x 8, then 4 x 4 pixels."""
    return Network(32, [Basic(32, 32, 1), Basic(32, 32, 1), Basic(32, 64, 2), Basic(64, 64, 1)], 64)


def mobilenet() -> Network:
    """Random weights; 8 x 8, then 4 x 4 pixels."""
    return Network(32, [Inverted(32, 32, 1), Inverted(32, 32, 1), Inverted(32, 64, 2), Inverted(64, 64, 1)], 64)


NETWORKS: Final[dict[str, Callable[[], Network]]] = {"resnet": resnet, "mobilenet": mobilenet}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images [B, 1, 8, 8] from 0 to 1 and labels: the 1257 that the vision transformer of examples/ is trained with,
    and the 540 that are held out."""
    if importlib.util.find_spec("sklearn") is None:
        raise ArgumentError("subjects", "digits, without scikit-learn", "pip install scikit-learn")
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device="cpu")[:, None] / 16
    labels = torch.tensor(data.target, device="cpu")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0), device="cpu")
    train, test = order[:1257], order[1257:]
    return images[train], labels[train], images[test], labels[test]


def noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    """The images with noise from that generator."""
    return images + NOISE * torch.randn(images.shape, generator=generator, device="cpu")


@using_threads(1)  # sums depend on the number of threads
def train(name: str, epochs: int = EPOCHS) -> Network:
    """A trained network of NETWORKS in evaluation mode, BatchNorms not folded."""
    images, labels, *_ = digits()
    torch.manual_seed(0)
    model, generator = NETWORKS[name](), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), _RATE, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, epochs * _STEPS)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels), generator=generator, device="cpu").chunk(_STEPS):
            optimizer.zero_grad()
            F.cross_entropy(model(noisy(images[batch], generator)), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def kept(name: str, again: bool = False) -> Network:
    """As train: what lies in the cache, if it was trained as it would be now; otherwise trained and kept there."""
    path, told = file_of(name), json.dumps({"epochs": EPOCHS, "noise": NOISE, "rate": _RATE, "decay": _DECAY})
    if path.exists() and not again:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("training") == told:
                model = NETWORKS[name]()
                model.load_state_dict({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (no mapping)
                return model.eval()
    model = train(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, save(dict(model.state_dict()), {"training": told}))
    return model


def file_of(name: str) -> Path:
    """Where a network lies in the user's cache."""
    return cache_folder() / "lm" / f"{name}-digits.safetensors"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lm.cnn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="train what is in the cache already, too")
    args = parser.parse_args(argv)
    for name in NETWORKS:
        before = time.process_time()
        kept(name, args.again)
        print(f"{file_of(name)}: {time.process_time() - before:.0f} s of a core", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
