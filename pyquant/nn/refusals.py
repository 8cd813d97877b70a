"""What quantize_ answers where it can do nothing: what is missing, and which way leads on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyquant.core.presets import PRESETS, preset_name
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError

_SHOWN: Final = 6


def no_input_scales(layers: Mapping[str, QScheme]) -> ArgumentError:
    """Layers (with their schemes) whose inputs are static and for which no scale is given."""
    name = preset_name(next(iter(layers.values()))) or "their scheme"
    head, bracket, options = name.partition("(")
    dynamic = f"{head}Dynamic"
    instead = f" {dynamic}{bracket}{options}, which needs none;" if dynamic in PRESETS else ""
    return ArgumentError(
        "input_scales",
        f"nothing for {_listed(list(layers))}: {name} has static input ranges, which need data",
        "a scale for every layer with static inputs;"
        f"{instead} or ranges from data: SelectiveQuantizer and QuantizationCalibrator, or "
        "`pyquant quantize --recipe FILE --data FN` (docs/calibration.md)",
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
