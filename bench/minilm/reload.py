"""The second process: loads a saved model and compares its outputs bit for bit. Exit code 0 equal, 1 different."""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file

import pyquant
from bench.minilm.model import empty_model


def main(folder: str, probe: str, device: str, threads: str) -> int:
    torch.set_num_threads(int(threads))
    model = pyquant.load_pretrained(folder, empty_model).to(device).eval()
    recorded = load_file(probe)
    equal = True
    with torch.inference_mode():
        for i in range(len(recorded) // 3):
            y = model(recorded[f"ids.{i}"].to(device), recorded[f"mask.{i}"].to(device))
            equal = equal and torch.equal(y.cpu(), recorded[f"out.{i}"])
    print("bits equal" if equal else "bits differ")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5]))
