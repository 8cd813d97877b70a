"""Planted bugs: each one, put into the package, must be caught by a test of this folder (C05)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pyquant import numerics
from pyquant.calibrate import HistogramStatistics, first_batch, run, short_rows, statistics, tails, weights
from pyquant.calibrate.methods import entropy, mse, percentile
from pyquant.calibrate.registry import Range
from pyquant.core.registry import CALIBRATORS
from pyquant.core.scheme import TensorScheme
from pyquant.errors import PyquantError

sys.path.insert(0, str(Path(__file__).parent))
import test_contract
import test_first_batch
import test_methods
import test_run
import test_statistics
import test_weights

Patch = Callable[[pytest.MonkeyPatch], None]


def method(name: str, wrong: Callable[[Range], Range]) -> Patch:
    """Passes what a registered method returns through `wrong`."""
    found = CALIBRATORS.find(name)

    def function(*args: Any) -> Range:
        return wrong(found.function(*args))

    return lambda m: m.setitem(CALIBRATORS._entries, name, replace(found, function=function))


def twice(chosen: Range) -> Range:
    return Range(2 * chosen.low, 2 * chosen.high)


def roots(chosen: Range) -> Range:
    return Range(-(-chosen.low).sqrt(), chosen.high.sqrt())


def other_tail(side: Any, share: float, whole: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    return side.quantile(whole * (1 - share))[:, 0]


def across_channels(w: torch.Tensor, scheme: TensorScheme) -> tuple[torch.Tensor, list[int]]:
    size = scheme.group_size
    return (w.T.reshape(-1, size), [w.shape[0], w.shape[1] // size]) if size else _ROWS(w, scheme)


def children_only(self: torch.nn.Module) -> torch.nn.Module:
    for child in self.children():
        child.training = False
    return self


def lost_octaves(counts: torch.Tensor, octaves: int) -> torch.Tensor:
    wide = numerics.histogram.widen_histogram(counts, octaves)
    wide[..., 0] = counts[..., 0]
    return wide


def no_zero_rule(side: Any, limit: torch.Tensor, bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    edges = torch.arange(1, bins + 1, dtype=torch.float64) / bins
    up_to = torch.round(side.count - side.above(limit * edges)[0])
    return torch.diff(up_to, dim=-1, prepend=torch.zeros_like(limit)), side.count - up_to[:, -1:]


def rounds_down(side: Any, steps: torch.Tensor, codes: int) -> torch.Tensor:
    q = torch.arange(1, codes + 1, dtype=torch.float64)
    thresholds = steps[..., None] * q  # and not q - 1/2
    count, total = (a.view(thresholds.shape) for a in side.above(thresholds.flatten(-2)))
    s = steps[..., None]
    gained = (s * s) * (count * (2 * q - 1)).cumsum(-1) - (2 * s) * total.cumsum(-1)
    return side.square[..., None] + torch.cat([torch.zeros_like(s), gained], -1)


def known() -> dict[str, HistogramStatistics]:
    kind = "relu_gaussian"
    found = HistogramStatistics()
    for batch in test_methods.calib_data(kind)[:2]:
        found.observe(batch)
    normal = HistogramStatistics()
    for batch in test_methods.calib_data("gaussian")[:2]:
        normal.observe(batch)
    return {kind: found, "gaussian": normal}


def original_divergences(counts: torch.Tensor, beyond: torch.Tensor, codes: int) -> torch.Tensor:
    return _DIVERGENCES(counts, beyond, codes)


def one_more_bin(self: first_batch.FirstBatchHistogram, largest: float) -> tuple[float, int]:
    width, bins = _REACH(self, largest)
    return width, bins + 1


def whole_first_bin(counts: torch.Tensor, beyond: torch.Tensor, codes: int) -> torch.Tensor:
    counts[:, 0] = 262144.0
    return _DIVERGENCES(counts, beyond, codes)


def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows are rounded by the file that these bugs are planted in, not by the compiled library."""
    monkeypatch.setattr(mse, "least_squares_steps", short_rows.rounded_steps)


def rounds_rows_down(real: torch.Tensor, recip: torch.Tensor, qmin: int, qmax: int, out: torch.Tensor) -> None:
    torch.mul(real, recip, out=out)
    out.floor_().clamp_(qmin, qmax)


_REACH = first_batch.FirstBatchHistogram.reach
_DIVERGENCES = entropy.divergences
_ABOVE = tails.HistogramTails.above
_AFFINE = mse._affine_errors
_ROWS = weights._rows
_OBSERVE = statistics.RangeStatistics.observe


def unchecked(self: Any, x: torch.Tensor) -> None:
    _OBSERVE(self, x.nan_to_num(0.0, 0.0, 0.0))


