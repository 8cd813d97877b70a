"""How one layer is quantised: TensorScheme for one tensor, QScheme for a layer, and the presets.

A scheme is a plain frozen record. It holds no tensor, compares by value, and travels through JSON with a version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from pyquant.core.dtypes import (
    INT8,
    KERNEL_BITS,
    KERNEL_BITS_TEXT,
    PRODUCTS,
    SIMULATED_BITS,
    CodeType,
    code_type,
    qrange,
)
from pyquant.core.granularity import scale_shape
from pyquant.core.names import GRANULARITIES, HALF_DTYPES
from pyquant.core.registry import CALIBRATORS, Registry
from pyquant.errors import SchemeError

SCHEME_VERSION: Final = 1
_LATER_FIELDS: Final = ("two_level",)  # written where they are set, so that older readers take all other schemes
_SIMULATE: Final = "others are simulated (SelectiveQuantizer, insert_fake_quantize_, prepare_qat_)"


@dataclass(frozen=True)
class TensorScheme:
    """How the numbers of one tensor become codes: `real = scale * (code - zero_point)`.

    bits          4 or 8. 2, 3, 5, 6 and 7 in simulation (FakeQuantize and what builds on it), which no kernel runs. 16:
                  weights stay in floating point; inputs have int16 codes, in simulation.
    symmetric     True: zero point 0. False: affine, codes cover the whole range of `bits`.
    granularity   'per_tensor', 'per_token' (one scale a row of activations), 'per_channel' (one scale an output
                  channel of the weights), 'per_group' (group_size codes along K share a scale).
    group_size    codes that share a scale; needed with 'per_group' and refused without it.
    dynamic       scales come from the data of each call (activations only).
    narrow_range  symmetric codes are [-127, 127] or [-7, 7]; False adds -128 or -8. An affine range is never narrow.
    calibrator    where a static range comes from: 'max', 'percentile', 'entropy', 'mse', 'fixed', or what a user
                  registered with pyquant.calibrate.calibrator.
    percentile    in (0, 100]; meaningful for calibrator 'percentile'.
    two_level     the scales of a channel's groups are whole steps of one float scale (symmetric weights of fewer than 8
                  bits, 'per_group', inputs quantised): codes times steps are int8 codes, and one integer sum runs over
                  all of K (docs/numerics.md 4.1).

    Raises SchemeError naming field, value and what is allowed. Source: docs/numerics.md.

    Example:
        >>> TensorScheme(bits=4, granularity="per_group", group_size=128).code_range
        (-7, 7)
    """

    bits: int = 8
    symmetric: bool = True
    granularity: str = "per_tensor"
    group_size: int | None = None
    dynamic: bool = False
    narrow_range: bool = True
    calibrator: str = "max"
    percentile: float = 99.99
    two_level: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or self.bits not in SIMULATED_BITS:
            raise SchemeError("bits", repr(self.bits), ", ".join(map(str, SIMULATED_BITS)))
        for name in ("symmetric", "dynamic", "narrow_range", "two_level"):
            if not isinstance(getattr(self, name), bool):
                raise SchemeError(name, repr(getattr(self, name)), "True or False")
        _check_choice("granularity", self.granularity, GRANULARITIES)
        _check_choice("calibrator", self.calibrator, CALIBRATORS)
        _check_group_size(self.granularity, self.group_size)
        if self.two_level:
            _check_two_level(self)
        percentile = self.percentile
        if isinstance(percentile, bool) or not isinstance(percentile, (int, float)) or not 0 < percentile <= 100:
            raise SchemeError("percentile", repr(percentile), "a number in (0, 100]")
        object.__setattr__(self, "percentile", float(percentile))
        if not self.symmetric:
            object.__setattr__(self, "narrow_range", False)

    @property
    def code_type(self) -> CodeType:
        """Memory, names and limits of the codes; of 16 bits: those of inputs, as such weights have no codes."""
        return code_type(self.bits)

    @property
    def code_range(self) -> tuple[int, int]:
        """(qmin, qmax), the smallest and largest code; of 16 bits: those of inputs, as such weights have no codes."""
        return qrange(self.bits, self.symmetric, self.narrow_range)

    @property
    def product_type(self) -> CodeType:
        """The type of what an integer product multiplies: the codes, or (two_level) codes times steps."""
        return INT8 if self.two_level else self.code_type

    @property
    def product_range(self) -> tuple[int, int]:
        """The smallest and largest number that an integer product multiplies."""
        return (-INT8.qmax, INT8.qmax) if self.two_level else self.code_range

    @property
    def sum_size(self) -> int | None:
        """Codes along K that one integer sum takes in; None: all."""
        return None if self.two_level else self.group_size

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales and zero points of a tensor [..., K]."""
        return scale_shape(self.granularity, shape, self.group_size or 0)

    def to_dict(self) -> dict[str, Any]:
        """All fields as a JSON-ready dict; those of later versions of the format only where they are set."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value or name not in _LATER_FIELDS}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TensorScheme:
        """The inverse of to_dict(); a missing field takes its default, an unknown one raises SchemeError."""
        return TensorScheme(**_known_fields("TensorScheme", data, tuple(f.name for f in fields(TensorScheme))))

    def words(self) -> list[str]:
        """What it is in words, as str() has them.

        Example:
            >>> TensorScheme(calibrator="mse").words()
            ['int8', 'per_tensor', 'mse']
        """
        words = [self.code_type.name, self.granularity + (f"({self.group_size})" if self.group_size else "")]
        words += ["two-level"] if self.two_level else []
        if not self.symmetric:
            words.append("affine")
        elif not self.narrow_range:
            words.append("full range")
        words += ["dynamic"] if self.dynamic else []
        if self.calibrator != "max":
            words.append(self.calibrator + (f"({self.percentile:g})" if self.calibrator == "percentile" else ""))
        return words

    def __str__(self) -> str:
        return " ".join(self.words())


@dataclass(frozen=True)
class QScheme:
    """How one layer runs.

    weights  8 or 4 bits per channel, per group or per tensor (affine only where inputs is None); 16 bits for a
             floating-point layer, whose type `float_dtype` names.
             (2, 3, 5, 6, 7 bits: in simulation.)
    inputs   None: activations stay in floating point (weight-only). Otherwise 8 bits, or 4 bits with 4-bit weights (in
             simulation any bits with any, 16 for int16 too); either dynamic per token or static per tensor.
    outputs  None: floating-point result. Otherwise static per tensor: the layer returns codes (a QTensor).
    float_dtype  'float16' or 'bfloat16', with 16-bit weights only.

    Raises SchemeError naming field, value and what is allowed. Source: docs/numerics.md.

    Example:
        >>> str(QScheme(TensorScheme(granularity="per_channel"), TensorScheme(granularity="per_token", dynamic=True)))
        'W8A8Dynamic'
    """

    weights: TensorScheme
    inputs: TensorScheme | None = None
    outputs: TensorScheme | None = None
    float_dtype: str | None = None

    def __post_init__(self) -> None:
        _check_type("weights", self.weights, (TensorScheme,), "a TensorScheme")
        for name in ("inputs", "outputs"):
            _check_type(name, getattr(self, name), (TensorScheme, type(None)), "a TensorScheme or None")
        if self.weights.bits == 16:
            _check_float_layer(self)
            return
        if self.float_dtype is not None:
            raise SchemeError("float_dtype", repr(self.float_dtype), "None, as weights.bits is not 16")
        _check_weights(self.weights, weight_only=self.inputs is None)
        if self.inputs is not None:
            _check_inputs(self.inputs)
        if self.outputs is not None:
            _check_outputs(self.outputs, self.inputs)

    def check_kernels(self) -> None:
        """Raise SchemeError where no kernel runs such a layer, and it can only be simulated.

        Example:
            >>> QScheme(TensorScheme(bits=3, granularity="per_channel")).check_kernels()
            Traceback (most recent call last):
            ...
            pyquant.errors.SchemeError: argument 'weights.bits': got 3; allowed: 4 or 8 in layers that run in ...
        """
        for name, tensor in (("weights", self.weights), ("inputs", self.inputs), ("outputs", self.outputs)):
            if tensor is not None and tensor.bits not in KERNEL_BITS and not (name == "weights" and self.is_float):
                allowed = f"{KERNEL_BITS_TEXT} in layers that run in integers; {_SIMULATE}"
                raise SchemeError(f"{name}.bits", tensor.bits, allowed)
        x, w = self.inputs, self.weights
        if x is not None and (x.code_type, w.product_type) not in PRODUCTS.values():
            products = ", ".join(f"{x.bits} with {w.bits}-bit weights" for x, w in PRODUCTS.values())
            how = "of two levels are multiplied as 8-bit ones" if w.two_level else f"have {w.bits}"
            raise SchemeError("inputs.bits", x.bits, f"{products}; these {how}")

    @property
    def is_integer(self) -> bool:
        """Codes times codes: bit-exact on every device (weights and inputs are both quantised)."""
        return self.inputs is not None

    @property
    def is_weight_only(self) -> bool:
        """Quantised weights, floating-point activations."""
        return self.inputs is None and self.weights.bits != 16

    @property
    def is_float(self) -> bool:
        """A 16-bit floating-point layer."""
        return self.weights.bits == 16

    @property
    def is_static(self) -> bool:
        """Needs a calibrated input scale."""
        return self.inputs is not None and not self.inputs.dynamic

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dict with the version of the format."""
        parts = {"weights": self.weights, "inputs": self.inputs, "outputs": self.outputs}
        tensors = {name: None if part is None else part.to_dict() for name, part in parts.items()}
        return {"version": SCHEME_VERSION, **tensors, "float_dtype": self.float_dtype}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> QScheme:
        """The inverse of to_dict(). Raises SchemeError for unknown or missing fields and for newer versions."""
        fields = _known_fields("QScheme", data, ("version", "weights", "inputs", "outputs", "float_dtype"))
        version = fields.get("version")
        if isinstance(version, bool) or version != SCHEME_VERSION:
            raise SchemeError("version", repr(version), f"{SCHEME_VERSION} (a newer file needs a newer pyquant)")
        if not isinstance(fields.get("weights"), Mapping):
            raise SchemeError("weights", repr(fields.get("weights")), "an object with the fields of a TensorScheme")
        parts = (fields.get(name) for name in ("inputs", "outputs"))
        inputs, outputs = (None if part is None else TensorScheme.from_dict(part) for part in parts)
        return QScheme(TensorScheme.from_dict(fields["weights"]), inputs, outputs, fields.get("float_dtype"))

    def __str__(self) -> str:
        from pyquant.core.presets import preset_text  # imported here, because presets import schemes

        text = preset_text(self)
        if text is not None:
            return text
        if self.is_float:
            return f"QScheme({self.float_dtype})"
        outputs = "" if self.outputs is None else f", outputs={self.outputs}"
        return f"QScheme(weights={self.weights}, inputs={self.inputs or 'float'}{outputs})"


