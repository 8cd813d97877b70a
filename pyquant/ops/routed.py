"""Products of rows that are sorted by expert, for compiled graphs: how many rows each has is read when they run.

A graph has one node for all layers of one kind and a free number of rows for each. These ops are Python on every
device, so that they belong to torch.compile; where the counts are known before, pyquant.nn calls the layers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pyquant.errors import ArgumentError
from pyquant.ops import one_launch
from pyquant.ops.schema import ROUTED, TAGS
from pyquant.ops.spec import LinearSpec

_ops = torch.ops.pyquant


@dataclass(frozen=True)
class _Rows:
    """The rows of a call that its layers have: of the i-th layer, those in parts[i]."""

    parts: list[slice]
    is_all: bool  # whether these are the layers of all experts

    @staticmethod
    def of(x: Tensor, counts: Tensor, layers: int, experts: Sequence[int]) -> _Rows:
        """On a GPU this waits for the device, as eager mode does. Raises ArgumentError for counts that do not fit."""
        held: list[int] = counts.tolist()
        fits = len(held) == layers if not experts else len(experts) == layers and max(experts) < len(held)
        if not fits or min(held, default=0) < 0 or sum(held) > x.shape[0]:
            allowed = f"{layers} numbers from 0" if not experts else f"numbers from 0 of experts {list(experts)}"
            raise ArgumentError("counts", f"{held}", f"{allowed}, {x.shape[0]} in sum at most")
        ends = [0, *accumulate(held)]
        return _Rows([slice(ends[i], ends[i + 1]) for i in experts or range(layers)], not experts)

    def present(self) -> list[int]:
        """The layers that have rows."""
        return [i for i, part in enumerate(self.parts) if part.stop > part.start]

    def ends(self, layers: Sequence[int]) -> Tensor:
        """int32: where the rows of each of these layers end, one behind the other."""
        counts = [self.parts[i].stop - self.parts[i].start for i in layers]
        return torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)

    def taken(self, values: Tensor, layers: Sequence[int]) -> Tensor:
        """The rows of these layers, one behind the other."""
        return torch.cat([values[self.parts[i]] for i in layers])


def _each(rows: _Rows, out: Tensor, call: Callable[[int, slice], Tensor]) -> Tensor:
    """`out` with call(i, its rows) for every layer that has rows."""
    for i in rows.present():
        out[rows.parts[i]] = call(i, rows.parts[i])
    return out


def _together(rows: _Rows, out: Tensor, call: Callable[[list[int]], Tensor]) -> Tensor:
    """`out` with call(layers that have rows), whose results stand one behind the other."""
    present, begin = rows.present(), 0
    if present:
        y = call(present)
        for i in present:
            count = rows.parts[i].stop - rows.parts[i].start
            out[rows.parts[i]] = y[begin : begin + count]
            begin += count
    return out


def _blank(x: Tensor, columns: int, dtype: torch.dtype, others: Tensor | None) -> Tensor:
    """Results of all rows: those of other layers, and zeros."""
    return x.new_zeros(x.shape[0], columns, dtype=dtype) if others is None else others.clone()


def _are_all(layers: Sequence[Tensor], experts: Sequence[int], others: Tensor | None) -> bool:
    """Whether these are the layers of all experts, and more than one."""
    return len(layers) > 1 and not experts and others is None


def _ends_there(counts: Tensor) -> Tensor:
    """int32, on their device: where the rows of each layer end. Nobody waits for the numbers, so none is checked."""
    return counts.cumsum(0).to(torch.int32)


def _is_compiled(x: Tensor, name: str) -> bool:
    """Whether the compiled library multiplies by several layers in one call."""
    return x.device.type == "cpu" and torch._C._dispatch_has_kernel_for_dispatch_key(f"pyquant::{name}", "CPU")


def routed_linear(
    x: Tensor,
    counts: Tensor,
    packed: Sequence[Tensor],
    spec: Sequence[int],
    out_dtype: torch.dtype,
    x_scale: Tensor | None = None,
    x_zero_point: Tensor | None = None,
    experts: Sequence[int] = (),
    others: Tensor | None = None,
) -> Tensor:
    """qlinear of each layer's rows; with the compiled library in one call, on a GPU where it has a kernel for that."""
    per_row = (x_scale, x_zero_point)
    if one_launch.is_on_gpu(x) and _are_all(packed, experts, others):
        found = one_launch.of_codes(LinearSpec.from_ints(spec), len(packed), x.shape[0], out_dtype, x.device)
        if found.kernel is not None:
            operands = (x, list(packed), _ends_there(counts), spec, None, *per_row, out_dtype)
            return _ops._grouped_linear.default(*operands)  # type: ignore[no-any-return]
    rows = _Rows.of(x, counts, len(packed), experts)
    native = _is_compiled(x, "_grouped_linear")
    if native and rows.is_all and others is None:  # as the rows lie
        ends = counts.cumsum(0).to(torch.int32)
        y: Tensor = _ops._grouped_linear.default(x, list(packed), ends, spec, None, *per_row, out_dtype)
        return y
    out = _blank(x, spec[0], out_dtype, others)
    if native:

        def together(layers: list[int]) -> Tensor:
            given = [None if one is None else rows.taken(one, layers) for one in per_row]
            held = [packed[i] for i in layers]
            y: Tensor = _ops._grouped_linear.default(
                rows.taken(x, layers), held, rows.ends(layers), spec, None, *given, out_dtype
            )
            return y

        return _together(rows, out, together)

    def call(i: int, part: slice) -> Tensor:
        given = (None if one is None else one[part] for one in per_row)
        return _ops.qlinear.default(x[part], packed[i], None, spec, out_dtype, *given)  # type: ignore[no-any-return]

    return _each(rows, out, call)


