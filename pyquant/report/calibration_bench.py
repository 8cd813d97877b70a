"""A CalibReport, as `pyquant bench calib` saves it: which formats it has."""

from __future__ import annotations

from typing import Final

from pyquant.report.render_calib import calib_markdown

FORMATS: Final = {"md": calib_markdown}