BUGS: tuple[tuple[str, Patch, Callable[[], None]], ...] = (
    (
        "widening loses what falls below the window",
        lambda m: m.setattr(numerics, "widen_histogram", lost_octaves),
        lambda: test_contract.test_order_and_split_of_the_data_do_not_matter("percentile", "growing"),
    ),
    (
        "merging adds bins of different windows",
        lambda m: m.setattr(numerics, "widen_histogram", lambda c, o: c.clone()),
        lambda: test_contract.test_order_and_split_of_the_data_do_not_matter("mse", "growing"),
    ),
    (
        "the window is fixed by the first batch",
        lambda m: m.setattr(numerics, "magnitude_exponent", lambda amax: 2),
        lambda: test_contract.test_scaling_the_data_scales_the_result("mse", "normal"),
    ),
    (
        "the histogram ignores the octave",
        lambda m: m.setattr(
            statistics.ops, "magnitude_histogram", lambda x, e: numerics.magnitude_histogram(x.clamp(-1, 1), e)
        ),
        lambda: test_methods.test_affine_percentile_cuts_both_tails(),
    ),
    (
        "counts in 32 bits",
        lambda m: m.setattr(
            statistics.HistogramStatistics,
            "_merge_bins",
            lambda s, o: s.counts.copy_((s.counts + o.counts).to(torch.int32).long()),
        ),
        test_statistics.test_billions_of_numbers_are_counted_exactly,
    ),
    (
        "no check for NaN",
        lambda m: m.setattr(statistics.RangeStatistics, "observe", unchecked),
        lambda: test_contract.test_one_bad_number_raises_and_leaves_the_statistics_alone("max", torch.nan),
    ),
    (
        "zeros dominate the entropy",
        lambda m: m.setattr(entropy, "linear_counts", no_zero_rule),
        lambda: test_methods.test_half_zeros_do_not_ruin_the_entropy_search(known()),
    ),
    (
        "clipped numbers are forgotten by the reference",
        lambda m: m.setattr(entropy, "divergences", lambda c, b, k: original_divergences(c, torch.zeros_like(b), k)),
        lambda: test_methods.test_divergences_are_those_of_a_loop_over_bins(8, 3),
    ),
    (
        "the entropy search begins at 128",
        lambda m: m.setattr(
            entropy, "_code_ends", lambda k, b: torch.arange(max(k, 128), b + 1)[:, None] * torch.arange(k + 1) // k
        ),
        lambda: test_methods.test_divergences_are_those_of_a_loop_over_bins(8, 0),
    ),
    (
        "mse rounds down",
        lambda m: m.setattr(mse, "side_errors", rounds_down),
        lambda: test_weights.test_mse_is_at_most_what_a_dense_grid_finds(4, True, 512),
    ),
    (
        "mse of short rows rounds down",
        lambda m: (by_torch(m), m.setattr(short_rows, "_round", rounds_rows_down)),
        lambda: test_weights.test_mse_is_at_most_what_a_dense_grid_finds(4, True, 256),
    ),
    (
        "the polish of short rows takes the step of other codes",
        lambda m: (by_torch(m), m.setattr(short_rows, "_polished", lambda real, step, *limits: step * 1.02)),
        lambda: test_weights.test_short_rows_have_the_steps_of_the_tables(4, 128),
    ),
    (
        "mse only rounds, and never clips",
        lambda m: m.setattr(mse, "lowest", lambda codes, lost: 0.99),
        lambda: test_weights.test_mse_is_at_most_what_a_dense_grid_finds(4, True, 256),
    ),
    (
        "the codes of either sign are swapped",
        lambda m: m.setattr(mse, "_affine_errors", lambda d, s, n: _AFFINE(d, s, n).flip(-1)),
        lambda: test_methods.test_affine_mse_beats_every_range_of_a_grid(4, "skewed"),
    ),
    (
        "the percentile of the other tail",
        lambda m: m.setattr(percentile, "_quantile", other_tail),
        lambda: test_methods.test_affine_percentile_cuts_both_tails(),
    ),
    (
        "thresholds that are off by a bin",
        lambda m: m.setattr(tails.HistogramTails, "above", lambda s, t: _ABOVE(s, t * (1 + 2.0**-7))),
        test_methods.test_histogram_and_sorted_tails_agree,
    ),
    (
        "a result beyond the data",
        method("entropy", twice),
        lambda: test_contract.test_the_result_stays_within_the_data_and_contains_zero("entropy", "normal"),
    ),
    (
        "sqrt of the data in a method",
        method("max", roots),
        lambda: test_contract.test_scaling_the_data_scales_the_result("max", "normal"),
    ),
    (
        "one batch too many",
        lambda m: m.setattr(run, "range", lambda n: itertools.count(), raising=False),
        lambda: test_run.test_n_means_n(3),
    ),
    (
        "the flags of training stay as the run leaves them",
        lambda m: m.setattr(torch.nn.Module, "eval", children_only),
        test_run.test_eval_mode_and_no_gradients_inside_and_everything_as_before_outside,
    ),
    (
        "the end of the first batch begins a bin",
        lambda m: m.setattr(first_batch.FirstBatchHistogram, "reach", one_more_bin),
        lambda: test_first_batch.test_counts_are_those_of_a_loop(0, torch.float32),
    ),
    (
        "bins that follow every batch",
        lambda m: m.setattr(first_batch.FirstBatchHistogram, "reach", lambda s, largest: (largest / 2048, 2048)),
        lambda: test_first_batch.test_ranges_are_those_of_the_classical_tool("laplace", 1234),
    ),
    (
        "the classical bins begin with their zeros",
        lambda m: m.setattr(first_batch, "divergences", whole_first_bin),
        lambda: test_first_batch.test_ranges_are_those_of_the_classical_tool("relu_gaussian", 1234),
    ),
    (
        "groups across channels",
        lambda m: m.setattr(weights, "_rows", across_channels),
        lambda: test_weights.test_granularities_are_the_same_search_on_other_rows("max", 4, True),
    ),
)


@pytest.mark.parametrize(("name", "patch", "check"), BUGS, ids=[b[0].replace(" ", "_") for b in BUGS])
def test_the_bug_is_caught(name: str, patch: Patch, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        patch(m)
        with pytest.raises((AssertionError, pytest.fail.Exception, PyquantError)):
            check()
