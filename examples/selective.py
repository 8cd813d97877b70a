"""Naive, hybrid and selective quantisation of one residual network, side by side.

The task: from the letter counts of 160 characters of source code, tell which module of Python's standard library they
come from. The data are on every machine that runs Python.

    python examples/selective.py
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

import pyquant
from pyquant import W8A8, QResidualAdd, QuantizationCalibrator, SelectiveQuantizer

MODULES = ("argparse", "ast", "difflib", "doctest", "pickle", "statistics", "tarfile", "turtle")
CHARACTERS = 160


class Block(nn.Module):
    """y = relu(x + fc2(relu(fc1(x))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(width, width), nn.Linear(width, width), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.fc2(self.act(self.fc1(x))))


class QuantBlock(nn.Module):
    """Block whose addition and last ReLU belong to its second layer, and whose other operand is quantised as well."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = block.fc1, block.act, QResidualAdd(block.fc2, "relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)), x)


class Net(nn.Sequential):
    """stem, residual blocks, head."""

    def __init__(self, features: int, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(features, width), nn.ReLU())
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, len(MODULES))


def data() -> tuple[Tensor, Tensor]:
    """Letter counts [n, 96] of pieces of source code, and which module each is from."""
    counts, labels = [], []
    for label, name in enumerate(MODULES):
        source = Path(find_spec(name).origin).read_bytes()  # read, not imported: turtle wants a window system
        text = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
        pieces = text[: len(text) // CHARACTERS * CHARACTERS].view(-1, CHARACTERS)
        found = nn.functional.one_hot((pieces - 32).clamp(0, 95), 96).sum(1).float()
        counts.append(found)
        labels.append(torch.full((len(found),), label))
    order = torch.randperm(sum(map(len, counts)), generator=torch.Generator().manual_seed(0))
    return torch.cat(counts)[order], torch.cat(labels)[order]


def trained(x: Tensor, y: Tensor, epochs: int) -> Net:
    """Trained in float64, so that every processor ends with the same float32 weights; in float32 they differ."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of what is drawn at the start, too
    try:
        model, x = Net(x.shape[1]), x.double()
    finally:
        torch.set_default_dtype(before)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(epochs):
        for i in range(0, len(x), 128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[i : i + 128]), y[i : i + 128]).backward()
            optimizer.step()
    return model.float().eval()


def naive(scheme: pyquant.QScheme) -> SelectiveQuantizer:
    """Every layer, one calibrator."""
    return SelectiveQuantizer("max", scheme=scheme, mode="naive")


def hybrid(scheme: pyquant.QScheme) -> SelectiveQuantizer:
    """As naive, but the first and the last layer stay in floating point."""
    quantizer = SelectiveQuantizer("max", "max", scheme=scheme, mode="hybrid")
    quantizer.register_skip_quantization(layer_names={"stem", "head"})
    return quantizer


def selective(scheme: pyquant.QScheme) -> SelectiveQuantizer:
    """Calibrators by tensor, 8 bits where 4 are too few, quantised residuals."""
    quantizer = SelectiveQuantizer("mse", "mse", scheme=scheme, custom_mappings={Block: QuantBlock})
    quantizer.register_layer_scheme({"stem", "head"}, W8A8(), calibrator_weights="max", calibrator_inputs="max")
    return quantizer


def main(epochs: int = 15) -> list[tuple[str, float, float, int, int]]:
    """Prints the table; -> its rows: name, accuracy, SQNR of the logits in dB, integer layers, float operands."""
    x, y = data()
    split = len(x) * 4 // 5
    model = trained(x[:split], y[:split], epochs)
    test, wanted = x[split:], y[split:]
    batches = list(x[:split].split(64))[:16]
    with torch.no_grad():
        logits = model(test)
    rows = [("float32", (logits.argmax(1) == wanted).float().mean().item(), float("inf"), 0, len(model.blocks))]
    scheme = pyquant.W4A4()
    choices: dict[str, Callable[[pyquant.QScheme], SelectiveQuantizer]]
    choices = {"naive": naive, "hybrid": hybrid, "selective": selective}
    for name, choose in choices.items():
        twin = choose(scheme).quantize_module(copy.deepcopy(model))
        QuantizationCalibrator().calibrate_model(twin, batches, "mse", len(batches))
        operands = sum(isinstance(module, Block) for module in twin.modules())
        pyquant.convert_(twin)
        with torch.no_grad():
            found = twin(test)
        right = (found.argmax(1) == wanted).float().mean().item()
        sqnr = 10 * (logits.square().sum() / (logits - found).square().sum()).log10().item()
        integer = sum(isinstance(module, pyquant.QLinear) for module in twin.modules())
        rows.append((name, right, sqnr, integer, operands))
    print("| quantisation | accuracy | SQNR of the logits, dB | integer layers | additions with a float operand |")
    print("|---|---|---|---|---|")
    for name, right, sqnr, integer, operands in rows:
        print(f"| {name} | {right:.1%} | {sqnr:.1f} | {integer} | {operands} |")
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    main(parser.parse_args().epochs)
