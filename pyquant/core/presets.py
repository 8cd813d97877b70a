"""The named schemes, W8A8 to FP16, and their way to and from text ('W4A8Dynamic(group_size=128)').

Weights and static inputs of 8 bits, and weights with zero points, have ranges by their maximum, others of 4 bits by the
mean squared error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

from pyquant.core.dtypes import code_type
from pyquant.core.names import did_you_mean
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import SchemeError


def W8A8(*, symmetric_inputs: bool = True) -> QScheme:
    """8-bit weights per channel, 8-bit static per-tensor inputs (a calibrated scale each layer).

    symmetric_inputs  False: affine inputs with a zero point.

    Example:
        >>> str(W8A8())
        'W8A8'
    """
    return QScheme(_weights(8, None), _inputs(8, symmetric_inputs, dynamic=False))


def W8A8Dynamic(*, symmetric_inputs: bool = True) -> QScheme:
    """8-bit weights per channel, 8-bit inputs quantised per token at run time: needs no data.

    Example:
        >>> W8A8Dynamic().inputs.granularity
        'per_token'
    """
    return QScheme(_weights(8, None), _inputs(8, symmetric_inputs, dynamic=True))


def W4A8(group_size: int | None = 128, *, symmetric_inputs: bool = True) -> QScheme:
    """4-bit weights, 8-bit static per-tensor inputs.

    group_size  weights along K that share a scale; None for one scale per output channel.

    Example:
        >>> W4A8().weights.group_size
        128
    """
    return QScheme(_weights(4, group_size), _inputs(8, symmetric_inputs, dynamic=False))


def W4A8Dynamic(group_size: int | None = 128, *, symmetric_inputs: bool = True) -> QScheme:
    """4-bit weights, 8-bit inputs quantised per token at run time: needs no data.

    Example:
        >>> str(W4A8Dynamic())
        'W4A8Dynamic(group_size=128)'
    """
    return QScheme(_weights(4, group_size), _inputs(8, symmetric_inputs, dynamic=True))


def W4A8TwoLevel(group_size: int = 128, *, symmetric_inputs: bool = True) -> QScheme:
    """4-bit weights under group scales of two levels, 8-bit static per-tensor inputs.

    A group's scale is 1 to 18 whole steps of its channel's float scale (docs/numerics.md 4.1), so that one integer sum
    runs over all of K; accuracy is about that of W4A8, the product is that of W8A8. Memory is that of W4A8 on a GPU,
    and that of W8A8 on a CPU.
    group_size  weights along K that share a step.
    Source: VS-Quant, arXiv 2102.04503; QServe's progressive group quantisation, arXiv 2405.04532.

    Example:
        >>> W4A8TwoLevel().weights.two_level
        True
    """
    return QScheme(_weights(4, group_size, two_level=True), _inputs(8, symmetric_inputs, dynamic=False))


def W4A8TwoLevelDynamic(group_size: int = 128, *, symmetric_inputs: bool = True) -> QScheme:
    """W4A8TwoLevel with inputs quantised per token at run time: needs no data.

    Example:
        >>> str(W4A8TwoLevelDynamic(64))
        'W4A8TwoLevelDynamic(group_size=64)'
    """
    return QScheme(_weights(4, group_size, two_level=True), _inputs(8, symmetric_inputs, dynamic=True))


def W4A4(group_size: int | None = None, *, symmetric_inputs: bool = True) -> QScheme:
    """4-bit weights, 4-bit static per-tensor inputs, with ranges of the least squared error.

    Example:
        >>> W4A4().inputs.code_range, W4A4().inputs.calibrator
        ((-7, 7), 'mse')
    """
    return QScheme(_weights(4, group_size), _inputs(4, symmetric_inputs, dynamic=False))


def W4A4Dynamic(group_size: int | None = None, *, symmetric_inputs: bool = True) -> QScheme:
    """4-bit weights, 4-bit inputs quantised per token at run time: needs no data.

    Example:
        >>> W4A4Dynamic().weights.bits
        4
    """
    return QScheme(_weights(4, group_size), _inputs(4, symmetric_inputs, dynamic=True))


def W8A16(group_size: int | None = None, *, symmetric: bool = True) -> QScheme:
    """8-bit weights, floating-point inputs.

    symmetric  False: weights have zero points.

    Example:
        >>> W8A16().is_weight_only
        True
    """
    return QScheme(_weights(8, group_size, symmetric))


def W4A16(group_size: int | None = 128, *, symmetric: bool = True) -> QScheme:
    """4-bit weights, floating-point inputs.

    symmetric  False: weights have zero points.

    Example:
        >>> str(W4A16(symmetric=False))
        'W4A16(group_size=128, symmetric=False)'
    """
    return QScheme(_weights(4, group_size, symmetric))


def FP16(dtype: str = "float16") -> QScheme:
    """A floating-point layer of 16 bits: 'float16' or 'bfloat16'.

    Example:
        >>> FP16("bfloat16").float_dtype
        'bfloat16'
    """
    return QScheme(TensorScheme(bits=16), float_dtype=dtype)


PRESETS: Final[dict[str, Callable[..., QScheme]]] = {
    f.__name__: f
    for f in (
        W8A8,
        W8A8Dynamic,
        W4A8,
        W4A8Dynamic,
        W4A8TwoLevel,
        W4A8TwoLevelDynamic,
        W4A4,
        W4A4Dynamic,
        W8A16,
        W4A16,
        FP16,
    )
}


_GROUPED_BY_DEFAULT: Final = ("W4A8", "W4A8Dynamic", "W4A16")


def scheme_from_name(text: str) -> QScheme:
    """The scheme that a preset's text names, as str() prints the scheme of a preset; parentheses may be left out.
    Schemes that are no preset's (with outputs, say) print more, which no text names.

    Raises SchemeError naming the text and the presets.

    Example:
        >>> scheme_from_name("W4A8Dynamic(group_size=64)").weights.group_size
        64
    """
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", text) if isinstance(text, str) else None
    if match is None or match[1] not in PRESETS:
        name, bracket, _ = str(text).strip().partition("(")
        if match is None and bracket and name.strip() in PRESETS:
            raise SchemeError("scheme", repr(text)[:120], f"options between one pair of brackets: {name}(option=value)")
        hint = did_you_mean((match or re.match(r"(.*)", str(text)))[1], PRESETS)  # type: ignore[index]
        raise SchemeError("scheme", repr(text)[:120], ", ".join(PRESETS) + hint)
    arguments: dict[str, Any] = {}
    for part in (p.strip() for p in (match[2] or "").split(",")):
        if part:
            key, _, value = (p.strip() for p in part.partition("="))
            if key in arguments:
                raise SchemeError("scheme", repr(text)[:120], f"every option once, and {key} stands there twice")
            arguments[key] = _value(text, value)
    try:
        return PRESETS[match[1]](**arguments)
    except TypeError:
        options = _options(match[1])
        hint = "".join(did_you_mean(key, options) for key in arguments if key not in options)
        allowed = f"the options of {match[1]}: {', '.join(options) or 'none'}{hint}"
        raise SchemeError("scheme", repr(text)[:120], allowed) from None


def to_scheme(value: object) -> object:
    """A preset's text or the preset itself as its scheme; everything else as it is, for the caller to judge.

    Raises SchemeError for text that names no scheme.
    """
    if isinstance(value, str):
        return scheme_from_name(value)
    preset = next((one for one in PRESETS.values() if value is one), None)
    return value if preset is None else preset()


@lru_cache(maxsize=256)
def preset_name(scheme: QScheme) -> str | None:
    """The preset's text for a scheme, or None where no preset gives it."""
    name, arguments = _candidate(scheme)
    if name not in PRESETS or not arguments.keys() <= set(_options(name)) or PRESETS[name](**arguments) != scheme:
        return None
    shown = ", ".join(f"{key}={value}" for key, value in arguments.items())
    return f"{name}({shown})" if shown else name


