"""A QatReport, as `pyquant bench qat` saves it: which formats it has."""

from __future__ import annotations

from typing import Final

from pyquant.bench.qat import markdown

FORMATS: Final = {"md": markdown}
