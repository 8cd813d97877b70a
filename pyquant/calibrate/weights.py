"""Ranges of weights, from the weights themselves: a channel or group is a row, and all rows are searched at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from pyquant import numerics
from pyquant.calibrate.registry import Range, range_to_qparams
from pyquant.calibrate.short_rows import are_rounded
from pyquant.calibrate.statistics import HistogramStatistics, RangeStatistics
from pyquant.calibrate.tails import Distribution, SortedTails, Tails
from pyquant.core.dtypes import FLOATS, describe
from pyquant.core.registry import CALIBRATORS
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, NonFiniteError, SchemeError

_CHUNK: Final = 1 << 19  # weights searched at once: the tables of a search are some 20 times as large
_LOOKUPS: Final = 1 << 22  # and so many thresholds, some 512 for each code of each row
_MORE: Final = 8  # times of both on a GPU, where each part costs the launches of the whole search: 1 GiB
_SIDES: Final = (lambda x: (-x).clamp_min(0), lambda x: x.clamp_min(0), torch.abs)  # of a Distribution


class RowStatistics(HistogramStatistics):
    """Rows of weights (float [R, n], n > 0, finite) in the place of statistics: the same questions, answered
    exactly."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__(channel_axis=0)
        self._values = rows
        self.low, self.high = (end.to(torch.float32) for end in torch.aminmax(rows, dim=1))
        self.count = rows.numel()

    def short_rows(self, longest: int) -> Tensor | None:
        return self._values if self._values.shape[1] <= longest else None

    def distribution(self) -> Distribution:
        low, high = (end.to(torch.float64)[:, None] for end in self.range())
        return Distribution(low.clamp_max(0), high.clamp_min(0), *(partial(self._side, of) for of in _SIDES))

    def _side(self, magnitudes: Callable[[Tensor], Tensor]) -> Tails:
        return SortedTails(magnitudes(self._values.to(torch.float64)))


def weight_range(weight: Tensor, scheme: TensorScheme) -> Range:
    """The range of every scale of a weight matrix, by the scheme's calibrator.

    weight  float32, float16 or bfloat16 [N, K], finite, not empty.
    scheme  granularity per_tensor, per_channel or per_group; calibrator 'max', 'percentile', 'entropy' or 'mse'.
    ->      Range, float32 on the weight's device: [] (per_tensor), [N] (per_channel) or [N, K / group_size].
    Raises ArgumentError for a dtype, shape or calibrator, SchemeError for a granularity or a group size that does not
    divide K, NonFiniteError. Source: docs/calibration.md 3.

    Example:
        >>> weight_range(torch.tensor([[1.0, -2.0], [0.5, 0.25]]), TensorScheme(granularity="per_channel")).amax
        tensor([2.0000, 0.5000])
    """
    rows, shape = _rows(weight, scheme)
    method = CALIBRATORS.find(scheme.calibrator)
    if method.statistics not in (RangeStatistics, HistogramStatistics):
        raise ArgumentError("scheme.calibrator", repr(scheme.calibrator), "a method that looks at the weights")
    per_chunk, columns = rows.shape
    is_rounded = scheme.calibrator == "mse" and are_rounded(scheme, columns)  # which goes over its own parts
    if method.statistics is not RangeStatistics and not is_rounded:
        more = 1 if rows.device.type == "cpu" else _MORE
        per_chunk = max(1, min(more * _CHUNK // columns, more * _LOOKUPS >> (8 + scheme.bits)))
    parts = [method.function(RowStatistics(chunk), scheme) for chunk in rows.split(per_chunk)]
    return Range(*(torch.cat([part[end] for part in parts]).reshape(shape) for end in (0, 1)))


def weight_qparams(weight: Tensor, scheme: TensorScheme) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a weight matrix, by the scheme's calibrator; scales of two levels lie near those.

    weight, scheme, errors   as weight_range.     ->   float32 and int32 of the shape of its Range.

    Example:
        >>> scheme = TensorScheme(bits=4, granularity="per_group", group_size=2, two_level=True)
        >>> scale, _ = weight_qparams(torch.tensor([[7.0, 3.0, 0.5, 1.0]]), scheme)
        >>> (scale / scale.min()).tolist()
        [[6.0, 1.0]]
    """
    scale, zero_point = range_to_qparams(weight_range(weight, scheme), scheme)
    if scheme.two_level:
        scale = numerics.two_level_scales(weight.detach().to(torch.float32), scale, *scheme.code_range)
    return scale, zero_point


def _rows(weight: Tensor, scheme: TensorScheme) -> tuple[Tensor, list[int]]:
    """The weights that share a scale as rows, and the shape of the scales."""
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATS or weight.dim() != 2 or weight.numel() == 0:
        raise ArgumentError("weight", describe(weight), "float32, float16 or bfloat16 [N, K], not empty")
    weight = weight.detach()
    if not bool(weight.isfinite().all()):
        index = (~weight.isfinite()).nonzero()[0].tolist()
        raise NonFiniteError("weight", f"{weight[tuple(index)].item()} at {index}", "finite values")
    n, k = weight.shape
    if scheme.granularity == "per_tensor":
        return weight.reshape(1, -1), []
    if scheme.granularity == "per_channel":
        return weight, [n]
    if scheme.granularity != "per_group":
        raise SchemeError("granularity", repr(scheme.granularity), "'per_tensor', 'per_channel', 'per_group'")
    group = scheme.group_size or 0
    if group <= 0 or k % group:
        raise SchemeError("group_size", scheme.group_size, f"a divisor of K = {k}")
    return weight.reshape(-1, group), [n, k // group]
