"""Formats: the named choices that a layer has, 'float', 'int8', 'int4' or any scheme, each a line of a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from pyquant.core.dtypes import dtype_name
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.recipe.layer_rule import FLOAT, LayerRule
from pyquant.recipe.sections import CalibrationParams, SelectiveParams
from pyquant.report.records import float_format

_BY_ERROR: Final = {"calibrator": "mse"}
# a zero point matters most to 4-bit inputs
NAMED: Final[dict[str, LayerRule]] = {
    "int8": LayerRule("W8A8", inputs=_BY_ERROR),
    "int4": LayerRule("W4A4(symmetric_inputs=False)", inputs=_BY_ERROR),
}
FLOATS: Final = float_format.FLOAT_FORMATS
_OF_DTYPE: Final = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Format:
    """One choice for a layer.

    name     as the user wrote it; the float one's is that of its dtype.
    rule     what a recipe says for it; 'float' leaves the layer as the model has it.
    scheme   what follows from the rule alone; None for the float format.
    weight_bits, input_bits   of the codes; for what stays in floating point those of its dtype.
    """

    name: str
    rule: LayerRule
    scheme: QScheme | None
    weight_bits: int
    input_bits: int

    @property
    def is_float(self) -> bool:
        """The layer stays as it is."""
        return self.scheme is None

    @property
    def needs_data(self) -> bool:
        """Whether a range is static, so that calibration data is needed."""
        return self.scheme is not None and self.scheme.is_static


def formats_of(names: Sequence[str], dtypes: Iterable[torch.dtype] = (torch.float32,)) -> tuple[Format, ...]:
    """The formats of these names, the float one first.

    names   at least one of 'int8' (W8A8, static), 'int4' (W4A4, static, affine inputs) or the text of a preset, such
            as 'W4A8Dynamic(group_size=64)'; and 'float', which means: as the model has it. It is there always, named
            or not.
    dtypes  of the model's layers: the float format is called 'fp32', 'fp16' or 'bf16' after them and has their bits;
            'float', with the bits of the widest, where they differ. These three names may be said instead of 'float';
            one that is not the model's gives a UserWarning.
    Raises ArgumentError for unknown and repeated names.

    Example:
        >>> [f.name for f in formats_of(("int8", "float", "W4A8Dynamic"))]
        ['fp32', 'int8', 'W4A8Dynamic']
    """
    allowed = "'float', and one or more of 'int8', 'int4', or presets such as 'W8A8Dynamic'"
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ArgumentError("formats", repr(names), f"a sequence of {allowed}")
    floats = [name for name in names if isinstance(name, str) and float_format.is_float(name)]
    floating = _float_of(floats[0] if floats else float_format.FLOAT, set(dtypes))
    others = [_format(name, floating.input_bits) for name in names if name not in floats]
    if len(floats) > 1 or not others:
        raise ArgumentError("formats", ", ".join(map(repr, names)) or "none", allowed)
    schemes = [f.scheme for f in others]
    if any(scheme in schemes[:i] for i, scheme in enumerate(schemes)):
        raise ArgumentError("formats", ", ".join(map(repr, names)), "each format once")
    return (floating, *others)


def _float_of(said: str, dtypes: set[torch.dtype]) -> Format:
    """The floating-point format of layers of these dtypes, whatever it was called."""
    name = _OF_DTYPE.get(next(iter(dtypes)), float_format.FLOAT) if len(dtypes) == 1 else float_format.FLOAT
    if said not in (name, float_format.FLOAT):
        have = ", ".join(sorted(map(dtype_name, dtypes)))
        warnings.warn(
            f"formats: {said!r} stands for the model as it is, whose layers are {have}; it is called {name!r} in what "
            "follows. 'float' says it for every model",
            stacklevel=3,
        )
    bits = max((8 * dtype.itemsize for dtype in dtypes), default=32)
    return Format(name, LayerRule(FLOAT), None, bits, bits)


def _format(name: object, float_bits: int) -> Format:
    if not isinstance(name, str):
        raise ArgumentError("formats", repr(name), "names such as 'float', 'int8', 'int4', 'W8A8Dynamic'")
    try:
        rule = NAMED.get(name) or LayerRule.from_plain(name, "formats")
    except ArgumentError as error:
        presets = f"{', '.join(FLOATS)}, {', '.join(NAMED)}, or a preset: {error.allowed}"
        raise ArgumentError("formats", repr(name), presets) from None
    scheme = rule.resolve(None, SelectiveParams(calibrator_i="mse"), CalibrationParams())
    if scheme is None or scheme.is_float:
        raise ArgumentError("formats", repr(name), f"{float_format.FLOAT!r} for floating point: as the model has it")
    if name not in NAMED and scheme.is_static:  # the recipe must say itself what was measured
        rule = LayerRule(rule.scheme, inputs=_BY_ERROR)
    return Format(name, rule, scheme, scheme.weights.bits, float_bits if scheme.inputs is None else scheme.inputs.bits)
