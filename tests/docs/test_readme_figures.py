"""What the README says of a GPU is what the result file holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = json.loads((ROOT / "bench/results/nvidia-h200/gemm.json").read_text())["rows"]
# what the sentence says before its two numbers -> whose ratios they are
SAID = {
    r"`W8A8Dynamic` was": ("QLinear W8A8Dynamic", [4096]),
    r"from bf16 to bf16, and": ("QLinear W8A8Dynamic", [1, 16, 64, 256]),
    r"static `W8A8`": ("QLinear W8A8", [4096]),
    r"`W4A16`": ("QLinear W4A16(group_size=128)", [1, 16]),
    r"at 1 to 16 rows,": ("QLinear W4A16(group_size=128)", [64]),
    r"times at 64, and": ("QLinear W4A16(group_size=128)", [256, 1024, 4096]),
}


@pytest.mark.parametrize("words", SAID)
def test_figures_of_the_gpu_are_those_of_the_file(words: str) -> None:
    candidate, counts = SAID[words]
    text = " ".join((ROOT / "README.md").read_text().split())
    told = re.search(words + r" ([\d.]+) to ([\d.]+)", text)
    assert told, words
    ratios = [row["ratio"] for row in ROWS if row["candidate"] == candidate and row["m"] in counts]
    assert ratios
    assert told.groups() == (f"{min(ratios):.2f}", f"{max(ratios):.2f}")
