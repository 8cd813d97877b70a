"""The rows of a bank of experts: sorted by expert, multiplied by the layers of their experts, and added up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from pyquant import ops
from pyquant.nn.linear_call import needs_derivative
from pyquant.nn.obstacles import is_watched
from pyquant.nn.qlinear import QLinear


@dataclass(frozen=True)
class Sorted:
    """The slots (token, j) of a routing, sorted by expert; slots of experts elsewhere come last.

    order   int64 [T * k]: of which slot, counted row by row, is each place.
    counts  how many slots each expert has; int64 [E] as part of a graph, which learns it when it runs.
    """

    order: Tensor
    counts: list[int] | Tensor

    @property
    def present(self) -> int:
        """Slots whose expert is here; in a graph all have a row."""
        return self.order.shape[0] if isinstance(self.counts, Tensor) else sum(self.counts)

    @staticmethod
    def of(ids: Tensor, experts: int, in_graph: bool = False) -> Sorted:
        """ids  int [T, k]. Waits for the device of `ids`, which knows how many rows each expert has, but in a graph."""
        flat = ids.reshape(-1).long()
        flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
        order = flat.argsort(stable=True)
        if in_graph:
            counts = flat.new_zeros(experts + 1).scatter_add(0, flat, torch.ones_like(flat))
            return Sorted(order, counts[:experts])
        return Sorted(order, torch.bincount(flat, minlength=experts + 1)[:experts].tolist())

    def tokens(self, slots: int) -> Tensor:
        """int64 [present]: the token of every slot, of which each token has so many."""
        return self.order[: self.present] // max(slots, 1)


def must_not_wait(x: Tensor) -> bool:
    """Whether nobody may ask the device for numbers now: its calls are captured into a graph, or the model is exported,
    for routings that nobody knows yet."""
    return torch.compiler.is_exporting() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def chosen(results: Iterator[Tensor], ids: Tensor, like: Tensor) -> Tensor:
    """[T * k, H]: of the results [T, H] of expert 0, 1, ... for all tokens, those of each token's own experts; zeros
    for experts elsewhere."""
    y = like.new_zeros(*ids.shape, like.shape[1])
    for e, result in enumerate(results):
        y = torch.where((ids == e).unsqueeze(-1), result.unsqueeze(1), y)
    return y.flatten(0, 1)


def multiply(layers: Sequence[nn.Module], x: Tensor, counts: Sequence[int], rows: Tensor | None = None) -> Tensor:
    """Rows sorted by expert, counts[e] of them for layers[e], each through the layer of its expert.

    rows   int64: which rows of x are meant, in this order; None: all of them, as they are.
    """
    work = [(layer, count) for layer, count in zip(layers, counts, strict=True) if count]
    if is_one_call([layer for layer, _ in work], x):
        return _in_one_call(work, x, rows)
    x = x if rows is None else x[rows]
    parts, begin = [], 0
    for layer, count in work:
        parts.append(layer(x[begin : begin + count]))
        begin += count
    if parts:
        return torch.cat(parts)
    last: Any = layers[-1]
    return x.new_zeros(0, last.out_features)


def is_one_call(layers: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether the layers can multiply rows of x in one call of the compiled library, with the bits of one call each:
    they are quantised alike, on the CPU, and nobody watches their calls or asks for derivatives."""
    if len(layers) < 2 or type(x) is not Tensor or x.device.type != "cpu" or not ops.native_available():
        return False
    if needs_derivative(x, None) or torch.is_autocast_enabled("cpu") or not _is_plain_run():
        return False
    first = layers[0]
    if not isinstance(first, QLinear):
        return False
    return all(type(m) is QLinear and m._is_direct and m._spec == first._spec and not is_watched(m) for m in layers)


def _in_one_call(work: Sequence[tuple[Any, int]], x: Tensor, rows: Tensor | None) -> Tensor:
    call: Callable[..., Tensor] = partial(
        torch.ops.pyquant._grouped_linear.default,
        packed=[layer._buffers["storage"] for layer, _ in work],
        rows=[count for _, count in work],
        spec=work[0][0]._spec,
        out_dtype=x.dtype,
    )
    return with_codes_of_tokens(call, work[0][0], x, rows)


def with_codes_of_tokens(call: Callable[..., Tensor], layer: QLinear, x: Tensor, rows: Tensor | None) -> Tensor:
    """call(rows of x, x_scale=, x_zero_point=): dynamic inputs are quantised before their rows are taken, as a token
    has the same codes for each of its experts."""
    inputs = layer.scheme.inputs
    if rows is None or inputs is None or not inputs.dynamic:
        return call(x if rows is None else x[rows])
    symmetric, limits = inputs.symmetric, inputs.code_range
    codes, scale, zero_point = ops.quantize_dynamic(x, "per_token", 0, symmetric, *limits)
    return call(codes[rows], x_scale=scale[rows], x_zero_point=None if symmetric else zero_point[rows])


def _is_plain_run() -> bool:
    """Whether Python itself is neither recorded nor transformed, and no hook waits for every module."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    return not (_module._global_forward_hooks or _module._global_forward_pre_hooks)


def added(y: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """float32 [T, H]: the weighted results of each token, added in the order of its slots.

    y      [S, H]: of the slots order[:S], in this order; slots beyond have no result and add nothing.
    """
    tokens, slots = weights.shape
    present, width = y.shape
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=order.device)
    place = place.view(tokens, slots)
    if present < order.numel():  # an expert elsewhere: a row of zeros stands for its result
        y = torch.cat([y, y.new_zeros(1, width)])
        place = place.clamp(max=present)
    terms = y[place].float() * weights.unsqueeze(-1).float()
    if not slots:
        return terms.new_zeros(tokens, width)
    total = terms[:, 0]
    for j in range(1, slots):
        total = total + terms[:, j]
    return total
