"""What every foreign format is read into: codes, scales, zero points, the order of groups and a scheme, exactly.

A format's own file says where its numbers lie and what they mean; what pyquant's layers ask for beyond that (scales
above zero, groups of neighbours, one range of codes) is brought about here, once, without changing any weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch

from pyquant.core.dtypes import FLOATS, KERNEL_BITS, code_type, describe
from pyquant.core.names import GIVEN_CALIBRATOR
from pyquant.core.presets import W8A8Dynamic
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.record import LayerRecord, check_layer

ACTIVATIONS_AS: Final = ("file", "float", "int8")
DYNAMIC_INT8: Final = W8A8Dynamic().inputs


@dataclass(frozen=True)
class Options:
    """What the caller decides where a file leaves a choice.

    activations          'file': as the file says, floating point where it says nothing. 'float': weight-only. 'int8':
                         codes of each call, a scale a token.
    drop_kv_cache_scheme whether a key-value cache that the file quantises may stay in floating point.
    """

    activations: str = "file"
    drop_kv_cache_scheme: bool = False


@dataclass(frozen=True)
class ForeignLayer:
    """A layer of another tool in pyquant's terms: weight[n, order[k]] = scale * (codes[n, k] - zero_point).

    record  codes, scales, zero points, bias and scheme; columns in the order of their groups. Static ranges are
            'fixed' in the scheme: the file has them, and does not say by what rule they were found.
    order   int64 [K], which input each column multiplies, or None: its own.
    """

    record: LayerRecord
    order: torch.Tensor | None = None


class Reader(Protocol):
    """What the file of a format gives: which layers there are, and each of them."""

    def layers(self) -> Mapping[str, frozenset[str]]:
        """{layer: names of its tensors}; all others of the source are the model's own."""
        ...

    def dropped(self) -> frozenset[str]:
        """Tensors that belong to nothing that is kept."""
        ...

    def read(self, name: str) -> ForeignLayer:
        """A layer. Raises CheckpointError naming it, what was found and what is allowed."""
        ...


def foreign_layer(
    name: str,
    bits: int,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    *,
    options: Options,
    bias: torch.Tensor | None = None,
    group_of: torch.Tensor | None = None,
    inputs: TensorScheme | None = None,
    input_scale: torch.Tensor | None = None,
    input_zero_point: torch.Tensor | None = None,
) -> ForeignLayer:
    """The layer whose weight[n, k] is scale * (codes[n, k] - zero_point), in float32.

    codes       int8 [N, K], any of `bits`.
    scale       floating point [1], or [N, G], a column for each group along K; any finite numbers.
    zero_point  integers of the shape of `scale` within `bits`, or None.
    group_of    whole numbers [K], the group of each column, or None: neighbours.
    inputs      how the file quantises activations, or None; input_scale and input_zero_point where that is static.
    Raises CheckpointError naming the layer for what no layer of pyquant can hold.
    """
    try:
        _check_numbers(bits, codes, scale, zero_point)
        order = None if group_of is None else _order(group_of, scale.shape[-1], codes.shape[1])
        if order is not None:
            codes = codes[:, order]
        columns = codes.shape[1]
        spread = scale.shape[-1] if scale.dim() == 2 else 1
        if spread == 0 or columns % spread:
            raise ArgumentError("weight_scale", f"{spread} groups", f"groups of one size: a divisor of K = {columns}")
        codes, scale, zero_point = positive_scales(codes, scale, zero_point, code_type(bits).qmin)
        granularity = "per_tensor" if scale.dim() == 1 else "per_channel" if spread == 1 else "per_group"
        group_size = columns // spread if granularity == "per_group" else None
        given = {"narrow_range": False, "calibrator": GIVEN_CALIBRATOR}
        weights = TensorScheme(bits, zero_point is None, granularity, group_size, **given)  # type: ignore[arg-type]
        inputs = inputs_as(options.activations, inputs)
        if inputs is not None and not inputs.dynamic:
            inputs = replace(inputs, calibrator=GIVEN_CALIBRATOR)
        if zero_point is not None and inputs is not None:
            why = "zero points of weights with quantised activations, whose product no kernel has"
            raise ArgumentError("weight_zero_point", why, "activations='float', which multiplies these weights")
        shape = weights.scale_shape(tuple(codes.shape))
        is_static = inputs is not None and not inputs.dynamic
        has_zero_point = is_static and inputs is not None and not inputs.symmetric
        record = LayerRecord(
            name=name,
            scheme=QScheme(weights, inputs).to_dict(),
            in_features=columns,
            out_features=codes.shape[0],
            codes=codes.contiguous(),
            weight_scale=scale.reshape(shape).contiguous(),
            weight_zero_point=None if zero_point is None else zero_point.reshape(shape).to(torch.int32).contiguous(),
            bias=bias,
            input_scale=input_scale if is_static else None,
            input_zero_point=input_zero_point if has_zero_point else None,
        )
        check_layer(record)
    except ArgumentError as error:
        raise CheckpointError(f"layer '{name}': {error}") from None
    return ForeignLayer(record, order)


def inputs_as(activations: str, inputs: TensorScheme | None) -> TensorScheme | None:
    """How activations are quantised: as the file says, or as the caller asked."""
    return {"file": inputs, "float": None, "int8": DYNAMIC_INT8}[activations]


