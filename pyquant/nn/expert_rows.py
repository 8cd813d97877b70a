"""The rows of a bank of experts: sorted by expert, multiplied by the layers of their experts, and added up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from pyquant import ops
from pyquant.calibrate.padding import left_out, now
from pyquant.errors import UnsupportedError
from pyquant.nn.expert_kinds import CODES, WEIGHT_ONLY, by_kind, weight_only_operands
from pyquant.nn.linear_call import needs_derivative
from pyquant.nn.qlinear import QLinear
from pyquant.ops import one_launch
from pyquant.ops.one_launch import OneLaunch

_ops = torch.ops.pyquant
GROUPED: Final = (CODES, WEIGHT_ONLY)  # kinds of layers that the compiled library multiplies by in one call on a CPU


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

    split  whose rows are whose; without counts is_one_call holds on a GPU, and rows of no expert give zeros.
    rows   int64: which rows of x are meant, in this order; None: all of them, as they are.
    """
    if split.counts is None:
        return _grouped(layers, x, split.ends, rows)
    here: list[Any] = [layer for layer, count in zip(layers, split.counts, strict=True) if count]
    counts = [count for count in split.counts if count]
    if not here:
        last: Any = layers[-1]
        return x.new_zeros(0, last.out_features)
    if one_launch.is_on_gpu(x) and is_one_call(layers, x, sum(counts), rows is not None):
        return _grouped(layers, x, split.ends, rows)
    calls = _calls(here, x)
    if len(calls) == 1:
        with _padding_of(0, sum(counts)):
            return _in_one_call(here, x, counts, rows)
    if len(calls) == len(here) and rows is not None:
        x, rows = x[rows], None
    ends = [0, *accumulate(counts)]
    results: list[Tensor] = [x] * len(here)
    for places in calls:
        mine = x if rows is None else rows
        mine = torch.cat([mine[ends[i] : ends[i + 1]] for i in places])
        own = [counts[i] for i in places]
        taken = (mine, own, None) if rows is None else (x, own, mine)
        with _padding_of(ends[places[0]], ends[places[-1] + 1]):
            y = _in_one_call([here[i] for i in places], *taken)
        for i, part in zip(places, y.split(own), strict=True):
            results[i] = part
    return torch.cat(results)


def _padding_of(first: int, last: int) -> AbstractContextManager[None]:
    """Inside, what observes the one layer of these rows leaves their padding out; in calls of several nobody does."""
    if torch.compiler.is_compiling() or now().slots is None:
        return nullcontext()
    return left_out(now().part(first, last))


def _calls(layers: Sequence[nn.Module], x: Tensor) -> list[list[int]]:
    """The places of the layers that a call each multiplies by: on a CPU those of one kind are one call of the compiled
    library, with the bits of one call each."""
    if one_launch.is_on_gpu(x) or not _may_be_grouped(x):
        return [[place] for place in range(len(layers))]
    calls: list[list[int]] = []
    for kind, places in by_kind(layers).items():
        is_one = isinstance(kind, tuple) and kind[0] in GROUPED
        calls += [places] if is_one else [[place] for place in places]
    return calls


