"""Plan: the configuration that a search chose, as a recipe, as a quantised model, as a report."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from pyquant.core.paths import file_path
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.io.atomic import write_file
from pyquant.ptq import quantize_recipe_
from pyquant.ptq.calibrator import Ranges
from pyquant.ptq.ranges_file import save_ranges
from pyquant.recipe import Recipe
from pyquant.recipe.documents import format_of
from pyquant.report.records.search import SearchReport


@dataclass(frozen=True)
class Plan:
    """What pyquant.search found.

    record   SearchReport: every figure, as plain data.
    recipe   Recipe of the chosen configuration, for quantize_recipe_, prepare_, prepare_qat_ and `pyquant quantize`.
    ranges   {'layer.input': Range} that were calibrated for it.

    Example:
        >>> import torch, pyquant
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
        >>> data = [torch.randn(16, 8) for _ in range(4)]
        >>> plan = pyquant.search(model, calib_data_loader=data, formats=("float", "W8A8Dynamic"), objective="size",
        ...                       num_batches=4, max_drop=1.0)
        >>> plan.configuration
        {'0': 'W8A8Dynamic', '2': 'W8A8Dynamic'}
        >>> type(plan.apply_(model)[0]).__name__
        'QLinear'
    """

    record: SearchReport
    recipe: Recipe
    ranges: Ranges = field(default_factory=dict, repr=False)

    @property
    def configuration(self) -> dict[str, str]:
        """{group: format}."""
        return dict(self.record.plan.configuration)

    @property
    def schemes(self) -> dict[str, QScheme | None]:
        """{layer: scheme}, None for layers that stay in floating point."""
        return {str(name): scheme for name, scheme in self.recipe.rules().items()}

    def apply_(self, model: nn.Module, data: Any = None) -> nn.Module:
        """Quantise a model by the plan, in place; the one that was searched, or one of the same layers.

        data  batches to calibrate again; None: the ranges of the search.
        ->    the model. Nothing changes where the plan leaves every layer in floating point.
        """
        if all(scheme is None for scheme in self.schemes.values()):
            return model
        if data is None and self.ranges:
            return quantize_recipe_(model, self.recipe, ranges=self.ranges)
        return quantize_recipe_(model, self.recipe, data)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the recipe (.yaml, .yml, .toml or .json), whole or not at all. -> the path."""
        path = file_path("path", path)
        return write_file(path, self.recipe.dumps(format_of(path)).encode("utf-8"))

    def save_ranges(self, path: str | os.PathLike[str]) -> Path:
        """Write the calibrated ranges, for `pyquant quantize --recipe ... --calibration ...`. -> the file.

        Raises ArgumentError where no layer of the plan has a static range.
        """
        path = file_path("path", path)
        if not self.ranges:
            raise ArgumentError("ranges", "none: no layer of the plan has a static range", "a plan with static formats")
        return save_ranges(path, self.ranges, self.recipe)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write what was found; the ending says how: .html, .png, .svg, .csv, .md, .json. -> the path."""
        from pyquant.report import registry

        path = file_path("path", path)
        return registry.write(self.record, path.parent, path.stem, (path.suffix.removeprefix("."),))[0]

    def __str__(self) -> str:
        """The verdict, then a line a group: its format and what speaks for it and against the others."""
        return "\n".join([self.record.verdict, *(f"  {name}: {why}" for name, why in self.record.reasons().items())])
