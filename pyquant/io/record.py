"""LayerRecord: one quantised layer as plain tensors and words, and the one validator that saving and loading share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from pyquant.core import arguments
from pyquant.core.bounds import check_k
from pyquant.core.dtypes import FLOATS, describe, dtype_name
from pyquant.core.names import ACTIVATIONS
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError

KINDS: Final = ("linear", "embedding", "conv2d")
GEOMETRY: Final = {"kernel_size": (2, 1), "stride": (2, 1), "padding": (4, 0), "dilation": (2, 1)}  # numbers, least
MAX_SIZE: Final = 2**31 - 1

NAMES: Final = "1 to 256 printable characters, without '..'"
_MAX_NAME: Final = 256
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class LayerRecord:
    """One quantised layer, all tensors on the CPU or moved there when saved.

    name               path of the module in the model, printable characters, without '..'; '' for the model itself.
    scheme             QScheme.to_dict().
    in_features        K; for an embedding the width of a row; for a convolution kernel height * width * channels of a
                       group.
    out_features       N; for an embedding the number of rows; for a convolution its output channels.
    codes              int8 [N, K], 4-bit codes one per byte, inside the scheme's range; for a 16-bit scheme the
                       floating-point weights themselves, float16 or bfloat16 as the scheme's float_dtype says.
    weight_scale       float32, finite, > 0: [1] per tensor, [N] per channel, [N, K / g] per group; None for 16 bits.
    weight_zero_point  int32 of the same shape, with affine weights only.
    bias               float32, float16 or bfloat16 [N], or None.
    input_scale, input_zero_point, output_scale, output_zero_point
                       float32 [1] and int32 [1], where inputs or outputs are static (zero points: where affine).
    activation         'none', 'relu', 'clamp', 'gelu', 'gelu_tanh', 'silu'.
    clamp              (low, high) with activation 'clamp', low <= high, infinities allowed; otherwise None.
    kind               'linear', 'embedding' or 'conv2d'.
    geometry           of kind 'conv2d', otherwise None: kernel_size, stride and dilation as (height, width), padding as
                       (top, bottom, left, right); groups, where there is more than 1. K runs
                       over kernel row, kernel column, channel.
    """

    name: str
    scheme: Mapping[str, Any]
    in_features: int
    out_features: int
    codes: torch.Tensor
    weight_scale: torch.Tensor | None
    weight_zero_point: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    input_zero_point: torch.Tensor | None = None
    output_scale: torch.Tensor | None = None
    output_zero_point: torch.Tensor | None = None
    activation: str = "none"
    clamp: tuple[float, float] | None = None
    kind: str = "linear"
    geometry: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class LayerEntry:
    """A LayerRecord without its tensors, already checked, as the manifest has it; bias: its type, None for none."""

    name: str
    scheme: QScheme
    in_features: int
    out_features: int
    bias: torch.dtype | None
    activation: str
    clamp: tuple[float, float] | None
    kind: str
    geometry: Mapping[str, tuple[int, ...] | int] | None = None


def is_safe_name(name: object) -> bool:
    """Whether a tensor or layer name is 1 to 256 printable characters without '..', and not safetensors' own.

    A name is a key and never a path: a slash or a space in it is harmless.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME:
        return False
    return name.isprintable() and ".." not in name and name != "__metadata__"


def is_plain_name(name: str) -> bool:
    """Whether a name is made of A-Z a-z 0-9 _ . - alone, as format versions 1 and 2 ask for."""
    return name == "" or _PLAIN_NAME.fullmatch(name) is not None


