"""What a calibration run remembers of the data: ranges and histograms that stream, merge, save and load exactly.

Every statistic is independent of the order of the batches, and merging the halves of a data set gives that of the
whole, bit for bit; int64 counts do not saturate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyquant import numerics, ops
from pyquant.calibrate.tails import Distribution, HistogramTails
from pyquant.core.dtypes import FLOATS, describe
from pyquant.errors import ArgumentError, CalibrationError, NonFiniteError
from pyquant.numerics.histogram import BINS, EXPONENT_MIN


class RangeStatistics:
    """Smallest and largest number of all batches, and how many numbers there were.

    channel_axis  None: of the whole tensor. Otherwise one range for each index of that axis.
    low, high     float32, [] or [C], on the device of the data; None before the first batch.
    count         numbers seen, of all channels together.

    Source: docs/calibration.md 1.

    Example:
        >>> statistics = RangeStatistics()
        >>> statistics.observe(torch.tensor([1.0, -3.0])); statistics.observe(torch.tensor([2.0]))
        >>> statistics.low.item(), statistics.high.item(), statistics.count
        (-3.0, 2.0, 3)
    """

    def __init__(self, channel_axis: int | None = None) -> None:
        self.channel_axis = channel_axis
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self.count = 0

    def observe(self, x: Tensor) -> None:
        """Takes in one batch.

        x  float32, float16 or bfloat16, any shape; empty tensors change nothing.
        Raises ArgumentError for another type or a number of channels unlike before, NonFiniteError (and remembers
        nothing of the batch) for NaN or infinity.
        """
        rows = self.rows(x)
        if rows.numel() == 0:
            return
        low, high = torch.aminmax(rows, dim=1) if self.channel_axis is not None else torch.aminmax(rows)
        low, high = low.to(torch.float32), high.to(torch.float32)
        # One transfer from the device: whether all is finite (aminmax carries NaN), and the magnitudes.
        ends = torch.stack([low.reshape(-1), high.reshape(-1)]).tolist()
        if not all(-torch.inf < end < torch.inf for row in ends for end in row):
            index = (~x.isfinite()).nonzero()[0].tolist()
            raise NonFiniteError("x", f"{x[tuple(index)].item()} at {index}", "finite values")
        self._extend(low, high, rows.numel())
        self._count_bins(rows, [max(-a, b) for a, b in zip(*ends, strict=True)])

    def merge(self, other: RangeStatistics) -> None:
        """Takes in what another statistics object of the same kind has seen.

        Raises ArgumentError for another kind, channel axis or number of channels.
        """
        if type(other) is not type(self) or other.channel_axis != self.channel_axis:
            raise ArgumentError("other", repr(other), f"{type(self).__name__} with channel_axis={self.channel_axis}")
        if other.low is None or other.high is None:
            return
        if self.low is not None and self.low.shape != other.low.shape:
            raise ArgumentError("other", f"{other.low.numel()} channels", f"{self.low.numel()} channels")
        self._extend(other.low, other.high, other.count)
        self._merge_bins(other)

    def amax(self) -> Tensor:
        """Largest absolute value, float32 [] or [C]. Raises CalibrationError before the first batch."""
        low, high = self.range()
        return torch.maximum(-low, high).clamp_min(0)

    def range(self) -> tuple[Tensor, Tensor]:
        """(low, high) float32 [] or [C]. Raises CalibrationError before the first batch."""
        if self.low is None or self.high is None:
            raise CalibrationError("these statistics have seen no data: run a calibration first")
        return self.low, self.high

    def state_dict(self) -> dict[str, Tensor]:
        """Everything as plain tensors; load_state_dict() of a new object goes on from there."""
        state = {"count": torch.tensor(self.count, dtype=torch.int64, device="cpu")}
        if self.low is not None and self.high is not None:
            state |= {"low": self.low.clone(), "high": self.high.clone()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Becomes what state_dict() described. Raises ArgumentError for missing, unknown or ill-shaped entries."""
        names = {"count", *(self._STATE if int(state.get("count", torch.tensor(0, device="cpu"))) else ())}
        if set(state) != names:
            raise ArgumentError("state", sorted(state), sorted(names))
        low, high = state.get("low"), state.get("high")
        if low is not None and high is not None:
            dims = 0 if self.channel_axis is None else 1
            for name, end in (("low", low), ("high", high)):
                if end.dtype != torch.float32 or end.dim() != dims or end.shape != low.shape:
                    raise ArgumentError(f"state[{name!r}]", f"{end.dtype} {list(end.shape)}", f"float32 of {dims} dim")
        self.count = int(state["count"])
        self.low = None if low is None else low.clone()
        self.high = None if high is None else high.clone()

    def reduce_(self, process_group: Any = None) -> None:
        """Every process of a data-parallel job ends with the statistics of all; call it once, after the last batch.

        process_group  as torch.distributed takes it; None for the default group. Processes that saw no data take part.
        Raises CalibrationError when torch.distributed is not initialised.
        """
        self._reduce(_Group(process_group))

    def to(self, device: torch.device | str) -> RangeStatistics:
        """Moves the tensors; returns itself."""
        if self.low is not None and self.high is not None:
            self.low, self.high = self.low.to(device), self.high.to(device)
        return self

    def rows(self, x: Tensor) -> Tensor:
        """A batch as [channels, numbers] (one channel without an axis), without a copy where that can be.

        Raises ArgumentError for another type, a missing axis or a number of channels unlike before.
        """
        if not isinstance(x, Tensor) or x.dtype not in FLOATS:
            raise ArgumentError("x", describe(x), "a float32, float16 or bfloat16 tensor")
        x = x.detach()
        if self.channel_axis is None:
            return x.reshape(1, -1)
        if not -x.dim() <= self.channel_axis < x.dim():
            raise ArgumentError("x", f"{list(x.shape)}", f"a dimension {self.channel_axis}, the channel axis")
        rows = x.movedim(self.channel_axis, 0).flatten(1) if x.dim() > 1 else x[:, None]
        if self.low is not None and rows.shape[0] != self.low.numel():
            raise ArgumentError("x", f"{rows.shape[0]} channels", f"{self.low.numel()} channels, as before")
        return rows

    def __repr__(self) -> str:
        axis = "" if self.channel_axis is None else f"channel_axis={self.channel_axis}, "
        return f"{type(self).__name__}({axis}count={self.count})"

    # ---- what HistogramStatistics adds to

    _STATE: tuple[str, ...] = ("low", "high")

    def _count_bins(self, rows: Tensor, amax: list[float]) -> None: ...

    def _merge_bins(self, other: RangeStatistics) -> None: ...

    def _extend(self, low: Tensor, high: Tensor, count: int) -> None:
        if self.low is None or self.high is None:
            self.low, self.high = low.clone(), high.clone()
        else:
            self.low = torch.minimum(self.low.to(low.device), low)
            self.high = torch.maximum(self.high.to(high.device), high)
        self.count += count

    def _reduce(self, group: _Group) -> None:
        channels = group.largest(torch.tensor([-1 if self.low is None else self.low.numel()], device="cpu"))
        if channels.item() < 0:
            return
        shape = [] if self.channel_axis is None else [int(channels.item())]
        if self.low is None or self.high is None:
            low = torch.full(shape, torch.inf, dtype=torch.float32, device="cpu")
            high = -low
        else:
            low, high = self.low, self.high
        self.low, self.high = -group.largest(-low), group.largest(high)
        self.count = int(group.total(torch.tensor([self.count], device="cpu")).item())