def routed_weight_only(
    x: Tensor,
    counts: Tensor,
    w: Sequence[Tensor],
    w_scale: Sequence[Tensor],
    w_zero_point: Sequence[Tensor],
    bias: Sequence[Tensor],
    n: int,
    w_bits: int,
    group_size: int,
    activation: str,
    clamp_min: float,
    clamp_max: float,
    experts: Sequence[int] = (),
    others: Tensor | None = None,
) -> Tensor:
    """weight_only_linear of each layer's rows; with the compiled library in one call, on a GPU where it has a kernel
    for that and nothing else is quicker. No zero points, or no biases: []."""
    how = (w_bits, group_size, activation, clamp_min, clamp_max)
    if one_launch.is_on_gpu(x) and _are_all(w, experts, others):
        sizes = (n, x.shape[1], w_bits, group_size, bool(w_zero_point))
        found = one_launch.of_weight_only(w, *sizes, x.shape[0], x.dtype, x.device)
        if found.kernel is not None and not found.why_not:
            operands = (list(w), list(w_scale), list(w_zero_point), list(bias), _ends_there(counts))
            return _ops._grouped_weight_only.default(one_launch.on_16_bytes(x), *operands, *how)  # type: ignore[no-any-return]
    rows = _Rows.of(x, counts, len(w), experts)
    native, present = _is_compiled(x, "_grouped_weight_only"), rows.present()

    def together(x: Tensor, layers: list[int]) -> Tensor:
        operands = ([of[i] for i in layers] if of else [] for of in (w, w_scale, w_zero_point, bias))
        y: Tensor = _ops._grouped_weight_only.default(x, *operands, rows.ends(layers), *how)
        return y

    if native and rows.is_all and others is None and present:  # as the rows lie
        return together(x, present)
    out = _blank(x, n, x.dtype, others)
    if native:
        return _together(rows, out, lambda layers: together(rows.taken(x, layers), layers))

    def call(i: int, part: slice) -> Tensor:
        operands = (w[i], w_scale[i], _at(w_zero_point, i), _at(bias, i))
        y: Tensor = _ops.weight_only_linear.default(x[part], *operands, None, *how)
        return y

    return _each(rows, out, call)


def routed_float(
    x: Tensor,
    counts: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor],
    activation: str,
    clamp_min: float,
    clamp_max: float,
    out_dtype: torch.dtype,
    experts: Sequence[int] = (),
    others: Tensor | None = None,
) -> Tensor:
    """float_linear of each layer's rows; no biases: []."""
    fused = (activation, clamp_min, clamp_max)

    def call(i: int, part: slice) -> Tensor:
        y: Tensor = _ops.float_linear.default(x[part], w[i], _at(bias, i), None, *fused, out_dtype)
        return y

    rows = _Rows.of(x, counts, len(w), experts)
    return _each(rows, _blank(x, w[0].shape[0], out_dtype, others), call)


def routed_dense(
    x: Tensor,
    counts: Tensor,
    w: Sequence[Tensor],
    bias: Sequence[Tensor],
    experts: Sequence[int] = (),
    others: Tensor | None = None,
) -> Tensor:
    """torch's Linear of each layer's rows; no biases: []."""
    rows = _Rows.of(x, counts, len(w), experts)
    out = _blank(x, w[0].shape[0], x.dtype, others)
    return _each(rows, out, lambda i, part: F.linear(x[part], w[i], _at(bias, i)))


def _at(tensors: Sequence[Tensor], index: int) -> Tensor | None:
    return tensors[index] if tensors else None


def _shape_of_linear(x: Tensor, counts: Tensor, packed: Any, spec: Sequence[int], dtype: Any, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], spec[0], dtype=dtype)


def _shape_of_weight_only(x: Tensor, counts: Tensor, *operands: Any) -> Tensor:
    return x.new_empty(x.shape[0], operands[4])


def _shape_of_float(x: Tensor, counts: Tensor, w: Sequence[Tensor], *operands: Any) -> Tensor:
    return x.new_empty(x.shape[0], w[0].shape[0], dtype=operands[4])


def _shape_of_dense(x: Tensor, counts: Tensor, w: Sequence[Tensor], *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], w[0].shape[0])


_SERVED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "_routed_linear": (routed_linear, _shape_of_linear),
    "_routed_weight_only": (routed_weight_only, _shape_of_weight_only),
    "_routed_float": (routed_float, _shape_of_float),
    "_routed_dense": (routed_dense, _shape_of_dense),
}


def register(library: torch.library.Library) -> None:
    """Define and implement the ops. Their tag keeps CUDA graphs away: no graph can wait for the counts."""
    tags = [getattr(torch.Tag, name) for name in (*TAGS, "cudagraph_unsafe")]
    for name, (kernel, rule) in _SERVED.items():
        library.define(name + ROUTED[name], tags=tags)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pyquant::{name}", rule, lib=library)
