"""The scheme of one place; which calibrators wait for the calibration call, which ranges training learns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pyquant.core import arguments
from pyquant.core.names import OPEN_CALIBRATOR as OPEN
from pyquant.core.registry import data_calibrators
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn.fates import LayerScheme
from pyquant.recipe.layer_rule import changed_tensors
from pyquant.simulate.calibrate import FIELDS


@dataclass(frozen=True)
class Defaults:
    """What SelectiveQuantizer's default_* arguments say."""

    calibrator_weights: str | None
    calibrator_inputs: str
    per_channel: bool
    learn_amax: bool = False

    @property
    def learns(self) -> frozenset[str]:
        """The tensors of a layer that learn their ranges: all or none."""
        return frozenset(FIELDS) if self.learn_amax else frozenset()

    def apply(
        self, scheme: QScheme, calibrator_weights: str | None = None, calibrator_inputs: str | None = None
    ) -> LayerScheme:
        """A scheme with calibrators: those given, else the scheme's own where it is not what schemes have unasked
        ('max', or what presets have), else the defaults (None: the scheme's own). 16-bit schemes are as they are, and
        dynamic inputs have no calibrator."""
        if scheme.is_float:
            return LayerScheme(scheme)
        still_open = set()

        def calibrated(field: str, old: TensorScheme) -> TensorScheme:
            is_weight = field == "weights"
            default = self.calibrator_weights if is_weight else self.calibrator_inputs
            named = calibrator_weights if is_weight else calibrator_inputs
            unasked = ("max", old.code_type.preset_calibrator)
            name = named or (default if default is not None and old.calibrator in unasked else old.calibrator)
            if name == OPEN:
                still_open.add(field.removesuffix("s"))
            return replace(old, calibrator="percentile" if name == OPEN else name)

        scheme = changed_tensors(scheme, calibrated, self.per_channel)
        return LayerScheme(scheme, frozenset(still_open), self.learns)


def with_descriptors(base: LayerScheme, inputs: Any, weights: Any) -> LayerScheme:
    """A place's scheme with the tensors of two descriptors: TensorScheme, QuantDescriptor, or None for unchanged."""
    changed: dict[str, Any] = {}
    still_open, learns = set(base.open), set(base.learns)
    for tensor, given in (("input", inputs), ("weight", weights)):
        if given is not None:
            changed[FIELDS[tensor]], is_open = _tensor_scheme(f"{tensor}_quant_descriptor", given)
            still_open = still_open - {tensor} | ({tensor} if is_open else set())
            learns |= {tensor} if getattr(given, "learn_amax", False) else set()
    return LayerScheme(replace(base.scheme, **changed), frozenset(still_open), frozenset(learns))


def check_calibrator(argument: str, value: object) -> None:
    """Raise ArgumentError unless the value names a calibrator that takes its range from data, or leaves it open."""
    arguments.one_of(argument, value, (*data_calibrators(), OPEN))


def _tensor_scheme(argument: str, given: Any) -> tuple[TensorScheme, bool]:
    if isinstance(given, TensorScheme):
        return given, False
    if hasattr(given, "tensor_scheme"):  # a QuantDescriptor
        described: tuple[TensorScheme, bool] = given.tensor_scheme()
        return described
    raise ArgumentError(argument, type(given).__name__, "a TensorScheme, a QuantDescriptor, or None")
