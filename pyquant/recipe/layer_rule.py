"""What a recipe says about one layer, and the scheme that follows from it and the recipe's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyquant.core.names import OPEN_CALIBRATOR as OPEN
from pyquant.core.presets import scheme_from_name
from pyquant.core.registry import CALIBRATORS
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError
from pyquant.recipe.fields import Check, check_keys, choice, flag, mapping, number, refuse, text
from pyquant.recipe.sections import CalibrationParams, SelectiveParams

FLOAT: Final = "float"  # the word for "leave this layer alone" where a format has no null
_TENSOR: Final[dict[str, Check]] = {
    "calibrator": choice(CALIBRATORS.names, OPEN),
    "percentile": number(0, 100, above=True),
    "symmetric": flag,
    "narrow_range": flag,
    "granularity": choice("per_tensor", "per_channel"),
}


@dataclass(frozen=True)
class LayerRule:
    """One line of a recipe's `layers`, or its `default`.

    scheme   text of a preset ('W4A8(group_size=64)'); '' takes the recipe's default; 'float' leaves the layer alone.
    weights, inputs   fields of that tensor that differ: calibrator ('histogram' stands for the recipe's method),
             percentile, symmetric, narrow_range, granularity.
    reason   why; a comment for readers.

    Example:
        >>> LayerRule.from_plain({"scheme": "W4A8", "group_size": 64, "inputs": {"calibrator": "entropy"}}, "here")
        LayerRule(scheme='W4A8(group_size=64)', weights={}, inputs={'calibrator': 'entropy'}, reason='')
    """

    scheme: str = ""
    weights: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""

    @staticmethod
    def from_plain(data: object, where: str) -> LayerRule:
        """A rule from a recipe's data: null, a preset's text, or a mapping {scheme, options, weights, inputs, reason}.

        Raises ArgumentError naming the key.
        """
        if data is None:
            return LayerRule(FLOAT)
        if isinstance(data, str):
            data = {"scheme": data}
        if isinstance(data, QScheme):  # a recipe is what a file can hold
            allowed = "a preset's text such as 'W8A8', with weights and inputs beside it, or a LayerRule of them"
            refuse(where, f"a QScheme ({data})", allowed)
        entries = dict(mapping(data, where))
        reason = text(entries.pop("reason", ""), f"{where}.reason")
        tensors = {name: _tensor(entries.pop(name, {}), f"{where}.{name}") for name in ("weights", "inputs")}
        name = entries.pop("scheme", "")
        if not isinstance(name, str):
            refuse(f"{where}.scheme", repr(name), "a preset such as W8A8, or 'float'")
        if name in ("", FLOAT):
            check_keys(entries, ["scheme", "weights", "inputs", "reason"], where)
            if name == FLOAT and (tensors["weights"] or tensors["inputs"]):
                refuse(where, "weights or inputs of a layer that stays in floating point", "a reason only")
            return LayerRule(name, reason=reason, **tensors)
        if entries:
            name += "(" + ", ".join(f"{key}={value}" for key, value in entries.items()) + ")"
        rule = LayerRule(_normal(name, list(entries), where), reason=reason, **tensors)
        try:
            rule.resolve(None, SelectiveParams(), CalibrationParams())
        except ArgumentError as error:
            refuse(where, f"{error.argument}: {error.got}", error.allowed)
        return rule

    def to_plain(self) -> Any:
        """The shortest data that from_plain reads back into an equal rule."""
        tensors = {"weights": dict(self.weights), "inputs": dict(self.inputs)}
        data = {k: v for k, v in {"scheme": self.scheme, **tensors, "reason": self.reason}.items() if v}
        return self.scheme if list(data) == ["scheme"] else data

    def resolve(
        self, default: QScheme | None, selective: SelectiveParams, calibration: CalibrationParams
    ) -> QScheme | None:
        """The scheme of a layer under this rule; None: it stays in floating point.

        default   the recipe's default scheme, for a rule that names none.
        Calibrators and granularity of the defaults apply where neither rule nor preset says otherwise.
        """
        if self.scheme == FLOAT:
            return None
        base = scheme_from_name(self.scheme) if self.scheme else default
        if base is None or base.is_float:
            return base
        if self.scheme:
            base = with_defaults(base, selective, calibration)
        weights = _changed(base.weights, self.weights, calibration)
        inputs = base.inputs
        if self.inputs:
            if inputs is None:
                allowed = f"nothing: inputs of {self.scheme} stay in floating point"
                raise ArgumentError("inputs", dict(self.inputs), allowed)
            inputs = _changed(inputs, self.inputs, calibration)
        return replace(base, weights=weights, inputs=inputs)


def with_defaults(scheme: QScheme, selective: SelectiveParams, calibration: CalibrationParams) -> QScheme:
    """A scheme with the default calibrators, and weights per tensor where per_channel is false."""

    def calibrated(field: str, tensor: TensorScheme) -> TensorScheme:
        name = selective.calibrator_w if field == "weights" else selective.calibrator_i
        if name is None:
            return tensor
        name = calibration.histogram_calib_method if name == OPEN else name
        return replace(tensor, calibrator=name, percentile=calibration.percentile if name == "percentile" else 99.99)

    return changed_tensors(scheme, calibrated, selective.per_channel)


def changed_tensors(scheme: QScheme, change: Callable[[str, TensorScheme], TensorScheme], per_channel: bool) -> QScheme:
    """A scheme with change(field, tensor) of its static tensors; weights per tensor where per_channel is false."""
    for field_name in ("weights", "inputs", "outputs"):
        tensor: TensorScheme | None = getattr(scheme, field_name)
        if tensor is not None and not tensor.dynamic:
            changed: dict[str, Any] = {field_name: change(field_name, tensor)}
            scheme = replace(scheme, **changed)
    if not per_channel and scheme.weights.granularity == "per_channel":
        scheme = replace(scheme, weights=replace(scheme.weights, granularity="per_tensor"))
    return scheme


def _changed(tensor: TensorScheme, changes: Mapping[str, Any], calibration: CalibrationParams) -> TensorScheme:
    changes = dict(changes)
    if changes.get("calibrator") == OPEN:
        changes["calibrator"] = calibration.histogram_calib_method
    return replace(tensor, **changes)


def _tensor(data: object, where: str) -> dict[str, Any]:
    entries = mapping(data, where)
    check_keys(entries, _TENSOR, where)
    return {key: _TENSOR[key](value, f"{where}.{key}") for key, value in entries.items()}


def _normal(name: str, options: list[str], where: str) -> str:
    """The text that the scheme itself prints, so that equal rules compare equal."""
    try:
        return str(scheme_from_name(name))
    except ArgumentError as error:
        refuse(where, f"{error.got}" + (f" (keys {', '.join(options)})" if options else ""), error.allowed)
