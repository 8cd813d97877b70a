"""Writes an AOTInductor package of a quantised model, and inputs with the results that main.cpp must find.

    python examples/aoti_cpp/export_model.py FOLDER

The model gives one result for each of four schemes, so that one package shows them all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import pyquant
from pyquant import QLinear

K, N, ROWS = 64, 48, (1, 2, 7, 33)


class Layers(nn.Module):
    """One quantised Linear for each scheme, side by side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dynamic = QLinear.from_float(nn.Linear(K, N), pyquant.W8A8Dynamic(), activation="gelu")
        self.static = QLinear.from_float(nn.Linear(K, N), pyquant.W8A8(), input_scale=0.03)
        self.four_bits = QLinear.from_float(nn.Linear(K, N), pyquant.W4A8Dynamic(32))
        self.weight_only = QLinear.from_float(nn.Linear(K, N), pyquant.W4A16(32))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.dynamic(x), self.static(x), self.four_bits(x), self.weight_only(x)


def write(path: Path, tensor: Tensor) -> None:
    """The numbers of a float32 tensor, row after row, as main.cpp reads and writes them."""
    path.write_bytes(tensor.contiguous().numpy().tobytes())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    model = Layers().eval()
    rows = torch.export.Dim("rows", min=1, max=4096)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(4, K),), dynamic_shapes={"x": {0: rows}})
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
        for m in ROWS:
            x = torch.randn(m, K)
            write(folder / f"x{m}.f32", x)
            for i, y in enumerate(model(x)):
                write(folder / f"expected{m}_{i}.f32", y)


if __name__ == "__main__":
    main()
