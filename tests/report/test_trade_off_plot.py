"""The picture of a trade-off draws what the record says."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from trade_offs import seed_trade_off, small_trade_off

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from pyquant.report import trade_off_plot as plot


def test_png_and_svg_are_drawn_and_equal_records_give_equal_bytes() -> None:
    made = small_trade_off()
    assert plot.picture(made, "png")[:8] == b"\x89PNG\r\n\x1a\n"
    svg = plot.picture(made, "svg")
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert svg == plot.picture(made, "svg")


def test_axes_lines_front_and_arrow_are_those_of_the_record() -> None:
    made = seed_trade_off()
    axes = plot._draw(made).axes[0]
    assert axes.get_xlabel() == "latency: invented, in ms"
    assert re.sub(r"\s+", " ", axes.get_ylabel()) == "capacity: sum of outputs x bits, in bits"
    texts = [text.get_text() for text in axes.texts]
    assert {"uniform fp32", "uniform int8 (-31 %)", "uniform int4 (-47 %)"} <= set(texts)
    assert "42 % less latency at equal capacity" in texts
    front = next(line for line in axes.lines if line.get_label() == "Pareto front")
    assert list(front.get_xdata()) == [p.cost / 1e3 for p in made.front]
    drawn = sum(len(c.get_offsets()) for c in axes.collections)
    assert drawn == 729 + len(made.lines)


def test_points_are_coloured_by_how_much_is_lowered_and_the_legend_hides_none() -> None:
    figure = plot._draw(seed_trade_off())
    points = max(figure.axes[0].collections, key=lambda c: len(c.get_offsets()))
    lowered = [sum(f != "fp32" for f in p.configuration.values()) for p in seed_trade_off().points]
    assert points.get_array().tolist() == lowered
    assert figure.axes[1].get_ylabel() == "groups not in fp32, of 6"
    figure.draw_without_rendering()
    (legend,), (axes, _) = figure.legends, figure.axes
    assert axes.get_legend() is None
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    labels = [text.get_text() for text in plot._draw(small_trade_off()).legends[0].get_texts()]
    assert {"predicted", "chosen", "Pareto front"} <= set(labels)
