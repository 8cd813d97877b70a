"""Pictures are drawn with honest axes, or refused with the reason."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_render import gemm_report, gpu_report, model_report

from pyquant.errors import UnsupportedError
from pyquant.report import plot

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


@needs_matplotlib
@pytest.mark.parametrize(
    ("draw", "report"),
    [
        (plot.plot_gemm, gemm_report()),
        (plot.plot_model, model_report()),
        (plot.plot_roofline, gpu_report()),
        (plot.plot_roofline, replace(gpu_report(), ceilings=[])),
    ],
)
def test_a_png_is_written(draw, report, tmp_path: Path) -> None:
    path = draw(report, tmp_path / "new" / "p.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [p.name for p in path.parent.iterdir()] == ["p.png"]


@needs_matplotlib
def test_points_lie_under_the_limits_that_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(plot, "_save", lambda figure, path, caption: figures.append(figure))
    plot.plot_roofline(gpu_report(), tmp_path / "p.png")
    axis = figures[0].axes[0]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    peaks = sorted(line.get_ydata()[-1] for line in axis.get_lines())
    assert peaks == pytest.approx([90.0, 180.0])  # 10^12 operations a second
    for line, ridge in zip(sorted(axis.get_lines(), key=lambda line: line.get_ydata()[-1]), (90.0, 180.0), strict=True):
        assert line.get_xdata()[1] == pytest.approx(ridge)  # 90000 Gop/s over 1000 GB/s
    offsets = sorted(tuple(points.get_offsets()[0]) for points in axis.collections)
    assert offsets == [pytest.approx((500.0, 0.2)), pytest.approx((2000.0, 1.0))]
    with pytest.raises(UnsupportedError, match="no row says"):
        plot.plot_roofline(gemm_report(), tmp_path / "p.png")


@needs_matplotlib
def test_axes_of_lengths_start_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(plot, "_save", lambda figure, path, caption: figures.append(figure))
    plot.plot_model(model_report(), tmp_path / "p.png")
    plot.plot_gemm(gemm_report(), tmp_path / "p.png")
    drawn = [axis for figure in figures for axis in figure.axes if axis.has_data()]
    assert len(drawn) == 4
    assert all(axis.get_xlim()[0] == 0 for axis in drawn[:3])
    assert drawn[3].get_ylim()[0] == 0


@pytest.mark.parametrize(("draw", "report"), [(plot.plot_gemm, gemm_report()), (plot.plot_model, model_report())])
def test_nothing_to_draw_is_refused(draw, report, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no rows"):
        draw(replace(report, rows=[]), tmp_path / "p.png")


def test_without_matplotlib_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        plot.plot_model(model_report(), tmp_path / "p.png")


def test_mean_ratio_needs_every_shape() -> None:
    rows = gemm_report().rows
    assert plot._mean_ratio(rows, "QLinear W8A8Dynamic", 1) == pytest.approx(4.0)
    assert plot._mean_ratio(rows, "QLinear W8A8Dynamic", 8) is None
