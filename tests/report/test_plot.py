"""Pictures are drawn with honest axes, or refused with the reason."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from test_render import gemm_report, gpu_report

from pyquant.errors import UnsupportedError
from pyquant.report import gemm, plot
from pyquant.report.records.bench import QatReport, QatRow

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def qat_report() -> QatReport:
    rows = [
        QatRow(case, name, name == "pyquant", 0.5 * k, "ns/element", k, 1.0, 0.1, 5)
        for case in ("per_tensor", "per_channel")
        for k, name in enumerate(("clone", "pyquant", "torch"), 1)
    ]
    return QatReport(gemm_report().environment, "default", rows)


@needs_matplotlib
@pytest.mark.parametrize(
    ("draw", "report"),
    [
        (plot.gemm_png, gemm_report()),
        (plot.roofline_png, gpu_report()),
        (plot.roofline_png, replace(gpu_report(), ceilings=[])),
        (plot.qat_png, qat_report()),
    ],
)
def test_a_png_is_drawn(draw, report) -> None:
    assert draw(report)[:8] == b"\x89PNG\r\n\x1a\n"


@needs_matplotlib
def test_the_picture_of_a_gemm_report_is_the_one_that_its_rows_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "roofline_png", lambda report: b"roofline")
    monkeypatch.setattr(gemm, "gemm_png", lambda report: b"speed")
    report = gpu_report()
    on_gpu = replace(report, environment=replace(report.environment, gpu="a GPU"))
    assert [gemm.picture(r) for r in (on_gpu, gemm_report())] == [b"roofline", b"speed"]


@needs_matplotlib
def test_points_lie_under_the_limits_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(plot, "saved", lambda figure, caption: figures.append(figure))
    plot.roofline_png(gpu_report())
    axis = figures[0].axes[0]
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    peaks = sorted(line.get_ydata()[-1] for line in axis.get_lines())
    assert peaks == pytest.approx([90.0, 180.0])  # 10^12 operations a second
    for line, ridge in zip(sorted(axis.get_lines(), key=lambda line: line.get_ydata()[-1]), (90.0, 180.0), strict=True):
        assert line.get_xdata()[1] == pytest.approx(ridge)  # 90000 Gop/s over 1000 GB/s
    offsets = sorted(tuple(points.get_offsets()[0]) for points in axis.collections)
    assert offsets == [pytest.approx((500.0, 0.2)), pytest.approx((2000.0, 1.0))]
    with pytest.raises(UnsupportedError, match="no row says"):
        plot.roofline_png(gemm_report())


@needs_matplotlib
def test_limits_that_lie_close_together_share_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(plot, "saved", lambda figure, caption: figures.append(figure))
    report = gpu_report()
    apart = [c for c in report.ceilings if c.unit == "Gop/s"]
    others = [c for c in report.ceilings if c.unit != "Gop/s"]
    first = min(c.value for c in apart)
    close = [replace(c, value=first * (1 + 0.05 * i)) for i, c in enumerate(sorted(apart, key=lambda c: c.value))]
    for ceilings, labels in ((others + apart, 2), (others + close, 1)):
        plot.roofline_png(replace(report, ceilings=ceilings))
        texts = [text.get_text() for text in figures[-1].axes[0].texts]
        assert len(texts) == labels
        assert sorted(line.split()[0] for text in texts for line in text.splitlines()) == sorted(c.name for c in apart)


@needs_matplotlib
def test_axes_of_lengths_start_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(plot, "saved", lambda figure, caption: figures.append(figure))
    plot.gemm_png(gemm_report())
    plot.qat_png(qat_report())
    drawn = [axis for figure in figures for axis in figure.axes if axis.has_data()]
    assert len(drawn) == 3
    assert drawn[0].get_ylim()[0] == 0
    assert all(axis.get_xlim()[0] == 0 for axis in drawn[1:])


@pytest.mark.parametrize(("draw", "report"), [(plot.gemm_png, gemm_report()), (plot.qat_png, qat_report())])
def test_nothing_to_draw_is_refused(draw, report) -> None:
    with pytest.raises(UnsupportedError, match="no rows"):
        draw(replace(report, rows=[]))


def test_without_matplotlib_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        plot.qat_png(qat_report())


def test_mean_ratio_needs_every_shape() -> None:
    rows = gemm_report().rows
    assert plot._mean_ratio(rows, "QLinear W8A8Dynamic", 1) == pytest.approx(4.0)
    assert plot._mean_ratio(rows, "QLinear W8A8Dynamic", 8) is None
