"""Every method against a plain float64 brute force of its definition, and against known data (docs/calibration.md)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyquant import calibrate, numerics
from pyquant.bench.calib import DATA, calib_data, mse_optimum, sqnr
from pyquant.calibrate import (
    EntropyCalibrator,
    HistogramStatistics,
    compare,
    compute_range,
    linear_histogram,
    range_to_qparams,
)
from pyquant.calibrate.methods import entropy
from pyquant.calibrate.tails import HistogramTails, SortedTails
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, CalibrationError

BIN = 2.0**-10

# amax on calib_data by other implementations, measured once: numpy quantiles bin edges (percentile), brute force (mse).
PERCENTILES = {
    99.0: (2.567607, 4.611746, 5.834229, 2.555938, 2.325747),
    99.9: (3.271593, 6.930358, 13.186548, 3.296789, 3.068604),
    99.99: (3.852490, 9.083355, 26.938660, 4.259896, 3.668936),
    99.999: (4.355647, 11.803266, 51.793667, 98.199860, 4.223919),
}
COARSE = (0.0022, 0.0064, 0.0299, 0.0372, 0.0022)  # width of a bin of the histograms behind those figures
OPTIMA = {
    8: (3.899908, 10.169722, 51.676018, 80.780263, 3.864891),
    4: (2.463927, 4.822242, 8.597586, 2.910865, 2.455618),
}
LARGEST = (4.748024, 14.219659, 160.890503, 120.657600, 4.748024)
# The classical search on 2048 bins of the first batch, first candidate 128 (int8).
CLASSICAL_DB = {8: (39.94, 34.97, 17.20, 6.94, 39.94), 4: (16.20, 14.88, 9.27, 6.35, 17.01)}


@pytest.fixture(scope="module")
def known() -> dict[str, HistogramStatistics]:
    found = {}
    for kind in DATA:
        found[kind] = HistogramStatistics()
        for batch in calib_data(kind):
            found[kind].observe(batch)
    return found


def amax(statistics: HistogramStatistics, **scheme: object) -> float:
    return float(compute_range(statistics, TensorScheme(**scheme)).amax)  # type: ignore[arg-type]


@pytest.mark.parametrize("i", range(len(DATA)), ids=DATA)
def test_the_table_of_known_data(known: dict[str, HistogramStatistics], i: int) -> None:
    statistics, x = known[DATA[i]], calib_data(DATA[i])
    assert amax(statistics, calibrator="max") == x.abs().max() == pytest.approx(LARGEST[i], abs=1e-6)
    magnitudes = x.abs().reshape(-1).double().sort().values
    for p, row in PERCENTILES.items():
        got = amax(statistics, calibrator="percentile", percentile=p)
        assert got == pytest.approx(row[i], abs=COARSE[i] + BIN * row[i])
        rank = math.ceil(p / 100 * x.numel()) - 1
        assert got == pytest.approx(float(magnitudes[rank]), rel=BIN)
    for bits, optima in OPTIMA.items():
        got = amax(statistics, calibrator="mse", bits=bits)
        assert got == pytest.approx(optima[i], rel=0.002)
        assert sqnr(x, got, bits) >= sqnr(x, optima[i], bits) - 1e-4
        got = amax(statistics, calibrator="entropy", bits=bits)
        assert sqnr(x, got, bits) >= CLASSICAL_DB[bits][i] - 0.35


def test_the_optimum_on_raw_numbers_is_that_of_the_plainest_loop() -> None:
    x = calib_data("laplace")[0, :2]
    amaxes = [float(x.abs().max()) * i / 300 for i in range(1, 301)]
    best = max(amaxes, key=lambda a: sqnr(x, a, 4))
    assert sqnr(x, mse_optimum(x, 4), 4) >= sqnr(x, best, 4)


# ---- entropy


def divergence(bins: list[float], i: int, codes: int) -> float:
    """KL of one candidate, the way the module's docstring tells it, one bin at a time."""
    total = sum(bins)
    if sum(bins[i:]) > sum(bins[:i]):
        return math.inf
    p = list(bins[:i])
    p[-1] += sum(bins[i:])
    q = [0.0] * i
    for code in range(codes):
        own = [b for b in range(i) if b * codes // i == code and bins[b] > 0]
        for b in own:
            q[b] = sum(bins[c] for c in own) / len(own)
    whole = sum(q)
    kl = 0.0
    for b in range(i):
        if p[b] > 0:
            if q[b] == 0:
                return math.inf
            kl += p[b] / total * math.log((p[b] / total) / (q[b] / whole))
    return kl


@pytest.mark.parametrize("codes", [8, 13, 128])
@pytest.mark.parametrize("seed", range(4))
def test_divergences_are_those_of_a_loop_over_bins(codes: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    n = 150
    counts = (torch.randn(n, generator=g).abs() * 30 * torch.linspace(1, 0, n) ** 2).floor().double()
    counts[0] = 500.0 * (seed % 2)
    beyond = float(7 * (seed // 2))
    got = entropy.divergences(counts[None], torch.tensor([[beyond]], dtype=torch.float64), codes)[0]
    for at, i in enumerate(range(codes, n + 1)):
        want = divergence([*counts.tolist(), beyond], i, codes)
        assert got[at] == pytest.approx(want, rel=1e-9, abs=1e-12), i


def whole_search(x: Tensor, codes: int) -> float:
    """The documented search with Python loops, on the numbers themselves."""
    magnitudes = x.abs().reshape(-1).double()
    largest = limit = float(magnitudes.max())
    found, bins = largest, entropy.bins_for(x.numel(), codes)
    for _ in range(entropy.ZOOMS):
        edges = torch.arange(bins + 1, dtype=torch.float64) / bins * limit
        up_to = (magnitudes[None] <= edges[1:, None]).sum(1)
        counts = torch.diff(up_to, prepend=torch.zeros(1, dtype=torch.int64)).double()
        counts[0] = counts[1]
        beyond = float(x.numel() - up_to[-1])
        table = [divergence([*counts.tolist(), beyond], i, codes) for i in range(codes, bins + 1)]
        i = max(range(len(table)), key=lambda k: (-table[k], k)) + codes
        found = limit * i / bins
        if i >= 3 / 8 * bins:
            break
        while i <= 3 / 8 * bins:
            i, limit = 2 * i, limit / 2
    return min(found, largest)


@pytest.mark.parametrize("kind", ["normal", "relu", "outliers"])
def test_the_search_is_the_documented_one(kind: str) -> None:
    x = torch.randn(4000, generator=torch.Generator().manual_seed(3))
    x = x.relu() if kind == "relu" else x
    if kind == "outliers":
        x[::1000] *= 40
    tails = SortedTails(x.abs()[None])
    got = entropy.search(tails, x.abs().max().double().reshape(1, 1), 8)
    assert float(got) == pytest.approx(whole_search(x, 8), rel=1e-12)


FAR_FROM_ZERO: dict[str, Callable[[Tensor], Tensor]] = {
    "5 to 6": lambda u: 5 + u,
    "1 to 2": lambda u: 1 + u,
    "beyond a half": lambda u: 0.5 + torch.erfinv(u * 0.999).abs(),
    "normal around 2.5": lambda u: 2.5 + 0.5 * torch.erfinv(1.998 * u - 0.999),
    "normal around 20": lambda u: 20 + 5 * torch.erfinv(1.998 * u - 0.999),
}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", FAR_FROM_ZERO)
def test_data_far_from_zero_do_not_become_one_code(kind: str, bits: int, symmetric: bool) -> None:
    """A bin that holds all that lies within a candidate makes its divergence 0, however much that candidate clips."""
    x = FAR_FROM_ZERO[kind](torch.rand(1 << 16, generator=torch.Generator().manual_seed(2)))
    statistics, by_batches = HistogramStatistics(), EntropyCalibrator(bits)
    for batch in x.split(1 << 14):
        statistics.observe(batch)
        by_batches.collect(batch)
    found = compute_range(statistics, TensorScheme(bits=bits, calibrator="entropy", symmetric=symmetric))
    for high in (float(found.high), float(by_batches.compute_amax())):
        assert (x > high).float().mean() < 0.5
        assert len(torch.unique(torch.round(x.clamp(max=high) / high * (2 ** (bits - 1) - 1)))) > 1


def test_half_zeros_do_not_ruin_the_entropy_search(known: dict[str, HistogramStatistics]) -> None:
    """Post-ReLU data: the bin of the zeros must not dominate, or the range collapses."""
    x = calib_data("relu_gaussian")
    for bits in (8, 4):
        half = amax(known["relu_gaussian"], calibrator="entropy", bits=bits)
        assert half > 0.6 * amax(known["gaussian"], calibrator="entropy", bits=bits)
        assert sqnr(x, half, bits) > {8: 39.5, 4: 16.5}[bits]
    mostly = HistogramStatistics()
    mostly.observe(torch.where(torch.arange(x.numel()) % 20 == 0, x.reshape(-1), 0.0))
    assert amax(mostly, calibrator="entropy") > 3


def test_four_bits_find_an_optimum_below_the_classical_first_candidate(known: dict[str, HistogramStatistics]) -> None:
    assert amax(known["outliers"], calibrator="entropy", bits=4) < 4.0 < 128 * LARGEST[3] / 2048


# ---- mse


def error_of(x: Tensor, chosen: calibrate.Range, scheme: TensorScheme) -> float:
    """Mean squared error through the very quantiser."""
    scale, zero_point = range_to_qparams(chosen, scheme)
    codes = numerics.quantize(x, scale, zero_point, "per_tensor", 0, *scheme.code_range)
    return float((numerics.dequantize(codes, scale, zero_point).double() - x.double()).square().mean())


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["normal", "relu", "skewed", "negative", "one outlier"])
def test_affine_mse_beats_every_range_of_a_grid(bits: int, kind: str) -> None:
    x = torch.randn(20000, generator=torch.Generator().manual_seed(5))
    x = {
        "normal": x,
        "relu": x.relu(),
        "skewed": torch.nn.functional.gelu(3 * x),
        "negative": -x.abs() - 0.3,
        "one outlier": torch.cat([x, torch.tensor([30.0])]),
    }[kind]
    scheme = TensorScheme(bits=bits, symmetric=False, calibrator="mse")
    statistics = HistogramStatistics()
    statistics.observe(x)
    got = error_of(x, compute_range(statistics, scheme), scheme)
    low, high = float(x.min().clamp_max(0)), float(x.max().clamp_min(0))
    best = min(
        error_of(x, calibrate.Range(torch.tensor(low * a / 24), torch.tensor(high * b / 24)), scheme)
        for a in range(2, 25)
        for b in range(2, 25)
    )
    assert got <= best * 1.005


def test_full_range_codes_are_counted_on_both_sides() -> None:
    x = torch.randn(50000, generator=torch.Generator().manual_seed(6))
    statistics = HistogramStatistics()
    statistics.observe(x)
    for bits in (8, 4):
        scheme = TensorScheme(bits=bits, narrow_range=False, calibrator="mse")
        got = error_of(x, compute_range(statistics, scheme), scheme)
        grid = [calibrate.Range.symmetric(x.abs().max() * i / 200) for i in range(20, 201)]
        assert got <= min(error_of(x, r, scheme) for r in grid) * 1.002


# ---- percentile


def test_affine_percentile_cuts_both_tails() -> None:
    x = torch.cat([torch.linspace(-1, 0, 20001), torch.linspace(0, 4, 80001)])
    statistics = HistogramStatistics()
    statistics.observe(x)
    chosen = compute_range(statistics, TensorScheme(symmetric=False, calibrator="percentile", percentile=95.0))
    assert float(chosen.low) == pytest.approx(float(x.quantile(0.05)), rel=2 * BIN)
    assert float(chosen.high) == pytest.approx(float(x.quantile(0.95)), rel=2 * BIN)


def test_percentile_100_is_max_and_a_percentile_of_zeros_is_refused() -> None:
    statistics = HistogramStatistics()
    statistics.observe(torch.cat([torch.zeros(100_000), torch.tensor([0.3])]))
    assert amax(statistics, calibrator="percentile", percentile=100) == pytest.approx(0.3)
    with pytest.raises(CalibrationError, match=r"percentile 99 .* zeros"):
        amax(statistics, calibrator="percentile", percentile=99.0)
    far = HistogramStatistics()
    far.observe(torch.cat([torch.linspace(1, 2, 100_000), torch.tensor([1e7])]))
    with pytest.raises(CalibrationError, match=r"below 2\^-20 of the largest"):  # there is no zero
        amax(far, calibrator="percentile", percentile=99.0)


# ---- the rest


def test_histogram_and_sorted_tails_agree() -> None:
    x = torch.randn(40000, generator=torch.Generator().manual_seed(7)).abs()
    exact = SortedTails(x[None])
    binned = HistogramTails(numerics.magnitude_histogram(x, 3)[1], 3, x.max().double(), torch.zeros(()).double())
    thresholds = torch.linspace(0, float(x.max()) * 1.01, 500, dtype=torch.float64)[None]
    scale = float(exact.square)
    for got, want in zip(
        (*binned.above(thresholds), binned.square_above(thresholds), binned.square),
        (*exact.above(thresholds), exact.square_above(thresholds), exact.square),
        strict=True,
    ):
        assert float((got - want).abs().max()) < 2e-3 * scale
    assert float(binned.square) == pytest.approx(scale, rel=1e-5)


def test_compare_splits_the_error_that_the_quantiser_makes() -> None:
    x = calib_data("laplace")[0]
    statistics = HistogramStatistics()
    statistics.observe(x)
    for scheme in (TensorScheme(bits=4), TensorScheme(bits=8), TensorScheme(bits=4, symmetric=False)):
        records = compare(statistics, scheme)
        assert [r.method for r in records] == ["max", "entropy", "mse", "percentile(99.99)"]
        for record in records:
            chosen = calibrate.Range(torch.tensor(record.low), torch.tensor(record.high))
            scale, zero_point = range_to_qparams(chosen, scheme)
            low, high = ((q - zero_point) * scale for q in scheme.code_range)
            clipped = float((x - x.clamp(low, high)).double().square().mean())
            whole = error_of(x, chosen, scheme)
            assert record.clipping_error == pytest.approx(clipped, rel=0.02, abs=1e-9)
            assert record.clipping_error + record.rounding_error == pytest.approx(whole, rel=0.01)
            assert record.sqnr_db == pytest.approx(10 * math.log10(float(x.double().square().mean()) / whole), abs=0.05)
    with pytest.raises(ArgumentError, match="statistics"):
        compare(HistogramStatistics(0), TensorScheme())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nothing_lies_above_the_largest_number(dtype: torch.dtype) -> None:
    """Also where that is the first number of its bin, as every float16 and bfloat16 is."""
    x = torch.cat([torch.randn(1000), torch.tensor([5.0, -5.0])]).to(dtype)
    statistics = HistogramStatistics()
    statistics.observe(x)
    data = statistics.distribution()
    assert float(data.magnitudes.above(data.amax)[0]) == 0
    assert float(data.magnitudes.square_above(data.amax)) == 0
    counts, beyond = entropy.linear_counts(data.magnitudes, data.amax, 512)
    assert float(beyond) == 0
    assert float(counts[0, 1:].sum()) > 900
    assert float(data.magnitudes.square) == pytest.approx(float(x.double().square().sum()), rel=1e-3)


def test_linear_histogram_keeps_every_number() -> None:
    statistics = HistogramStatistics()
    statistics.observe(torch.randn(10000))
    edges, counts = linear_histogram(statistics, 50)
    assert len(edges) == 51
    assert sum(counts) == pytest.approx(10000)
    assert edges[-1] == pytest.approx(float(statistics.amax()))


def test_fixed_ignores_the_data() -> None:
    given = calibrate.GivenRange.of(low=-0.5, high=6.0)
    given.observe(torch.tensor([99.0]))
    chosen = compute_range(given, TensorScheme(calibrator="fixed", symmetric=False))
    assert (float(chosen.low), float(chosen.high)) == (-0.5, 6.0)
    assert float(compute_range(given, TensorScheme(calibrator="fixed")).amax) == 6.0
    for bad in (
        {},
        {"amax": 1.0, "low": 0.0, "high": 1.0},
        {"low": 1.0},
        {"amax": math.inf},
        {"low": 2.0, "high": 1.0},
    ):
        with pytest.raises(ArgumentError):
            calibrate.GivenRange.of(**bad)


@pytest.mark.parametrize("value", [1.0, 0.3, -0.3, 1e-3, 7.0])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("method", ["max", "percentile", "mse"])
def test_the_range_of_a_constant_is_the_constant(method: str, bits: int, value: float) -> None:
    """Its bin is no spread of numbers."""
    scheme = TensorScheme(bits=bits, calibrator=method)
    statistics = HistogramStatistics()
    statistics.observe(torch.full((8, 8), value))
    assert compute_range(statistics, scheme).amax.item() == pytest.approx(abs(value), rel=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("count", [4096, 16384, 60000])
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_entropy_does_not_clip_all_but_the_negative_side_of_an_activation(name: str, count: int, bits: int) -> None:
    """Most numbers lie there, in a few bins, which a few codes keep exactly: it left 1 dB of 15 at 4 bits."""
    of = {"silu": lambda x: torch.nn.functional.silu(2 * x), "gelu": torch.nn.functional.gelu}[name]
    generator = torch.Generator().manual_seed(5)
    statistics, x = HistogramStatistics(), of(torch.randn(100_000, generator=generator))
    statistics.observe(of(torch.randn(count, generator=generator)))

    def decibels(method: str) -> float:
        scheme = TensorScheme(bits, calibrator=method)
        scale, zero_point = range_to_qparams(compute_range(statistics, scheme), scheme)
        codes = numerics.quantize(x, scale, zero_point, "per_tensor", 0, *scheme.code_range)
        error = numerics.dequantize(codes, scale, zero_point, "per_tensor") - x
        return float(10 * torch.log10(x.square().sum() / error.square().sum()))

    assert decibels("entropy") > decibels("mse") - (4 if bits < 8 else 16)
