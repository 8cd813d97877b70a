"""Pictures of a user's own tensors: the histograms behind them count every number, and the ranges are the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import pyquant
from pyquant.calibrate import HistogramStatistics, signed_histogram
from pyquant.errors import UnsupportedError


def model_and_data() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    model = pyquant.SelectiveQuantizer(scheme=pyquant.W8A8(symmetric_inputs=False), verbose=False).quantize_module(net)
    return model, [torch.randn(64, 16) for _ in range(4)]


@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
@pytest.mark.parametrize("bins", [10, 200])
def test_a_signed_histogram_counts_every_number(shift: float, bins: int) -> None:
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 0.5 + shift
    x[:100] = 0.0
    statistics = HistogramStatistics()
    statistics.observe(x)
    edges, counts = signed_histogram(statistics, bins)
    assert len(edges) == len(counts) + 1 == bins + 1
    assert (edges[0], edges[-1]) == (min(x.min().item(), 0.0), max(x.max().item(), 0.0))
    assert sum(counts) == pytest.approx(len(x))
    exact = torch.histogram(x.double(), torch.tensor(edges, dtype=torch.float64)).hist
    assert (torch.tensor(counts) - exact).abs().max() < 0.02 * len(x)  # bins of the statistics are cut in proportion


def test_histograms_of_a_model() -> None:
    model, data = model_and_data()
    calibrator = pyquant.QuantizationCalibrator()
    assert {seen.in_use for seen in calibrator.histograms(model, data, num_calib_batches=4).values()} == {None}
    calibrator.calibrate_model(model, data, "mse", 4)
    before = [p.clone() for p in model.state_dict().values()]
    found = calibrator.histograms(model, data, num_calib_batches=4)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert list(found) == ["0.input", "2.input"]
    for name, seen in found.items():
        chosen = {record.method: record for record in seen.methods}["mse"]
        step = model.get_submodule(name.split(".")[0]).input_fake_quant.scale.item()
        assert seen.in_use == pytest.approx((chosen.low, chosen.high), abs=1.01 * step)  # the zero point is whole
    assert found["2.input"].edges[0] == 0.0  # after a ReLU
    compared = calibrator.compare(model, data, num_calib_batches=4)
    assert {n: list(by.values()) for n, by in compared.items()} == {n: list(s.methods) for n, s in found.items()}


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    from pyquant.report.plot_calibration import plot_tensors

    model, data = model_and_data()
    calibrator = pyquant.QuantizationCalibrator()
    calibrator.calibrate_model(model, data, "mse", 4)
    files = plot_tensors(calibrator.histograms(model, data, num_calib_batches=4), tmp_path)
    assert [f.name for f in files] == ["0.input.png", "2.input.png"]
    assert all(imread(f).shape[1] > 1000 for f in files)
    with pytest.raises(UnsupportedError, match="nothing to plot"):
        plot_tensors({}, tmp_path)
    odd = plot_tensors({"a/../b c.input": calibrator.histograms(model, data, num_calib_batches=4)["0.input"]}, tmp_path)
    assert odd[0].parent == tmp_path
