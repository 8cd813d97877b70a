"""The histogram of the classical entropy calibrators: equal bins, as wide as a fraction of the first batch's range.

It depends on which batch comes first, so no registered method uses it (docs/calibration.md 2.3); EntropyCalibrator
does, for ranges equal to those of the tools that the tutorials describe.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyquant.calibrate.methods.entropy import BINS, divergences
from pyquant.errors import CalibrationError
from pyquant.numerics.qparams import divisor

MOST_BINS = 32 * BINS
_AT_ONCE = 1 << 20  # numbers that are widened to float64 at a time


class FirstBatchHistogram:
    """Magnitudes in 2048 equal bins up to the largest of the first batch that is not all zero, and further ones
    above.

    width   of a bin; 0 before there was a number other than 0.
    counts  int64 [bins], on the device of the data. A bin has its lower end; the last one of a batch both.
    Source: docs/calibration.md 2.3."""

    def __init__(self) -> None:
        self.width = 0.0
        self.counts = torch.zeros(BINS, dtype=torch.int64, device="cpu")

    def observe(self, x: Tensor) -> None:
        """Takes in one batch, float of any shape, finite. CalibrationError (nothing is remembered) for numbers 32
        times as large as the first batch's."""
        magnitudes = x.detach().abs().reshape(-1)
        if magnitudes.numel() == 0:
            return
        width, bins = self.reach(float(magnitudes.max()))
        counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
        counts[: self.counts.numel()] = self.counts.to(x.device)
        for part in magnitudes.split(_AT_ONCE):
            # Quotients of float32 numbers in float64: one that is not whole never rounds to a whole one.
            wide = part.to(torch.float64)
            index = (wide / divisor(width or 1.0, wide)).to(torch.int64).clamp_(max=bins - 1)
            counts += torch.bincount(index, minlength=bins)
        self.width, self.counts = width, counts

    def reach(self, largest: float) -> tuple[float, int]:
        """(width of a bin, how many bins) with a batch of that largest magnitude. CalibrationError for too many."""
        width = self.width or largest / BINS
        ratio = largest / width if width else 0.0
        if ratio > MOST_BINS:
            got = f"a number of {largest:g} after a first batch of at most {BINS * width:g}"
            reach = f"bins of the first batch's width reach {MOST_BINS // BINS} times as far"
            advice = "begin with a batch of the common size, or use grid='data', which does not depend on the first"
            raise CalibrationError(f"{got}: {reach}; {advice} batch")
        return width, max(self.counts.numel(), math.ceil(ratio))

    def entropy_amax(self, bits: int) -> Tensor:
        """The end of the bin that the search of entropy.divergences clips at, from 2^(bits - 1) bins on; float32 [],
        0 for zeros only. Source: docs/calibration.md 2.3."""
        counts = self.counts.to(torch.float64)[None]
        counts[:, 0] = counts[:, 1]  # the first bin holds the zeros
        divergence = divergences(counts, torch.zeros_like(counts[:, :1]), 2 ** (bits - 1))[0]
        end = counts.shape[-1] - int(divergence.flip(0).argmin())
        return torch.tensor(end * self.width, dtype=torch.float32, device=self.counts.device)
