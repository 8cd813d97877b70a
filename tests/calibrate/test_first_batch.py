"""The entropy calibrator of the tutorials, on bins that follow the first batch: the ranges of the classical tool."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from pyquant.bench.calib import DATA, calib_data, sqnr
from pyquant.calibrate import EntropyCalibrator, HistogramStatistics, compute_range, first_batch
from pyquant.calibrate.first_batch import MOST_BINS, FirstBatchHistogram
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError, CalibrationError, NonFiniteError

# amax of nvidia-modelopt 0.47's HistogramCalibrator("entropy") on calib_data(kind, seed), measured once; None: its
# first candidate is bin 128, which lies above the optimum.
CLASSICAL: dict[tuple[int, int], tuple[float | None, ...]] = {
    (1234, 8): (4.422590, 10.102525, 25.539635, 4.778492, 4.422590),
    (1234, 4): (3.753155, 6.013104, 7.024888, None, 3.424916),
    (1, 8): (4.406353, 10.396792, 22.757074, 8.580447, 4.406353),
    (1, 4): (3.565101, 6.306251, 7.268082, None, 3.717861),
    (2, 8): (4.577909, 10.325965, 21.830622, 4.135787, 4.501363),
    (2, 4): (3.656962, 6.450085, 6.832078, 3.168352, 3.658338),
    (3, 8): (4.400988, 10.114410, 21.546703, 4.215748, 4.369982),
    (3, 4): (3.509010, 6.405794, 7.597736, None, 3.605186),
}
FIRST_CANDIDATE = {1234: 4.741449, 1: 8.580447, 3: 3.695999}  # what it answers instead, on the outliers


def collected(data: torch.Tensor | list[torch.Tensor], **options: object) -> EntropyCalibrator:
    made = EntropyCalibrator(**options)  # type: ignore[arg-type]
    for batch in data:
        made.collect(batch)
    return made


@pytest.mark.parametrize("seed", [1234, 1, 2, 3])
@pytest.mark.parametrize("kind", DATA)
def test_ranges_are_those_of_the_classical_tool(kind: str, seed: int) -> None:
    x = calib_data(kind, seed)
    made = collected(x)
    for bits in (8, 4):
        want, got = CLASSICAL[seed, bits][DATA.index(kind)], float(made.compute_amax(bits=bits))
        if want is not None:
            assert got == pytest.approx(want, abs=2e-6)
        else:
            assert got < FIRST_CANDIDATE[seed]
            assert sqnr(x, got, bits) > sqnr(x, FIRST_CANDIDATE[seed], bits)


def loop(batches: list[torch.Tensor]) -> tuple[Fraction, list[int]]:
    """Width and counts the plainest way, in whole numbers."""
    width, counts = Fraction(0), [0] * 2048
    for batch in batches:
        values = [Fraction(abs(v)) for v in batch.flatten().tolist()]
        width = width or max(values) / 2048
        last = max(values) / width if width else Fraction(0)
        counts += [0] * (-(-last.numerator // last.denominator) - len(counts))
        for v in values:
            counts[min(int(v / width) if width else 0, len(counts) - 1)] += 1
    return width, counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_a_loop(seed: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    batches = [(torch.randn(200, generator=g) * (1 + i)).to(dtype) for i in range(4)]
    batches[2][:5] = batches[0].abs().max() * torch.tensor([1, 2, 0.5, 1.5, 0]).to(dtype)  # on edges
    if seed == 1:
        batches.insert(0, torch.zeros(7, dtype=dtype))
    if seed == 2:
        batches.insert(1, torch.zeros(0, dtype=dtype))
    histogram = FirstBatchHistogram()
    for batch in batches:
        histogram.observe(batch)
    width, counts = loop([b for b in batches if b.numel()])
    assert Fraction(histogram.width) == width
    # not lists: in CI pytest tells how two long ones differ, which takes minutes
    assert histogram.counts.dtype == torch.int64
    assert torch.equal(histogram.counts, torch.tensor(counts, dtype=torch.int64))


def test_large_batches_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = calib_data("laplace")[0]
    whole, parts = FirstBatchHistogram(), FirstBatchHistogram()
    whole.observe(x)
    monkeypatch.setattr(first_batch, "_AT_ONCE", 1000)
    parts.observe(x)
    assert torch.equal(whole.counts, parts.counts)


def test_the_first_batch_matters_here_and_does_not_with_the_grid_of_the_data() -> None:
    data = list(calib_data("outliers"))
    assert collected(data).compute_amax() != collected(data[::-1]).compute_amax()
    of_data = [collected(d, grid="data").compute_amax() for d in (data, data[::-1])]
    assert torch.equal(*of_data)
    statistics = HistogramStatistics()
    for batch in data:
        statistics.observe(batch)
    assert torch.equal(of_data[0], compute_range(statistics, TensorScheme(calibrator="entropy")).amax)


def test_other_methods_and_channels() -> None:
    x = calib_data("student_t3")[:3, :8]
    made = collected(x, channel_axis=0, bits=4)
    alone = [collected(x[:, c], bits=4).compute_amax() for c in range(8)]
    assert torch.equal(made.compute_amax(), torch.stack(alone))
    assert torch.equal(made.compute_amax("max"), x.abs().amax((0, 2)))
    assert torch.equal(collected(torch.zeros(2, 5)).compute_amax(), torch.tensor(0.0))
    assert collected([torch.tensor([3.0])]).compute_amax() == 3


def state(made: EntropyCalibrator) -> list[torch.Tensor]:
    return [*made.statistics.state_dict().values(), *(h.counts.clone() for h in made._histograms)]


def test_what_is_refused_leaves_nothing_behind() -> None:
    made = collected(calib_data("gaussian")[:2])
    before = state(made)
    largest = made._histograms[0].width * MOST_BINS
    for wrong, error, told in (
        (torch.tensor([1.0, largest * 1.001]), CalibrationError, "32 times"),
        (torch.tensor([1.0, torch.nan]), NonFiniteError, "nan"),
        (torch.tensor([torch.inf, 1.0]), NonFiniteError, "inf"),
        (torch.tensor([1, 2]), ArgumentError, "int64"),
        ([1.0], ArgumentError, "list"),
    ):
        with pytest.raises(error, match=told):
            made.collect(wrong)  # type: ignore[arg-type]
        assert all(map(torch.equal, state(made), before))
    made.collect(torch.zeros(0))
    made.collect(torch.tensor([largest]))
    with pytest.raises(ArgumentError, match="'grid'"):
        EntropyCalibrator(grid="last_batch")  # type: ignore[arg-type]
    with pytest.raises(CalibrationError):
        EntropyCalibrator().compute_amax()
    with pytest.raises(ArgumentError, match="bits"):
        made.compute_amax(bits=9)
    with pytest.raises(ArgumentError, match="channels"):
        collected(torch.ones(1, 4, 4), channel_axis=0).collect(torch.ones(3, 4))
