"""calibration.json: the ranges of a calibration and the recipe they belong to; written whole or not at all."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from pyquant.calibrate import Range
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import strict_json
from pyquant.io.atomic import at_most, read_file, write_file
from pyquant.ptq.calibrator import Ranges
from pyquant.recipe import Recipe

VERSION: Final = 1
NAME: Final = "calibration.json"


def save_ranges(path: str | os.PathLike[str], ranges: Ranges, recipe: Recipe) -> Path:
    """Write ranges to a .json file, or to calibration.json in a folder, atomically. -> the file. Raises OSError."""
    path = Path(path)
    file = path if path.suffix == ".json" else path / NAME
    document = {
        "pyquant_calibration": VERSION,
        "recipe": recipe.to_dict(),
        "ranges": {name: {"low": _plain(r.low), "high": _plain(r.high)} for name, r in ranges.items()},
    }
    return write_file(file, strict_json.compact(document))


def load_ranges(path: str | os.PathLike[str]) -> tuple[Ranges, Recipe]:
    """The ranges in a file that save_ranges wrote (or in its folder), and their recipe.

    Raises ArgumentError where there is no such file, CheckpointError for one that is damaged or newer."""
    path = Path(path)
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise ArgumentError("calibration", f"{file}: no such file", "a file that `pyquant calibrate` wrote")
    document = strict_json.loads(read_file(file, check=at_most(strict_json.MAX_BYTES, file)), str(file))
    if document.get("pyquant_calibration") != VERSION or set(document) != {"pyquant_calibration", "recipe", "ranges"}:
        got = f"version {document.get('pyquant_calibration')!r} with {', '.join(sorted(document))}"
        raise CheckpointError(f"{file}: {got[:200]}; allowed: version {VERSION} with ranges and recipe")
    entries = document["ranges"]
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: ranges is a {type(entries).__name__}; allowed: an object")
    recipe = Recipe.from_dict(document["recipe"], f"{file}: recipe")
    return {name: _range(entry, f"{file}: ranges: {name}") for name, entry in entries.items()}, recipe


def _range(entry: Any, where: str) -> Range:
    if not isinstance(entry, dict) or set(entry) != {"low", "high"}:
        raise CheckpointError(f"{where}: {entry!r:.80}; allowed: an object with low and high")
    low, high = (_tensor(entry[end], where) for end in ("low", "high"))
    if low.shape != high.shape or not bool(((low <= 0) & (high >= 0)).all()):
        raise CheckpointError(f"{where}: {entry!r:.80}; allowed: low <= 0 <= high")
    return Range(low, high)


def _tensor(value: Any, where: str) -> Tensor:
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise CheckpointError(f"{where}: {number!r:.40}; allowed: finite numbers")
    tensor = torch.tensor(value, dtype=torch.float32, device="cpu")
    if not bool(tensor.isfinite().all()):
        raise CheckpointError(f"{where}: beyond float32; allowed: finite float32 numbers")
    return tensor


def _plain(tensor: Tensor) -> Any:
    return tensor.detach().cpu().tolist()  # a float32 is a float64 exactly, and JSON prints that exactly
