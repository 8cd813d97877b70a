"""Formats: the named choices that a layer has, 'fp16', 'int8', 'int4' or any scheme, each a line of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.recipe.layer_rule import FLOAT, LayerRule
from pyquant.recipe.sections import CalibrationParams, SelectiveParams

_BY_ERROR: Final = {"calibrator": "mse"}
# 8-bit weights are best kept whole, 4-bit ones clipped; a zero point matters most to 4-bit inputs.
NAMED: Final[dict[str, LayerRule]] = {
    "int8": LayerRule("W8A8", inputs=_BY_ERROR),
    "int4": LayerRule("W4A4(symmetric_inputs=False)", weights=_BY_ERROR, inputs=_BY_ERROR),
}
FLOATS: Final = ("fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Format:
    """One choice for a layer.

    name     as the user wrote it.
    rule     what a recipe says for it; 'float' leaves the layer as the model has it.
    scheme   what follows from the rule alone; None for the float format.
    weight_bits, input_bits   16 for what stays in floating point, whatever its dtype.
    """

    name: str
    rule: LayerRule
    scheme: QScheme | None
    weight_bits: int = 16
    input_bits: int = 16

    @property
    def is_float(self) -> bool:
        """The layer stays as it is."""
        return self.scheme is None

    @property
    def needs_data(self) -> bool:
        """Has a static range, which only data can tell."""
        return self.scheme is not None and self.scheme.is_static


def formats_of(names: Sequence[str]) -> tuple[Format, ...]:
    """The formats of these names, the float one first.

    names   at least one of 'int8' (W8A8, static), 'int4' (W4A4, static, affine inputs) or the text of a preset, such
            as 'W4A8Dynamic(group_size=64)'; and 'fp16', 'bf16' or 'fp32', which all mean: as the model has it,
            counted as 16 bits. Without any of these three 'fp16' is added: there always is that choice.
    Raises ArgumentError for unknown and repeated names.

    Example:
        >>> [f.name for f in formats_of(("int8", "fp16", "W4A8Dynamic"))]
        ['fp16', 'int8', 'W4A8Dynamic']
    """
    allowed = "'fp16', and one or more of 'int8', 'int4', or presets such as 'W8A8Dynamic'"
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ArgumentError("formats", repr(names), f"a sequence of {allowed}")
    found = [_format(name) for name in names]
    floats, others = [f for f in found if f.is_float], [f for f in found if not f.is_float]
    floats = floats or [_format(FLOATS[0])]
    if len(floats) != 1 or not others:
        raise ArgumentError("formats", ", ".join(map(repr, names)) or "none", allowed)
    schemes = [f.scheme for f in others]
    if any(scheme in schemes[:i] for i, scheme in enumerate(schemes)):
        raise ArgumentError("formats", ", ".join(map(repr, names)), "each format once")
    return (*floats, *others)


def _format(name: object) -> Format:
    if not isinstance(name, str):
        raise ArgumentError("formats", repr(name), "names such as 'fp16', 'int8', 'int4', 'W8A8Dynamic'")
    if name in FLOATS:
        return Format(name, LayerRule(FLOAT), None)
    try:
        rule = NAMED.get(name) or LayerRule.from_plain(name, "formats")
    except ArgumentError as error:
        presets = f"{', '.join(FLOATS)}, {', '.join(NAMED)}, or a preset: {error.allowed}"
        raise ArgumentError("formats", repr(name), presets) from None
    scheme = rule.resolve(None, SelectiveParams(calibrator_i="mse"), CalibrationParams())
    if scheme is None or scheme.is_float:
        raise ArgumentError("formats", repr(name), f"{', '.join(FLOATS)} for floating point")
    if name not in NAMED and scheme.is_static:  # the recipe must say itself what was measured
        rule = LayerRule(rule.scheme, inputs=_BY_ERROR)
    return Format(name, rule, scheme, scheme.weights.bits, 16 if scheme.inputs is None else scheme.inputs.bits)