def check_layer(layer: LayerRecord) -> LayerEntry:
    """What the manifest will say of a record whose words, sizes, types and numbers are what its scheme says.

    Raises ArgumentError (SchemeError for the scheme) naming layer and field, what it was and what is allowed.
    Source: docs/file_format.md 4.
    """
    bias, geometry = None if layer.bias is None else layer.bias.dtype, _plain(layer.geometry)
    scheme, n, k = QScheme.from_dict(layer.scheme), layer.out_features, layer.in_features
    entry = LayerEntry(layer.name, scheme, k, n, bias, layer.activation, layer.clamp, layer.kind, geometry)
    check_entry(entry)
    shape = (n, k)
    if scheme.is_float:
        _check_tensor(layer, "codes", getattr(torch, str(scheme.float_dtype)), shape)
        _check_absent(layer, "weight_scale", "weight_zero_point", "in a 16-bit layer")
    else:
        _check_tensor(layer, "codes", torch.int8, shape)
        _check_range(layer, "codes", layer.codes, scheme.weights.code_range)
        _check_qparams(layer, "weight", scheme.weights, scheme.weights.scale_shape(shape))
    for prefix, one in (("input", scheme.inputs), ("output", scheme.outputs)):
        if one is None or one.dynamic:
            _check_absent(layer, f"{prefix}_scale", f"{prefix}_zero_point", f"without static {prefix}s")
        else:
            _check_qparams(layer, prefix, one, (1,))
    if layer.bias is not None:
        _check_tensor(layer, "bias", FLOATS, (n,))
    return entry


def check_entry(entry: LayerEntry) -> None:
    """Raise ArgumentError for words and sizes that are unknown, unsafe or do not fit each other.

    Sizes: integers in [0, 2^31 - 1], divisible into groups, and so small that no int32 sum can overflow.
    """
    if entry.name != "" and not is_safe_name(entry.name):
        raise ArgumentError("name", repr(entry.name)[:80], NAMES)
    _check_words(entry)
    entry.scheme.check_kernels()
    _check_sizes(entry)
    _check_geometry(entry)


def _check_words(entry: LayerEntry) -> None:
    name, activation, clamp = entry.name, entry.activation, entry.clamp
    if entry.kind not in KINDS:
        raise ArgumentError(_of(name, "kind"), repr(entry.kind)[:80], " or ".join(map(repr, KINDS)))
    if activation not in ACTIVATIONS:
        raise ArgumentError(_of(name, "activation"), repr(activation)[:80], ", ".join(map(repr, ACTIVATIONS)))
    if entry.kind == "embedding" and (entry.scheme.inputs is not None or activation != "none"):
        raise ArgumentError(_of(name, "kind"), "'embedding'", "weight-only schemes and activation 'none'")
    if activation != "clamp":
        if clamp is not None:
            raise ArgumentError(_of(name, "clamp"), repr(clamp)[:80], f"None with activation '{activation}'")
    elif not _is_clamp(clamp):
        raise ArgumentError(_of(name, "clamp"), repr(clamp)[:80], "two floats (low, high), low <= high, not NaN")
    if entry.bias is not None and entry.bias not in FLOATS:
        raise ArgumentError(_of(name, "bias"), entry.bias, "float32, float16 or bfloat16")


def _check_sizes(entry: LayerEntry) -> None:
    name, scheme, k = entry.name, entry.scheme, entry.in_features
    for field, size in (("out_features", entry.out_features), ("in_features", k)):
        arguments.whole(_of(name, field), size, 0, MAX_SIZE)
    group, summed = scheme.weights.group_size, scheme.weights.sum_size
    if group is not None and k % group:
        raise ArgumentError(_of(name, "group_size"), group, f"a divisor of in_features = {k}")
    if scheme.inputs is not None:
        check_k(
            k if summed is None else summed,
            scheme.inputs.code_range,
            scheme.weights.product_range,
            has_zero_point=not scheme.inputs.symmetric,
            argument=_of(name, "in_features" if summed is None else "group_size"),
        )


def _plain(geometry: object) -> Any:
    """Sequences as tuples; what is no mapping stays as it is, for the check to refuse."""
    if not isinstance(geometry, Mapping):
        return geometry
    plain = {key: tuple(value) if isinstance(value, (list, tuple)) else value for key, value in geometry.items()}
    if type(plain.get("groups")) is int and plain["groups"] == 1:
        del plain["groups"]
    return plain


