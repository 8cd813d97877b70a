"""The rows of a bank of experts: sorted by expert, multiplied by the layers of their experts, and added up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from pyquant import ops
from pyquant.errors import NativeLibraryError
from pyquant.nn.linear_call import needs_derivative
from pyquant.nn.obstacles import is_watched
from pyquant.nn.qlinear import QLinear
from pyquant.ops import plan

_ops = torch.ops.pyquant


@dataclass(frozen=True)
class Split:
    """Whose rows are whose, where rows are sorted by expert.

    ends    int32 [experts], on the rows' device: where the rows of each end; rows from the last end on are no expert's.
    counts  how many rows each expert has; None: only the device knows.
    """

    ends: Tensor
    counts: list[int] | None

    @staticmethod
    def even(rows: int, experts: int, device: torch.device) -> Split:
        """As many rows for each."""
        each = rows // max(experts, 1)
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * each
        return Split(ends, [each] * experts)


@dataclass(frozen=True)
class Sorted:
    """The slots (token, j) of a routing, sorted by expert; slots of experts elsewhere come last.

    order  int64 [T * k]: of which slot, counted row by row, is each place.
    ends   as of Split. Nothing has waited for the device that knows them.
    """

    order: Tensor
    ends: Tensor

    @staticmethod
    def of(ids: Tensor, experts: int) -> Sorted:
        """ids  int [T, k]."""
        flat = ids.reshape(-1)
        flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
        owner, order = flat.sort(stable=True)
        next_one = torch.arange(1, experts + 1, dtype=flat.dtype, device=flat.device)
        return Sorted(order, torch.searchsorted(owner, next_one, out_int32=True))

    def split(self) -> Split:
        """With the number of rows of each expert: waits for the device."""
        ends = self.ends.tolist()
        return Split(self.ends, [end - begin for begin, end in zip([0, *ends], ends, strict=False)])

    def tokens(self, slots: int, present: int | None = None) -> Tensor:
        """int64 [present, or T * k]: the token of every slot, of which each token has so many."""
        return self.order[:present] // max(slots, 1)


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


def multiply(layers: Sequence[nn.Module], x: Tensor, split: Split, rows: Tensor | None = None) -> Tensor:
    """Rows sorted by expert, each through the layer of its expert.

    split  whose rows are whose; without counts is_one_call(layers, x) holds on a GPU, and rows of no expert give zeros.
    rows   int64: which rows of x are meant, in this order; None: all of them, as they are.
    """
    if split.counts is None:
        return _in_one_call(layers, x, split.ends, rows)
    work = [(layer, count) for layer, count in zip(layers, split.counts, strict=True) if count]
    here = [layer for layer, _ in work]
    if is_one_call(here, x):
        if is_on_gpu(x):  # which is told of all
            return _in_one_call(layers, x, split.ends, rows)
        ends = torch.tensor([count for _, count in work], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return _in_one_call(here, x, ends, rows)
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
    they are quantised alike, nobody watches their calls or asks for derivatives, and on a GPU a kernel takes them."""
    if len(layers) < 2 or type(x) is not Tensor or not ops.native_available():
        return False
    on_gpu = is_on_gpu(x)
    if not on_gpu and x.device.type != "cpu":
        return False
    if needs_derivative(x, None) or torch.is_autocast_enabled(x.device.type) or not _is_plain_run():
        return False
    first = layers[0]
    if not isinstance(first, QLinear):
        return False
    if not all(type(m) is QLinear and m._is_direct and m._spec == first._spec and not is_watched(m) for m in layers):
        return False
    return not on_gpu or _kernel_takes(first._spec, len(layers), x.dtype, x.device)


def with_codes_of_tokens(call: Callable[..., Tensor], layer: QLinear, x: Tensor, rows: Tensor | None) -> Tensor:
    """call(rows of x, x_scale=, x_zero_point=): dynamic inputs are quantised before their rows are taken, as a token
    has the same codes for each of its experts."""
    inputs = layer.scheme.inputs
    if rows is None or inputs is None or not inputs.dynamic:
        return call(x if rows is None else x[rows])
    symmetric, limits = inputs.symmetric, inputs.code_range
    codes, scale, zero_point = ops.quantize_dynamic(x, "per_token", 0, symmetric, *limits)
    return call(codes[rows], x_scale=scale[rows], x_zero_point=None if symmetric else zero_point[rows])


@lru_cache(maxsize=1024)
def _kernel_takes(spec: tuple[int, ...], experts: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the plan has a kernel for so many layers of a spec in one launch."""
    try:
        found = plan.select(ops.LinearSpec.from_ints(spec), 1, dtype, plan.Device.of(device), experts=experts)
    except NativeLibraryError:
        return False
    return found.kernel is not None


def is_on_gpu(x: Tensor) -> bool:
    """Whether CUDA kernels multiply it."""
    return x.is_cuda


def _in_one_call(layers: Sequence[Any], x: Tensor, ends: Tensor, rows: Tensor | None) -> Tensor:
    packed = [layer._buffers["storage"] for layer in layers]
    y: Tensor = _ops._grouped_linear.default(x, packed, ends, layers[0]._spec, rows, out_dtype=x.dtype)
    return y


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