def _in_one_call(layers: Sequence[Any], x: Tensor, counts: Sequence[int], rows: Tensor | None) -> Tensor:
    """Rows of layers of one kind; each layer has some."""
    if len(layers) == 1:
        if getattr(layers[0], "_layouts", None) is not None:
            raise UnsupportedError(
                f"an expert's layer of which ranks hold shares ({layers[0].share}): gates and ups are parted; cut the "
                "bank with PyquantExpertParallel instead (docs/distributed.md)"
            )
        y: Tensor = layers[0](x if rows is None else x[rows])
        return y
    ends = torch.tensor(counts, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    return _grouped(layers, x, ends, rows)


def is_one_call(layers: Sequence[nn.Module], x: Tensor, rows: int, chooses_rows: bool = False) -> bool:
    """Whether a kernel of the GPU multiplies the rows of all these layers in one launch: they are quantised alike,
    nobody watches their calls or asks for derivatives, and nothing else is predicted to be quicker.

    rows          how many in all. Where nobody may wait for the device, one launch is taken whatever is quicker.
    chooses_rows  rows of x lie in another order.
    """
    if len(layers) < 2 or not one_launch.is_on_gpu(x) or not _may_be_grouped(x):
        return False
    found = one_launch_of(layers, rows, x.dtype, x.device, chooses_rows)
    return found.kernel is not None and (not found.why_not or must_not_wait(x))


def one_launch_of(
    layers: Sequence[Any], rows: int, dtype: torch.dtype, device: torch.device, chooses_rows: bool = False
) -> OneLaunch:
    """The kernel of a GPU that multiplies so many rows of layers in one launch, or what keeps it from that."""
    kinds = by_kind(layers)
    if len(kinds) > 1:
        return OneLaunch(None, "the layers differ in scheme, or their calls are watched")
    kind, first = next(iter(kinds)), layers[0]
    if not isinstance(kind, tuple) or kind[0] not in GROUPED:
        return OneLaunch(None, "the kernels that serve several experts in one launch multiply by integer weights")
    if kind[0] == CODES:
        return one_launch.of_codes(ops.LinearSpec.from_ints(first._spec), len(layers), rows, dtype, device)
    w, held = first.scheme.weights, [layer._buffers["storage"] for layer in layers]
    sizes = (first.out_features, first.in_features, w.bits, w.group_size or 0, first.weight_zero_point_ is not None)
    return one_launch.of_weight_only(held, *sizes, rows, dtype, device, chooses_rows)


def _may_be_grouped(x: Tensor) -> bool:
    """Whether this call may be one for several layers: the compiled library is there, Python itself is neither recorded
    nor transformed, no hook waits for every module, and nobody asks for derivatives or casts inputs."""
    if type(x) is not Tensor or not ops.native_available() or not (one_launch.is_on_gpu(x) or x.device.type == "cpu"):
        return False
    if needs_derivative(x, None) or torch.is_autocast_enabled(x.device.type):
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    return not (_module._global_forward_hooks or _module._global_forward_pre_hooks)


def with_codes_of_tokens(call: Callable[..., Tensor], layer: QLinear, x: Tensor, rows: Tensor | None) -> Tensor:
    """call(rows of x, x_scale=, x_zero_point=): dynamic inputs are quantised before their rows are taken, as a token
    has the same codes for each of its experts."""
    inputs = layer.scheme.inputs
    if rows is None or inputs is None or not inputs.dynamic:
        return call(x if rows is None else x[rows])
    symmetric, limits = inputs.symmetric, inputs.code_range
    codes, scale, zero_point = ops.quantize_dynamic(x, "per_token", 0, symmetric, *limits)
    return call(codes[rows], x_scale=scale[rows], x_zero_point=None if symmetric else zero_point[rows])


def _grouped(layers: Sequence[Any], x: Tensor, ends: Tensor, rows: Tensor | None) -> Tensor:
    """Layers of one kind in one call of the compiled library."""
    first = layers[0]
    if first._is_direct:
        packed = [layer._buffers["storage"] for layer in layers]
        y: Tensor = _ops._grouped_linear.default(x, packed, ends, first._spec, rows, out_dtype=x.dtype)
        return y
    w = first.scheme.weights
    how = (w.bits, w.group_size or 0, first.activation, *first.clamp)
    x, operands = one_launch.on_16_bytes(x), weight_only_operands(layers)
    together: Tensor = _ops._grouped_weight_only.default(x, *operands, ends, *how, rows)
    return together


def weights_here(weights: Tensor, here: Tensor) -> Tensor:
    """Routing weights [T, k] under which zeros stay zeros: where an expert is elsewhere (here, bool [T, k], is False)
    infinity and NaN are 1."""
    return torch.where(here | weights.isfinite(), weights, 1.0)


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
        weights = weights_here(weights, place < present)
    terms = y[place].float() * weights.unsqueeze(-1).float()
    if not slots:
        return terms.new_zeros(tokens, width)
    total = terms[:, 0]
    for j in range(1, slots):
        total = total + terms[:, j]
    return total
