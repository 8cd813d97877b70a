"""'entropy': the range whose codes keep the distribution best, by the Kullback-Leibler divergence.

The classical method; docs/calibration.md 2.3 defines it. Unlike in the well-known implementations bins are cut from the
whole data, and the search begins at K bins, and is repeated over a smaller range where outliers leave the core of the
data few bins. With prefix sums a candidate costs K look-ups, so all of them are one small table.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pyquant.calibrate.registry import Range, calibrator
from pyquant.calibrate.statistics import HistogramStatistics
from pyquant.calibrate.tails import Tails
from pyquant.core.scheme import TensorScheme
from pyquant.numerics.passes import at_once

BINS = 2048
PER_BIN = 64  # numbers a bin on average, where that leaves enough bins: fewer are noise, not a shape
FEW_CODES = 8  # of which one is to hold a shape: see bins_for
ZOOM_BELOW = 3 / 8
ZOOMS = 10
_TINY = 1e-300
_AT_ONCE = 12288  # table entries: they stay in the cache, and no new memory has to be faulted in


@calibrator("entropy")
def entropy(statistics: HistogramStatistics, scheme: TensorScheme) -> Range:
    """The range with the least KL divergence; see the module for the definition. Affine schemes search either sign
    on its own: with all codes where there is one sign only, else with half of them. Source: docs/calibration.md 2.3."""
    data = statistics.distribution()
    qmin, qmax = scheme.code_range
    if scheme.symmetric:
        return Range.symmetric(search(data.magnitudes, data.amax, qmax + 1)[:, 0])
    codes = qmax - qmin + 1
    one_signed = (data.low == 0) | (data.high == 0)
    low, high = torch.zeros_like(data.low), torch.zeros_like(data.high)
    for rows, k in ((one_signed, codes), (~one_signed, codes // 2)):
        if bool(rows.any()):
            low = torch.where(rows, search(data.negative, -data.low, k), low)
            high = torch.where(rows, search(data.positive, data.high, k), high)
    return Range((0 - low[:, 0]).to(torch.float32), high[:, 0].to(torch.float32))


def bins_for(count: float, codes: int) -> int:
    """Linear bins for so many numbers: a power of two from 256 or 4 a code to BINS.

    BINS for few codes, noise or not: of 256 bins the negative side of a SiLU or GELU, most of its numbers, fills ten.
    Eight codes of a bin each keep that exactly, and a range that clips all else would have the least divergence.
    """
    if codes <= FEW_CODES and count >= BINS:
        return BINS
    bins = 2 ** int(math.log2(max(count / PER_BIN, 1)))
    return max(min(bins, BINS), min(4 * codes, BINS), 256)


def search(side: Tails, largest: Tensor, codes: int) -> Tensor:
    """The magnitude that the entropy method clips at, float64 [R, 1], for the magnitudes of R rows, the largest of
    each (float64 [R, 1]; rows of 0 give 0) and K codes of that sign, zero included."""
    bins = bins_for(float(side.count[0]), codes)
    limit = torch.where(largest > 0, largest, 1.0)
    best = limit.clone()
    active = torch.ones_like(limit, dtype=torch.bool)
    for _ in range(ZOOMS):
        counts, beyond = linear_counts(side, limit, bins)
        divergence = divergences(counts, beyond, codes)
        i = bins - divergence.flip(-1).argmin(-1, keepdim=True)
        best = torch.where(active & divergence.isfinite().any(-1, keepdim=True), limit * i / bins, best)
        active = active & (i < ZOOM_BELOW * bins)
        halvings = torch.floor(torch.log2(2 * ZOOM_BELOW * bins / i.double()))
        if not bool(active.any()):
            break
        limit = torch.where(active, limit * torch.exp2(-halvings), limit)
    return torch.where(largest > 0, torch.minimum(best, largest), 0.0)


def linear_counts(side: Tails, limit: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Whole numbers of magnitudes in `bins` equal bins of [0, limit], and beyond; float64 [R, bins] and [R, 1]. The
    first bin, with the zeros, is overwritten by the second."""
    edges = torch.arange(1, bins + 1, dtype=torch.float64, device=limit.device) / bins
    up_to = torch.round(side.count - side.above(limit * edges)[0])
    counts = torch.diff(up_to, dim=-1, prepend=torch.zeros_like(limit))
    counts[:, 0] = counts[:, 1]
    return counts, side.count - up_to[:, -1:]


def divergences(counts: Tensor, beyond: Tensor, codes: int) -> Tensor:
    """KL(P || Q) of the candidates codes, ..., bins; infinite where Q misses what P has, and where more numbers lie
    beyond than within. counts float64 [R, bins] and, above the last bin, beyond float64 [R, 1]
    -> float64 [R, candidates]."""
    ends = _code_ends(codes, counts.shape[-1]).to(counts.device)  # [candidates, K + 1]
    sums = (_prefix(counts), _prefix((counts > 0).to(torch.float64)), _prefix(_xlogx(counts)))
    candidates = max(1, at_once(counts.device, _AT_ONCE) // (counts.shape[0] * (codes + 1)))
    return torch.cat([_divergences(counts, beyond, sums, some) for some in ends.split(candidates)], -1)


def _divergences(counts: Tensor, beyond: Tensor, sums: tuple[Tensor, Tensor, Tensor], ends: Tensor) -> Tensor:
    """divergences() of some candidates, from the sums of counts, of occupied bins and of p log p up to every bin."""
    upto, occupied, plogp = sums
    at = ends.reshape(1, -1).expand(counts.shape[0], -1)
    share, taken = (values.gather(1, at).view(-1, *ends.shape).diff() for values in (upto, occupied))
    log_level = (share / taken.clamp_min_(1)).clamp_min_(_TINY).log_()  # of Q in each occupied bin; empty shares: * 0
    i = ends[:, -1]
    inside = upto[:, i]
    outside = upto[:, -1:] + beyond - inside
    last = counts[:, i - 1]
    entropy_p = plogp[:, i] - _xlogx(last) + _xlogx(last + outside)
    cross = (share * log_level).sum(-1) + outside * log_level[..., -1]
    divergence = (entropy_p - cross) / (inside + outside) - (inside + outside).log() + inside.log()
    # Within one bin P and Q are the same: what clips most of the numbers may well be the least divergence, of one code.
    impossible = (inside == 0) | ((last == 0) & (outside > 0)) | (outside > inside)
    return torch.where(impossible, torch.inf, divergence)


@functools.lru_cache(maxsize=8)
def _code_ends(codes: int, bins: int) -> Tensor:
    """[candidates, K + 1]: code j of candidate i takes the bins ceil(j i / K) to ceil((j + 1) i / K) - 1."""
    i = torch.arange(codes, bins + 1, device="cpu")[:, None]
    j = torch.arange(codes + 1, device="cpu")
    return (j * i + codes - 1) // codes


def _prefix(values: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(values[:, :1]), values.cumsum(-1)], -1)


def _xlogx(x: Tensor) -> Tensor:
    return torch.special.xlogy(x, x)
