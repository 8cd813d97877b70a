"""Statistics count exactly, travel, and add up over processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as multiprocessing

from pyquant.calibrate import HistogramStatistics, MaxCalibrator, RangeStatistics, collectors, compute_range
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, CalibrationError
from pyquant.numerics.histogram import BINS


def observed(*batches: torch.Tensor, axis: int | None = None) -> HistogramStatistics:
    statistics = HistogramStatistics(axis)
    for batch in batches:
        statistics.observe(batch)
    return statistics


def equal(a: RangeStatistics, b: RangeStatistics) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return set(x) == set(y) and all(torch.equal(x[k], y[k]) for k in x)


def test_billions_of_numbers_are_counted_exactly() -> None:
    """float32 counters stop at 2^24, int32 ones at 2^31: doubling by merging goes past both, to the last number."""
    x = torch.tensor([0.5, -0.25, 0.0, 3.0, 0.5])
    statistics = observed(x)
    for _ in range(34):
        twin = HistogramStatistics()
        twin.load_state_dict(statistics.state_dict())
        statistics.merge(twin)
    statistics.observe(torch.tensor([0.5]))
    assert statistics.count == 5 * 2**34 + 1
    assert statistics.counts is not None
    assert int(statistics.counts.sum()) == statistics.count
    assert int(statistics.counts.max()) == 2 * 2**34 + 1
    half = compute_range(statistics, TensorScheme(calibrator="percentile", percentile=70.0))
    assert float(half.amax) == pytest.approx(0.5, rel=2.0**-10)


def test_a_window_far_above_the_data_keeps_the_count() -> None:
    statistics = observed(torch.full((10,), 1e-20), torch.tensor([1e20]), torch.zeros(3))
    assert statistics.counts is not None
    assert statistics.counts[0, 1, 0] == 13
    assert statistics.counts.sum() == 14
    assert equal(statistics, observed(torch.tensor([1e20]), torch.zeros(3), torch.full((10,), 1e-20)))


def test_merging_kinds_that_do_not_fit_is_refused() -> None:
    per_channel = observed(torch.ones(3, 4), axis=0)
    with pytest.raises(ArgumentError, match="other"):
        observed(torch.ones(4)).merge(per_channel)
    with pytest.raises(ArgumentError, match="other"):
        observed(torch.ones(4)).merge(RangeStatistics())
    with pytest.raises(ArgumentError, match="2 channels"):
        observed(torch.ones(2, 4), axis=0).merge(per_channel)
    with pytest.raises(ArgumentError, match="4 channels"):
        per_channel.observe(torch.ones(4, 4))
    with pytest.raises(ArgumentError, match="dimension 2"):
        HistogramStatistics(2).observe(torch.ones(4, 4))
    for bad in (torch.ones(3, dtype=torch.int8), torch.ones(3, dtype=torch.float64), [1.0]):
        with pytest.raises(ArgumentError, match="'x'"):
            RangeStatistics().observe(bad)  # type: ignore[arg-type]


def test_a_state_that_was_tampered_with_is_refused() -> None:
    good = observed(torch.randn(100)).state_dict()
    for name, value in (
        ("counts", good["counts"][:, :, 1:]),
        ("counts", good["counts"] + 1),
        ("counts", -good["counts"]),
        ("counts", good["counts"].float()),
        ("count", torch.tensor(7)),
        ("low", torch.zeros(2)),
        ("extra", torch.ones(1)),
    ):
        with pytest.raises(ArgumentError, match="state"):
            HistogramStatistics().load_state_dict({**good, name: value})
    with pytest.raises(ArgumentError, match="state"):
        HistogramStatistics().load_state_dict({k: v for k, v in good.items() if k != "low"})


def test_the_tutorials_calibrators() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    statistics = observed(x)
    for made, scheme in (
        (MaxCalibrator(), TensorScheme()),
        (collectors.PercentileCalibrator(99.0), TensorScheme(calibrator="percentile", percentile=99.0)),
        (collectors.EntropyCalibrator(bits=4, grid="data"), TensorScheme(bits=4, calibrator="entropy")),
        (collectors.MSECalibrator(), TensorScheme(calibrator="mse")),
    ):
        for part in x.chunk(3):
            made.collect(part)
        assert torch.equal(made.compute_amax(), compute_range(statistics, scheme).amax)
    with pytest.raises(CalibrationError):
        MaxCalibrator().compute_amax()


# ---- data-parallel jobs


def share(rank: int, busy: int) -> tuple[torch.Tensor, ...]:
    """The batches of a process: numbers of a size of its own, or none from process `busy` on."""
    g = torch.Generator().manual_seed(rank)
    return (torch.randn(3, 40, generator=g) * 10.0**rank,) if rank < busy else ()


def worker(rank: int, processes: int, file: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=processes)
    try:
        for axis in (None, 0):
            for busy in range(processes + 1):
                mine = observed(*share(rank, busy), axis=axis)
                mine.reduce_()
                whole = observed(*(b for other in range(processes) for b in share(other, busy)), axis=axis)
                assert equal(mine, whole), f"process {rank}, axis {axis}, {busy} with data"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_processes_end_with_the_statistics_of_all(tmp_path: Path) -> None:
    multiprocessing.spawn(worker, (2, str(tmp_path / "store")), nprocs=2)


def test_reduce_needs_a_process_group() -> None:
    with pytest.raises(CalibrationError, match="init_process_group"):
        observed(torch.ones(2)).reduce_()


def test_a_table_has_the_documented_size() -> None:
    statistics = observed(torch.ones(2))
    assert statistics.counts is not None
    assert list(statistics.counts.shape) == [1, 2, BINS] == [1, 2, 20481]