def preset_text(scheme: QScheme) -> str | None:
    """The preset's text and behind it what differs from the preset; None where nothing is near, or there are outputs.

    Example:
        >>> import dataclasses
        >>> preset_text(dataclasses.replace(W8A8(), weights=TensorScheme(granularity="per_channel", calibrator="mse")))
        'W8A8, weights mse'
    """
    name, arguments = _candidate(scheme)
    if scheme.outputs is not None or name not in PRESETS or not arguments.keys() <= set(_options(name)):
        return None
    preset = PRESETS[name](**arguments)
    parts = [("weights", scheme.weights, preset.weights), ("inputs", scheme.inputs, preset.inputs)]
    said = [preset_name(preset) or name]
    for part, is_, was in parts:
        if is_ is not None and was is not None and is_ != was:
            words = [word for word in is_.words() if word not in was.words()]
            said.append(" ".join([part, *(words or [is_.calibrator])]))  # 'max' goes without saying elsewhere
    return ", ".join(said)


def _candidate(scheme: QScheme) -> tuple[str, dict[str, Any]]:
    """The only preset that could give a scheme, with its options; perhaps there is none of that name."""
    w, x = scheme.weights, scheme.inputs
    if scheme.is_float:
        return "FP16", {"dtype": scheme.float_dtype} if scheme.float_dtype != "float16" else {}
    levels = "TwoLevel" if w.two_level else ""
    name = f"W{w.bits}A16" if x is None else f"W{w.bits}A{x.bits}{levels}{'Dynamic' if x.dynamic else ''}"
    options: dict[str, Any] = {}
    if w.group_size is not None or name in _GROUPED_BY_DEFAULT:
        options["group_size"] = w.group_size
    if not (w if x is None else x).symmetric:
        options["symmetric" if x is None else "symmetric_inputs"] = False
    return name, options


def _weights(bits: int, group_size: int | None, symmetric: bool = True, two_level: bool = False) -> TensorScheme:
    granularity = "per_channel" if group_size is None else "per_group"
    # with zero points the search costs sixteen times as much (docs/calibration.md 3): for whoever asks for it
    calibrator = code_type(bits).preset_calibrator if symmetric is True else "max"
    return TensorScheme(bits, symmetric, granularity, group_size, calibrator=calibrator, two_level=two_level)


def _inputs(bits: int, symmetric: bool, dynamic: bool) -> TensorScheme:
    granularity = "per_token" if dynamic else "per_tensor"
    calibrator = "max" if dynamic else code_type(bits).preset_calibrator  # dynamic ranges are the maximum of each row
    return TensorScheme(bits, symmetric, granularity, dynamic=dynamic, calibrator=calibrator)


def _value(text: str, value: str) -> Any:
    words = {"None": None, "True": True, "False": False}
    if value in words:
        return words[value]
    if re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    if re.fullmatch(r"['\"]?[A-Za-z_]\w*['\"]?", value):
        return value.strip("'\"")
    raise SchemeError("scheme", repr(text)[:120], "options such as group_size=128 or symmetric=False")


def _options(name: str) -> list[str]:
    code = PRESETS[name].__code__
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