def _check_geometry(entry: LayerEntry) -> None:
    field, geometry = _of(entry.name, "geometry"), entry.geometry
    if entry.kind != "conv2d":
        if geometry is not None:
            raise ArgumentError(field, repr(geometry)[:80], f"None with kind '{entry.kind}'")
        return
    if not isinstance(geometry, Mapping) or set(geometry) - {"groups"} != set(GEOMETRY):
        raise ArgumentError(field, repr(geometry)[:80], f"the keys {', '.join(GEOMETRY)}, and groups or not")
    groups = geometry.get("groups", 2)
    if type(groups) is not int or not 2 <= groups <= MAX_SIZE or ("groups" in geometry and entry.out_features % groups):
        allowed = f"a divisor of out_features = {entry.out_features} above 1, or no such key"
        raise ArgumentError(f"{field}.groups", repr(groups)[:80], allowed)
    for key, (count, least) in GEOMETRY.items():
        numbers: Any = geometry[key]
        whole = isinstance(numbers, tuple) and all(type(v) is int and least <= v <= MAX_SIZE for v in numbers)
        if not whole or len(numbers) != count:
            raise ArgumentError(f"{field}.{key}", repr(numbers)[:80], f"{count} integers in [{least}, {MAX_SIZE}]")
    height, width = cast("tuple[int, int]", geometry["kernel_size"])
    pixels = height * width
    if entry.in_features % pixels:
        raise ArgumentError(_of(entry.name, "in_features"), entry.in_features, f"a multiple of the kernel's {pixels}")


def _is_clamp(clamp: Any) -> bool:
    is_pair = isinstance(clamp, tuple) and len(clamp) == 2 and all(isinstance(v, float) for v in clamp)
    return is_pair and clamp[0] <= clamp[1]  # false for NaN


def _check_qparams(layer: LayerRecord, prefix: str, scheme: TensorScheme, shape: tuple[int, ...]) -> None:
    field = f"{prefix}_scale"
    _check_tensor(layer, field, torch.float32, shape)
    scale = getattr(layer, field)
    bad = scale[~((scale > 0) & (scale < math.inf))]
    if bad.numel():
        raise ArgumentError(_of(layer.name, field), bad[0].item(), "finite and > 0")
    field = f"{prefix}_zero_point"
    if scheme.symmetric:
        if getattr(layer, field) is not None:
            raise ArgumentError(_of(layer.name, field), "a tensor", "None with a symmetric scheme")
        return
    _check_tensor(layer, field, torch.int32, shape)
    _check_range(layer, field, getattr(layer, field), scheme.code_range)


def _check_tensor(
    layer: LayerRecord, field: str, dtype: torch.dtype | tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    tensor = getattr(layer, field)
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    expected = f"{' or '.join(dtype_name(d) for d in allowed)} {list(shape)}"
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(_of(layer.name, field), type(tensor).__name__, expected)
    if tensor.dtype not in allowed or tuple(tensor.shape) != shape:
        raise ArgumentError(_of(layer.name, field), describe(tensor), expected)
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise ArgumentError(_of(layer.name, field), f"{tensor.layout} on {tensor.device}", "a strided tensor with data")


def _check_range(layer: LayerRecord, field: str, tensor: torch.Tensor, limits: tuple[int, int]) -> None:
    low, high = (int(v) for v in tensor.aminmax()) if tensor.numel() else limits
    if low < limits[0] or high > limits[1]:
        raise ArgumentError(_of(layer.name, field), f"values in [{low}, {high}]", f"codes in {list(limits)}")


def _check_absent(layer: LayerRecord, first: str, second: str, when: str) -> None:
    for field in (first, second):
        if getattr(layer, field) is not None:
            raise ArgumentError(_of(layer.name, field), "a tensor", f"None {when}")


def _of(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field
