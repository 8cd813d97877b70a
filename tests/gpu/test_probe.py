"""tools/gpu_probe.py, with which `make gpu` begins: it launches one kernel of each family, and sees a wrong number."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_device import Memory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import gpu_probe


@pytest.fixture
def where(plain_device: Memory) -> torch.device:
    """The simulator reads the memory of this process."""
    return torch.device("cpu" if plain_device.is_simulator else "cuda")


def test_a_row_of_each_family_runs_as_on_the_cpu(native: Any, where: torch.device) -> None:
    found = list(gpu_probe.probe(native, where))
    sm = native.device_info(0)["sm"]
    compiled = {row["family"] for row in gpu_probe.runnable(native.kernel_table(), sm) if row["compiled"]}
    assert {one.family for one in found} == compiled
    assert [(one.row, one.wrong) for one in found if one.wrong] == []


def test_one_wrong_number_is_told(native: Any, where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = gpu_probe._launch

    def spoilt(*words: Any) -> torch.Tensor:
        out = launch(*words)
        out[-1, -1] = torch.nextafter(out[-1, -1], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(gpu_probe, "_launch", spoilt)
    monkeypatch.setattr(gpu_probe, "one_of_each_family", lambda table, sm: [t for t in table if t["family"] == "simt"])
    (told,) = [one.wrong for one in gpu_probe.probe(native, where)]
    assert told is not None
    assert told.startswith("1 of ")


def test_what_the_library_refuses_is_told(native: Any, where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "one_of_each_family", lambda table, sm: [t for t in table if t["family"] == "simt"])
    monkeypatch.setattr(
        gpu_probe,
        "_case",
        lambda native, row: (
            {"m": 1, "n": 64, "k": -1, "x": "s8", "w": "s8", "out": "f32", "ldx": 1, "ldw": 1, "ldo": 64},
            {},
            torch.zeros(1),
        ),
    )
    (told,) = [one.wrong for one in gpu_probe.probe(native, where)]
    assert told
