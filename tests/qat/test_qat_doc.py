"""The Python blocks of docs/qat.md run as they stand, each on a fresh model."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from qat_models import draw, linear
from torch import nn
from torch.nn import functional as F

import pyquant as pq

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "qat.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_blocks_run(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    d = draw("doc", index)
    model = nn.Sequential(linear(128, 128, "doc"), nn.ReLU(), linear(128, 4, "doc"))
    loader = [d.normal(8, 128) for _ in range(16)]

    def loss_fn(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(m(x), x[:, :4])

    block = re.sub(r"steps=\d+", "steps=12", BLOCKS[index])
    if "QATMonitor" in block:
        pq.prepare_qat_(model, pq.W8A8Dynamic())
    with warnings.catch_warnings():
        warnings.simplefilter("error", pq.QATWarning)
        exec(compile(block, f"docs/qat.md block {index}", "exec"), {
            "pq": pq, "torch": torch, "model": model, "loader": loader, "batches": loader[:12], "loss_fn": loss_fn,
        })  # fmt: skip
    assert model(loader[0]).isfinite().all()


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= 4
