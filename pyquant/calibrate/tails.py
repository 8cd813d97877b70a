"""How many magnitudes exceed a threshold, and their sum and sum of squares: all the search methods need of the data.

Two sources answer alike, for R rows at once: a histogram of floating bins (one row; numbers spread evenly within a bin,
bin 0 is zero) and sorted rows of weights (exact). All arithmetic is float64, and every answer for data scaled by a
power of two is the scaled answer, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from pyquant.numerics.histogram import BINS, MANTISSA_BITS, first_key, magnitude_edges
from pyquant.numerics.qparams import divisor

_NARROWEST = 1 + 2.0**-40  # of a bin, end over beginning: its width is a divisor


class Tails(ABC):
    """Magnitudes of R rows, reduced to sums over those above a threshold. count, square: float64 [R, 1], how many
    numbers there are (zeros included), and the sum of their squares."""

    count: Tensor
    square: Tensor

    @abstractmethod
    def above(self, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """(how many, their sum) of the magnitudes above float64 thresholds [R, n] >= 0 -> float64 [R, n] each."""

    @abstractmethod
    def square_above(self, thresholds: Tensor) -> Tensor:
        """Sum of squares of the magnitudes above float64 thresholds [R, n] -> float64 [R, n]."""

    @abstractmethod
    def quantile(self, at_most: Tensor) -> Tensor:
        """Smallest magnitude that at least `at_most` (float64 [R, 1], 0 to count) numbers do not exceed; [R, 1]."""


class Distribution:
    """What the search methods see of the data: the exact range (low, high: float64 [R, 1]), widened to contain 0,
    and the magnitudes of either sign (the zeros belong to one of them) and all together, each made when it is asked
    for: rows of weights are sorted for it."""

    def __init__(
        self,
        low: Tensor,
        high: Tensor,
        negative: Callable[[], Tails],
        positive: Callable[[], Tails],
        magnitudes: Callable[[], Tails],
    ) -> None:
        self.low, self.high = low, high
        self._negative, self._positive, self._magnitudes = negative, positive, magnitudes

    @cached_property
    def negative(self) -> Tails:
        """Magnitudes of the numbers below zero."""
        return self._negative()

    @cached_property
    def positive(self) -> Tails:
        """Numbers above zero."""
        return self._positive()

    @cached_property
    def magnitudes(self) -> Tails:
        """Magnitudes of all numbers."""
        return self._magnitudes()

    @property
    def amax(self) -> Tensor:
        """Largest magnitude, float64 [R, 1]."""
        return torch.maximum(-self.low, self.high)


class HistogramTails(Tails):
    """The magnitudes of one histogram row: counts int64 [BINS], as numerics.magnitude_histogram makes them, the
    exponent of the window, the largest magnitude (float64 []), where the last bin in use ends, and one that none is
    below, where the first begins: numbers that are all the same are no spread."""

    def __init__(self, counts: Tensor, exponent: int, largest: Tensor, smallest: Tensor) -> None:
        n = counts.to(torch.float64)
        edges = magnitude_edges(exponent).to(counts.device)
        self._first_key = first_key(exponent)
        # The last bin in use ends at the largest number, so that none exceeds it, even where the bin begins there.
        self._end = torch.minimum(edges[1:], torch.where(largest > 0, largest, torch.inf))
        self._end[0] = 0.0
        begins = torch.maximum(edges[:-1], smallest)
        self._begin = torch.minimum(begins, self._end / divisor(_NARROWEST, self._end))
        self._in_bin = n
        begin, end = self._begin, self._end
        self._count = _from_here_on(n)
        self._sum = _from_here_on(n * (begin + end) / 2)
        self._square = _from_here_on(n * (begin * begin + begin * end + end * end) / divisor(3, n))
        self.count, self.square = self._count[:1, None], self._square[:1, None]

    def above(self, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        j, part, t = self._locate(thresholds)
        return self._count[j + 1] + part, self._sum[j + 1] + part * (self._end[j] + t) / 2

    def square_above(self, thresholds: Tensor) -> Tensor:
        j, part, t = self._locate(thresholds)
        end = self._end[j]
        return self._square[j + 1] + part * (end * end + end * t + t * t) / divisor(3, t)

    def quantile(self, at_most: Tensor) -> Tensor:
        up_to = self.count[0] - self._count[1:]  # numbers in bins 0 .. j, ascending
        j = torch.searchsorted(up_to, at_most).clamp_max(BINS - 1)
        inside = at_most - (up_to[j] - self._in_bin[j])
        share = (inside / self._in_bin[j].clamp_min(1)).clamp(0, 1)
        return self._begin[j] + (self._end[j] - self._begin[j]) * share

    def _locate(self, thresholds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(bin, numbers of that bin above, the threshold within the bin); bin 0 has nothing above itself."""
        keys = thresholds.view(torch.int64) >> (52 - MANTISSA_BITS)  # of float64, whose bias is 1023 instead of 127
        j = (keys - (self._first_key + (896 << MANTISSA_BITS)) + 1).clamp(1, BINS - 1)
        begin, end = self._begin[j], self._end[j]
        t = torch.minimum(torch.maximum(thresholds, begin), end)
        return j, self._in_bin[j] * ((end - t) / (end - begin)), t


class SortedTails(Tails):
    """The magnitudes (float [R, n], n > 0, any order, >= 0) of R rows of equal length, exactly."""

    def __init__(self, magnitudes: Tensor) -> None:
        self._sorted = magnitudes.to(torch.float64).sort(dim=-1).values
        self._sum = _from_here_on(self._sorted)
        self._square = _from_here_on(self._sorted * self._sorted)
        rows, n = magnitudes.shape
        self.count = torch.full([rows, 1], float(n), dtype=torch.float64, device=magnitudes.device)
        self.square = self._square[:, :1]

    def above(self, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        i = torch.searchsorted(self._sorted, thresholds.contiguous(), right=True)
        return (self._sorted.shape[-1] - i).to(torch.float64), self._sum.gather(-1, i)

    def square_above(self, thresholds: Tensor) -> Tensor:
        return self._square.gather(-1, torch.searchsorted(self._sorted, thresholds.contiguous(), right=True))

    def quantile(self, at_most: Tensor) -> Tensor:
        i = torch.ceil(at_most).to(torch.int64) - 1
        return self._sorted.gather(-1, i.clamp(0, self._sorted.shape[-1] - 1))


def _from_here_on(values: Tensor) -> Tensor:
    """[..., n + 1]: the sum of values[i:] at i, 0 at n."""
    sums = values.flip(-1).cumsum(-1).flip(-1)
    return torch.cat([sums, torch.zeros_like(sums[..., :1])], -1)