def _check_type(name: str, value: object, types: tuple[type, ...], allowed: str) -> None:
    if not isinstance(value, types):
        raise SchemeError(name, f"{type(value).__name__} {value!r}"[:120], allowed)


def _check_choice(name: str, value: object, allowed: Registry[Any] | tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise SchemeError(name, repr(value), ", ".join(repr(a) for a in allowed))


def _check_group_size(granularity: str, group_size: object) -> None:
    if granularity != "per_group":
        if group_size is not None:
            raise SchemeError("group_size", repr(group_size), f"None with granularity '{granularity}'")
    elif isinstance(group_size, bool) or not isinstance(group_size, int) or not 0 < group_size < 2**31:
        raise SchemeError("group_size", repr(group_size), "an integer in [1, 2147483647] with granularity 'per_group'")


def _check_two_level(tensor: TensorScheme) -> None:
    if tensor.granularity != "per_group" or not tensor.symmetric or tensor.bits >= INT8.bits:
        allowed = "False, or symmetric codes of fewer than 8 bits with granularity 'per_group'"
        raise SchemeError("two_level", True, allowed)


def _check_float_layer(scheme: QScheme) -> None:
    for name in ("inputs", "outputs"):
        if getattr(scheme, name) is not None:
            raise SchemeError(name, str(getattr(scheme, name)), "None with 16-bit weights")
    if scheme.weights != TensorScheme(bits=16):
        allowed = "TensorScheme(bits=16) with all other fields at their defaults"
        raise SchemeError("weights", repr(scheme.weights), allowed)
    _check_choice("float_dtype", scheme.float_dtype, HALF_DTYPES)


def _check_weights(weights: TensorScheme, weight_only: bool) -> None:
    if weights.granularity == "per_token":
        raise SchemeError("weights.granularity", "'per_token'", "'per_channel', 'per_group', 'per_tensor'")
    if weights.dynamic:
        raise SchemeError("weights.dynamic", True, "False: weights do not change between calls")
    if not weights.symmetric and not weight_only:
        raise SchemeError("weights.symmetric", False, "True where inputs are quantised; affine weights are weight-only")
    if weights.two_level and weight_only:
        raise SchemeError(
            "weights.two_level", True, "False where inputs stay in floating point: no integers are summed"
        )


def _check_inputs(inputs: TensorScheme) -> None:
    if inputs.two_level:
        raise SchemeError("inputs.two_level", True, "False: it is for weights")
    expected = "per_token" if inputs.dynamic else "per_tensor"
    if inputs.granularity != expected:
        kind = "dynamic" if inputs.dynamic else "static"
        raise SchemeError("inputs.granularity", repr(inputs.granularity), f"'{expected}' for {kind} inputs")


def _check_outputs(outputs: TensorScheme, inputs: TensorScheme | None) -> None:
    if inputs is None:
        raise SchemeError("outputs", str(outputs), "None where inputs stay in floating point")
    if outputs.bits == 16:
        raise SchemeError("outputs.bits", 16, "2 to 8; outputs=None gives a floating-point result")
    if outputs.dynamic:
        raise SchemeError("outputs.dynamic", True, "False: the scale of an integer output is calibrated")
    if outputs.granularity != "per_tensor":
        raise SchemeError("outputs.granularity", repr(outputs.granularity), "'per_tensor'")


def _known_fields(kind: str, data: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    _check_type(kind, data, (Mapping,), f"an object with the fields {', '.join(names)}")
    for key in data:
        if key not in names:
            raise SchemeError(kind, f"unknown field {key!r}"[:120], f"the fields {', '.join(names)}")
    return dict(data)
