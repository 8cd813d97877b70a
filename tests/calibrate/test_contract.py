"""What every registered calibration method obeys (C20): one test per law, run over the registry."""

from __future__ import annotations

import pytest
import torch

from pyquant import calibrate
from pyquant.calibrate import HistogramStatistics, compute_range, methods, new_statistics
from pyquant.core.registry import CALIBRATORS
from pyquant.core.scheme import TensorScheme
from pyquant.errors import CalibrationError, NonFiniteError

OF_DATA = [m.name for m in methods() if m.name != "fixed"]
SCHEMES = [(bits, symmetric) for bits in (8, 4) for symmetric in (True, False)]


def batches(kind: str, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    normal = [torch.randn(7, 301, generator=g) for _ in range(5)]
    if kind == "relu":
        return [b.relu() for b in normal]
    if kind == "negative":
        return [-b.abs() - 0.1 for b in normal]
    if kind == "outliers":
        normal[3][2, 5] = 900.0
        return normal
    if kind == "growing":  # each batch needs a wider window than the one before
        return [b * 8.0**i for i, b in enumerate(normal)]
    if kind == "skewed":
        return [torch.where(b < 0, b * 0.05, b) for b in normal]
    return normal


KINDS = ("normal", "relu", "negative", "outliers", "growing", "skewed")


def observed(data: list[torch.Tensor], scheme: TensorScheme, axis: int | None = None) -> calibrate.RangeStatistics:
    statistics = new_statistics(scheme, axis)
    for batch in data:
        statistics.observe(batch)
    return statistics


def same(a: calibrate.Range, b: calibrate.Range) -> bool:
    return torch.equal(a.low, b.low) and torch.equal(a.high, b.high)


def schemes(name: str) -> list[TensorScheme]:
    return [TensorScheme(bits=b, symmetric=s, calibrator=name, percentile=99.0) for b, s in SCHEMES]


def test_the_registry_is_what_schemes_may_name() -> None:
    assert tuple(m.name for m in methods()) == CALIBRATORS.names() == ("max", "entropy", "fixed", "mse", "percentile")


@pytest.mark.parametrize("name", OF_DATA)
@pytest.mark.parametrize("kind", KINDS)
def test_order_and_split_of_the_data_do_not_matter(name: str, kind: str) -> None:
    data = batches(kind)
    for scheme in schemes(name):
        whole = compute_range(observed(data, scheme), scheme)
        assert same(whole, compute_range(observed(data[::-1], scheme), scheme))
        assert same(whole, compute_range(observed([torch.cat(data)], scheme), scheme))
        first, second = observed(data[:2], scheme), observed(data[2:], scheme)
        first.merge(second)
        assert same(whole, compute_range(first, scheme))
        second.merge(observed(data[:2], scheme))
        assert same(whole, compute_range(second, scheme))


@pytest.mark.parametrize("name", OF_DATA)
@pytest.mark.parametrize("kind", KINDS)
def test_scaling_the_data_scales_the_result(name: str, kind: str) -> None:
    data = batches(kind)
    for scheme in schemes(name):
        once = compute_range(observed(data, scheme), scheme)
        for factor in (2.0**-30, 0.5, 2.0**40):
            scaled = compute_range(observed([b * factor for b in data], scheme), scheme)
            assert same(scaled, calibrate.Range(once.low * factor, once.high * factor))


@pytest.mark.parametrize("name", OF_DATA)
@pytest.mark.parametrize("kind", KINDS)
def test_the_result_stays_within_the_data_and_contains_zero(name: str, kind: str) -> None:
    data = batches(kind)
    everything = torch.cat(data)
    for scheme in schemes(name):
        chosen = compute_range(observed(data, scheme), scheme)
        assert chosen.low.shape == chosen.high.shape == ()
        assert chosen.low.dtype == torch.float32
        assert chosen.low <= 0 <= chosen.high
        assert chosen.amax > 0
        if scheme.symmetric:
            assert chosen.low == -chosen.high
            assert chosen.amax <= everything.abs().max()
        else:  # zero points are whole: a range may end within one step beyond the data
            scale, _ = calibrate.range_to_qparams(chosen, scheme)
            slack = 0 if name != "mse" else scale
            assert chosen.high <= everything.max().clamp_min(0) + slack
            assert chosen.low >= everything.min().clamp_max(0) - slack


@pytest.mark.parametrize("name", OF_DATA)
def test_all_zero_data_give_zero(name: str) -> None:
    for scheme in schemes(name):
        chosen = compute_range(observed([torch.zeros(3, 4), -torch.zeros(5)], scheme), scheme)
        assert chosen.low == 0
        assert chosen.high == 0
        scale, zero_point = calibrate.range_to_qparams(chosen, scheme)
        assert scale == 1
        assert zero_point == 0 or not scheme.symmetric


@pytest.mark.parametrize("name", OF_DATA)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_raises_and_leaves_the_statistics_alone(name: str, value: float) -> None:
    scheme = TensorScheme(calibrator=name)
    statistics = observed([torch.tensor([1.0, -2.0])], scheme)
    before = statistics.state_dict()
    bad = torch.ones(2, 3)
    bad[1, 2] = value
    with pytest.raises(NonFiniteError, match=r"\[1, 2\]"):
        statistics.observe(bad)
    after = statistics.state_dict()
    assert set(before) == set(after)
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("name", OF_DATA)
def test_no_data_is_an_error(name: str) -> None:
    scheme = TensorScheme(calibrator=name)
    statistics = observed([torch.empty(0, 4)], scheme)
    with pytest.raises(CalibrationError, match="no data"):
        compute_range(statistics, scheme)


@pytest.mark.parametrize("name", OF_DATA)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_count_as_their_values(name: str, dtype: torch.dtype) -> None:
    data = [b.to(dtype) for b in batches("normal")]
    scheme = TensorScheme(calibrator=name)
    chosen = compute_range(observed(data, scheme), scheme)
    assert same(chosen, compute_range(observed([b.float() for b in data], scheme), scheme))
    assert chosen.amax.dtype == torch.float32


@pytest.mark.parametrize("name", OF_DATA)
@pytest.mark.parametrize("axis", [0, -1])
def test_channels_are_calibrated_apart(name: str, axis: int) -> None:
    data = [b[:, :6] * torch.tensor([1.0, 2.0, 1000.0, 0.0, 1e-6, 3.0]) for b in batches("normal")]
    if axis == 0:
        data = [b.T.contiguous() for b in data]
    for scheme in schemes(name):
        chosen = compute_range(observed(data, scheme, axis), scheme)
        assert chosen.low.shape == (6,)
        for c in range(6):
            alone = compute_range(observed([b.select(axis, c) for b in data], scheme), scheme)
            assert same(alone, calibrate.Range(chosen.low[c], chosen.high[c]))


def test_statistics_come_back_from_their_state() -> None:
    for axis in (None, 0):
        statistics = HistogramStatistics(axis)
        fresh = HistogramStatistics(axis)
        fresh.load_state_dict(statistics.state_dict())
        assert fresh.count == 0
        statistics.observe(torch.randn(4, 50))
        fresh.load_state_dict(statistics.state_dict())
        more = torch.randn(4, 50) * 100
        statistics.observe(more)
        fresh.observe(more)
        a, b = statistics.state_dict(), fresh.state_dict()
        assert set(a) == set(b)
        assert all(torch.equal(a[k], b[k]) for k in a)
