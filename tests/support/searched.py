"""A small searched model, the same in every process that imports this."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pyquant
from pyquant.io import strict_json
from pyquant.report.records.record import to_plain

FORMATS = ("fp32", "int8", "int4")


def net() -> nn.Sequential:
    """Four layers; predictions as sure as those of a trained net."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5)
    ).eval()
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                bound = layer.in_features**-0.5
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.uniform_(-bound, bound, generator=generator)
        model[-1].weight.mul_(40.0)
    return model


def batches(count: int = 4, seed: int = 1) -> list[torch.Tensor]:
    """Inputs [32, 24]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(32, 24, generator=generator) for _ in range(count)]


def search(model: nn.Module | None = None, **options: Any) -> pyquant.Plan:
    """A search for the smallest model, which is the same in every run: nothing is timed."""
    settings = {"num_batches": 4, "objective": "size", "max_drop": 0.05, **options}
    data = batches()
    return pyquant.search(net() if model is None else model, data[0], data, FORMATS, **settings)


def record_of(plan: pyquant.Plan) -> bytes:
    """Everything that a plan is made of, as bytes, but the command of the process."""
    return strict_json.pretty(to_plain(replace(plan.record, environment={}))) + plan.recipe.dumps().encode()


def search_to(path: Path, **options: Any) -> None:
    """A search whose record goes to a file."""
    path.write_bytes(record_of(search(**options)))
