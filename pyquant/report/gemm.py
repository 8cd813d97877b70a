"""A GemmReport, as `pyquant bench gemm` and the benchmarks of layers save it: which formats it has."""

from __future__ import annotations

from typing import Final

from pyquant.report.render import gemm_markdown, to_csv

FORMATS: Final = {"md": gemm_markdown, "csv": to_csv}
