"""The second process: loads saved models and compares their outputs bit for bit with what the first computed."""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import load_file

import pyquant
from bench.minilm.model import empty_model


def main(probe: str, device: str, threads: str, *folders: str) -> int:
    """Prints a JSON list of verdicts, one for each folder."""
    torch.set_num_threads(int(threads))
    recorded = load_file(probe)
    inputs = sum(name.startswith("ids.") for name in recorded)
    print(json.dumps([_equal(recorded, inputs, i, folder, device) for i, folder in enumerate(folders)]))
    return 0


def _equal(recorded: dict[str, torch.Tensor], inputs: int, index: int, folder: str, device: str) -> bool:
    model = pyquant.load_pretrained(folder, empty_model).to(device).eval()
    with torch.inference_mode():
        outputs = [model(recorded[f"ids.{i}"].to(device), recorded[f"mask.{i}"].to(device)) for i in range(inputs)]
    return all(torch.equal(y.cpu(), recorded[f"out.{i}.{index}"]) for i, y in enumerate(outputs))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
