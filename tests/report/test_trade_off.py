"""Markdown and CSV of a trade-off say what the record says."""

from __future__ import annotations

import csv
import io

from trade_offs import seed_trade_off, small_trade_off

from pyquant.report.trade_off import change, number, thinned, to_csv, to_markdown


def test_csv_holds_every_point_and_every_figure() -> None:
    for made in (small_trade_off(), seed_trade_off()):
        rows = list(csv.DictReader(io.StringIO(to_csv(made))))
        assert len(rows) == len(made.points)
        for row, point in zip(rows, made.points, strict=True):
            assert {group: row[group] for group in made.groups} == point.configuration
            assert abs(float(row["latency_us"]) / point.cost - 1) < 1e-9
            assert float(row[made.quality.name]) == point.quality
            assert (row["measured"], row["on_front"]) == (str(int(point.measured)), str(int(point.on_front)))
            assert row["low"] == ("" if point.low is None else f"{point.low:g}")
    small = list(csv.DictReader(io.StringIO(to_csv(small_trade_off()))))
    assert [row["mean_us"] for row in small] == ["101.5", "", "", ""]
    assert [row["chosen"] for row in small] == ["0", "0", "1", "0"]


def test_markdown_of_the_seeds_ratios_states_the_known_figures() -> None:
    text = to_markdown(seed_trade_off())
    assert "729 configurations, 729 of them measured" in text
    assert "41.8% less latency" in text
    lines = [line for line in text.splitlines() if line.startswith("| uniform")]
    assert ["-31.0 %" in line for line in lines] == [False, True, False]
    assert ["-47.0 %" in line for line in lines] == [False, False, True]
    assert "1 032 192" in lines[0]
    assert "258 048" in lines[2]
    assert "higher is better" in text


def test_markdown_of_a_search_shows_choice_prediction_notes_and_command() -> None:
    text = to_markdown(small_trade_off())
    assert "lower is better" in text
    assert "Command: `pyquant <made up>`" in text
    chosen = text.split("## Chosen")[1].split("##")[0]
    assert "80.0" in chosen
    assert "20.0%" in chosen
    assert "Equal quality" not in text
    front = text.split("## Front")[1]
    assert "mean [us]" in front
    assert "101.5" in front
    assert "4 configurations, 3 of them measured" in text


def test_figures_for_people() -> None:
    assert change(153.0, 100.0) == "+53.0 %"
    assert number(-1234567.0) == "-1 234 567"
    assert thinned(tuple(range(100)), 5) == [0, 25, 50, 74, 99]  # type: ignore[arg-type,comparison-overlap]