def positive_scales(
    codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, qmin: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same weights with scales above zero, in float32; zero points that are all 0 are none.

    A negative scale turns its codes round: to -code, or where the smallest code has no negative, all of them to
    -1 - code with the zero point -1 - zero_point, which is as exact. A scale of zero becomes 1 with codes of real 0.

    Example:
        >>> codes, scale = torch.tensor([[-8, 7]], dtype=torch.int8), torch.tensor([[-0.5]])
        >>> [t.tolist() for t in positive_scales(codes, scale, None, -8)]
        [[[7, -8]], [[0.5]], [[-1]]]
    """
    scale = scale.to(torch.float32)
    zero_point = None if zero_point is None or not zero_point.any() else zero_point.to(torch.int32)
    negative, zero = scale < 0, scale == 0
    if bool(negative.any()):
        turned = _spread(negative, codes.shape[1])
        if zero_point is None and not bool((turned & (codes == qmin)).any()):
            codes = torch.where(turned, -codes, codes)
        else:
            zero_point = (
                torch.zeros(scale.shape, dtype=torch.int32, device=scale.device) if zero_point is None else zero_point
            )
            codes = torch.where(turned, -1 - codes, codes)
            zero_point = torch.where(negative, -1 - zero_point, zero_point)
        scale = scale.abs()
    if bool(zero.any()):
        reals = (
            torch.zeros(1, 1, dtype=torch.int8, device=codes.device)
            if zero_point is None
            else zero_point.to(torch.int8)
        )
        codes = torch.where(_spread(zero, codes.shape[1]), _spread(reals, codes.shape[1]), codes)
        scale = torch.where(zero, torch.ones_like(scale), scale)
    return codes, scale, zero_point


def _check_numbers(bits: int, codes: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None) -> None:
    if bits not in KERNEL_BITS:
        raise ArgumentError("bits", bits, " or ".join(map(str, KERNEL_BITS)))
    if scale.dtype not in (*FLOATS, torch.float64) or scale.dim() not in (1, 2):
        raise ArgumentError("weight_scale", describe(scale), "floating point [1] or [N, groups]")
    wanted = (1,) if scale.dim() == 1 else (codes.shape[0], scale.shape[1])
    for field, tensor in (("weight_scale", scale), ("weight_zero_point", zero_point)):
        if tensor is not None and tuple(tensor.shape) != wanted:
            raise ArgumentError(field, describe(tensor), f"{list(wanted)}")
    if not bool(scale.isfinite().all()) or not bool(scale.to(torch.float32).isfinite().all()):
        raise ArgumentError("weight_scale", "NaN or infinity", "finite numbers of float32")
    qmin, qmax = code_type(bits).range
    for field, tensor in (("weight", codes), ("weight_zero_point", zero_point)):
        low, high = (0, 0) if tensor is None or not tensor.numel() else map(int, tensor.aminmax())
        if low < qmin or high > qmax:
            raise ArgumentError(field, f"numbers from {low} to {high}", f"{qmin} to {qmax} of {bits} bits")


def _order(group_of: torch.Tensor, groups: int, columns: int) -> torch.Tensor | None:
    """Columns sorted by their groups, or None where they lie so; every group has the same number of columns."""
    if tuple(group_of.shape) != (columns,):
        raise ArgumentError("g_idx", describe(group_of), f"[{columns}], a group for each column")
    if columns and not 0 <= int(group_of.min()) <= int(group_of.max()) < groups:
        got = f"groups from {int(group_of.min())} to {int(group_of.max())}"
        raise ArgumentError("g_idx", got, f"0 to {groups - 1}, as there are scales")
    counts = torch.bincount(group_of.to(torch.int64), minlength=groups)
    if groups == 0 or bool((counts * groups != columns).any()):
        sizes = f"groups of {int(counts.min())} to {int(counts.max())} columns" if groups else "no groups"
        raise ArgumentError("g_idx", sizes, "groups of one size")
    order = torch.argsort(group_of, stable=True)
    return None if torch.equal(order, torch.arange(columns, device=order.device)) else order


def _spread(numbers: torch.Tensor, columns: int) -> torch.Tensor:
    """One number a column of those of a tensor [1], or of groups [N, G]."""
    if numbers.dim() == 1:
        return numbers.reshape(1, 1)
    return numbers.repeat_interleave(max(columns // max(numbers.shape[1], 1), 1), 1) if columns else numbers[:, :0]


def whole(words: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    """A whole number of a config. Raises CheckpointError naming it."""
    value = words.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not -(2**31) < value < 2**31):
        raise CheckpointError(f"quantization_config: {key} is {str(value)[:80]!r}; allowed: a whole number")
    return value


def flag(words: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false of a config. Raises CheckpointError naming it."""
    value = words.get(key, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"quantization_config: {key} is {str(value)[:80]!r}; allowed: true or false")
    return value


def owned_by(source: Iterable[str], mark: str, suffixes: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """{layer: its tensors} of the layers that have a tensor `mark`, of the names of a source.

    Raises CheckpointError for a tensor of a layer that is none of `suffixes`.
    """
    owned: dict[str, set[str]] = {n.rpartition(".")[0]: set() for n in source if n.endswith(f".{mark}")}
    for key in source:
        layer, _, suffix = key.rpartition(".")
        if layer in owned:
            if suffix not in suffixes:
                raise CheckpointError(f"layer '{layer}': tensor '{suffix}'; allowed: {', '.join(suffixes)}")
            owned[layer].add(key)
    return {name: frozenset(keys) for name, keys in owned.items()}


def refused(key: str, got: object, allowed: str) -> CheckpointError:
    """What a config says and must not."""
    return CheckpointError(f"quantization_config: {key}: got {repr(got)[:120]}; allowed: {allowed}")
