"""A ModelReport, as the benchmarks of whole models save it: which formats it has."""

from __future__ import annotations

from typing import Final

from pyquant.report.render import model_markdown

FORMATS: Final = {"md": model_markdown}