class HistogramStatistics(RangeStatistics):
    """Ranges, and the histogram of magnitudes over floating bins (numerics.magnitude_histogram).

    counts    int64 [C, 2, BINS] (C = 1 for whole tensors): negative and positive numbers apart; 320 KiB a channel.
    exponent  int64 on the CPU [C]: the window of channel c ends at 2^exponent[c].

    Source: docs/calibration.md 1.

    Example:
        >>> statistics = HistogramStatistics()
        >>> statistics.observe(torch.tensor([1.5, -3.0, 0.0]))
        >>> statistics.counts.sum(-1).tolist(), statistics.exponent.tolist()
        ([[1, 2]], [2])
    """

    _STATE = ("low", "high", "counts", "exponent")

    def __init__(self, channel_axis: int | None = None) -> None:
        super().__init__(channel_axis)
        self.counts: Tensor | None = None
        self.exponent = torch.empty(0, dtype=torch.int64, device="cpu")

    def channels(self) -> list[HistogramStatistics]:
        """One whole-tensor view a channel (itself where there are no channels). CalibrationError before any data."""
        low, high = self.range()
        if self.channel_axis is None or self.counts is None:
            return [self]
        views = []
        for c in range(low.numel()):
            view = HistogramStatistics()
            view.low, view.high, view.count = low[c], high[c], int(self.counts[c].sum())
            view.counts, view.exponent = self.counts[c : c + 1], self.exponent[c : c + 1]
            views.append(view)
        return views

    def short_rows(self, longest: int) -> Tensor | None:
        """The numbers themselves, float [R, n], where they are kept and a row has at most so many; of data: None."""
        return None

    def distribution(self) -> Distribution:
        """What the search methods ask of whole-tensor statistics. Raises CalibrationError before the first batch."""
        low, high = (end.to(torch.float64) for end in self.range())
        smallest = torch.maximum(low, -high).clamp_min(0)  # where all numbers have one sign
        low, high = low.clamp_max(0), high.clamp_min(0)
        counts, exponent = self._bins[0], int(self.exponent[0])
        parts = ((counts[0], -low), (counts[1], high), (counts.sum(0), torch.maximum(-low, high)))
        tails = (partial(HistogramTails, part, exponent, largest, smallest) for part, largest in parts)
        return Distribution(low.reshape(1, 1), high.reshape(1, 1), *tails)

    def state_dict(self) -> dict[str, Tensor]:
        state = super().state_dict()
        if self.counts is not None:
            state |= {"counts": self.counts.clone(), "exponent": self.exponent.clone()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        counts, exponent = state.get("counts"), state.get("exponent")
        if counts is None or exponent is None or self.low is None:
            self.counts, self.exponent = None, torch.empty(0, dtype=torch.int64, device="cpu")
            return
        shape = [self.low.numel(), 2, BINS]
        if counts.dtype != torch.int64 or list(counts.shape) != shape:
            raise ArgumentError("state['counts']", f"{counts.dtype} {list(counts.shape)}", f"int64 {shape}")
        if int(counts.min()) < 0 or int(counts.sum()) != self.count:
            raise ArgumentError("state['counts']", f"a sum of {int(counts.sum())}", f"counts that add to {self.count}")
        self.counts, self.exponent = counts.clone(), exponent.to("cpu", torch.int64, copy=True)

    def to(self, device: torch.device | str) -> HistogramStatistics:
        super().to(device)
        self.counts = None if self.counts is None else self.counts.to(device)
        return self

    def _count_bins(self, rows: Tensor, amax: list[float]) -> None:
        self._widen([numerics.magnitude_exponent(a) for a in amax], rows.device)
        for c, exponent in enumerate(self.exponent.tolist()):
            self._bins[c] += ops.magnitude_histogram(rows[c], exponent)

    def _merge_bins(self, other: RangeStatistics) -> None:
        if not isinstance(other, HistogramStatistics) or other.counts is None:
            raise ArgumentError("other", repr(other), "statistics with a histogram")
        self._widen(other.exponent.tolist(), other.counts.device)
        ahead = self.exponent - other.exponent
        for c, octaves in enumerate(ahead.tolist()):
            self._bins[c] += numerics.widen_histogram(other.counts[c], octaves)

    @property
    def _bins(self) -> Tensor:
        if self.counts is None:
            raise CalibrationError("these statistics have seen no data: run a calibration first")
        return self.counts

    def _widen(self, exponents: list[int], device: torch.device) -> None:
        """Lets every window end at least where `exponents` says; the counts live on `device` from here on."""
        if self.counts is None:
            self.counts = torch.zeros(len(exponents), 2, BINS, dtype=torch.int64, device=device)
            self.exponent = torch.tensor(exponents, device="cpu").clamp_min(EXPONENT_MIN)
            return
        self.counts = self.counts.to(device)
        exponent = torch.maximum(self.exponent, torch.tensor(exponents, device="cpu"))
        for c, octaves in enumerate((exponent - self.exponent).tolist()):
            if octaves:
                self.counts[c] = numerics.widen_histogram(self.counts[c], octaves)
        self.exponent = exponent

    def _reduce(self, group: _Group) -> None:
        super()._reduce(group)
        if self.low is None:
            return
        channels = self.low.numel()
        none = torch.full([channels], EXPONENT_MIN, dtype=torch.int64, device="cpu")
        mine = none if self.counts is None else self.exponent
        self._widen(group.largest(mine).tolist(), self.low.device)
        self.counts = group.total(self._bins)


class _Group:
    """The reductions of torch.distributed that statistics need, on a device that the back end can use."""

    def __init__(self, process_group: Any) -> None:
        import torch.distributed as distributed  # only data-parallel jobs need it

        if not (distributed.is_available() and distributed.is_initialized()):
            raise CalibrationError("reduce_ needs torch.distributed.init_process_group() before")
        self._distributed, self._group = distributed, process_group
        on_gpu = distributed.get_backend(process_group) == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

        operations = distributed.ReduceOp
        self.largest, self.total = (partial(self._reduced, one) for one in (operations.MAX, operations.SUM))

    def _reduced(self, operation: Any, tensor: Tensor) -> Tensor:
        shared = tensor.to(self._device, copy=True)
        self._distributed.all_reduce(shared, operation, group=self._group)
        return shared.to(tensor.device)
