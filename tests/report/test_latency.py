"""Markdown, CSV and the heat map of a latency table say what the table says."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from pyquant.report import registry
from pyquant.report.latency import picture, to_csv, to_markdown
from pyquant.report.records.latency import LatencyTable, MeasuredConfig
from pyquant.report.records.record import load_record


def _table(groups: int = 2) -> LatencyTable:
    names = tuple(f"layer.{g}" for g in range(groups))
    return LatencyTable(
        groups=names,
        layers=tuple((name,) for name in names),
        formats=("fp32", "int8", "W4A8(group_size=64)"),
        weight_bits=(16, 8, 4),
        input_bits=(16, 8, 8),
        base_us=7.5,
        group_us=tuple((10.0 + g, 4.0, None if g else 2.0) for g in range(groups)),
        interval_us=tuple(((9.0, 11.0 + g), (3.5, 4.5), None if g else (1.0, 3.0)) for g in range(groups)),
        layer_us={name: (10.0 + g, 4.0, None if g else 2.0) for g, name in enumerate(names)},
        border_us=tuple(((0.0, 1.5, 0.0), (0.0,) * 3, (0.0,) * 3) for _ in range(groups - 1)),
        uniform=(MeasuredConfig((0,) * groups, 30.0, 29.0, 31.0, 28.5),),
        held_out=(MeasuredConfig((1, *(0,) * (groups - 1)), 20.0, 19.0, 21.0, 22.0),),
        clock="cpu",
        rounds=9,
        fingerprint={"cpu": "a cpu", "threads": "1", "gpu": "", "input 0": "float32 [2, 8]"},
        notes=("a note",),
    )


def test_markdown_states_figures_errors_and_where_they_belong() -> None:
    text = to_markdown(_table())
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "| layer.0 | 10.0 | 4.0 | 2.0 |" in lines
    assert "| layer.1 | 11.0 | 4.0 | - |" in lines
    assert "| everything else | 7.5 | 7.5 | 7.5 |" in lines
    assert "| together | 28.5 | 15.5 | - |" in lines
    assert "| layer.0, layer.1 | fp32, int8 | 1.5 |" in lines
    assert "| uniform fp32 | 30.0 | 29.0 .. 31.0 | 28.5 | -5.0% |" in lines
    assert "| held out: 1 fp32, 1 int8 | 20.0 | 19.0 .. 21.0 | 22.0 | +10.0% |" in lines
    assert "predict little" not in text
    assert "1.100 (bias, the median), median error 10.0%, worst 10.0%" in text
    assert "- a note" in lines
    assert lines[-1] == "cpu a cpu; threads 1; input 0 float32 [2, 8]; clock cpu; 9 rounds"


def test_a_table_that_does_not_predict_says_so() -> None:
    made = _table()
    busy = replace(made, held_out=(replace(made.held_out[0], measured_us=made.held_out[0].measured_us * 2),))
    assert "predict little" in to_markdown(busy)


def test_csv_holds_every_figure() -> None:
    made = _table()
    rows = list(csv.DictReader(io.StringIO(to_csv(made))))
    assert (rows[0]["group"], float(rows[0]["us"])) == ("", made.base_us)
    for row, (g, f) in zip(rows[1:], [(g, f) for g in range(2) for f in range(3)], strict=True):
        us, interval = made.group_us[g][f], made.interval_us[g][f]
        assert (row["group"], row["format"]) == (made.groups[g], made.formats[f])
        if us is None or interval is None:
            assert row["us"] == row["ratio"] == ""
        else:
            assert [float(row[key]) for key in ("us", "low_us", "high_us")] == [us, *interval]
            assert float(row["ratio"]) == pytest.approx(us / made.group_us[g][0])


def test_the_heat_map_is_drawn_for_few_and_many_groups() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert picture(_table(1), "png")[:8] == b"\x89PNG\r\n\x1a\n"
    assert "90 groups, in the order of the model" in picture(_table(90), "svg").decode()
    svg = picture(_table(), "svg")
    assert svg == picture(_table(), "svg")
    for text in ("layer.1", "11.0", "2.0", "10.0%", "a cpu; clock: cpu"):
        assert text in svg.decode()


def test_the_registry_knows_it(tmp_path: Path) -> None:
    made = _table()
    assert load_record(made.save(tmp_path / "latency.json")) == made
    assert registry.formats_of(made) == ("json", "md", "csv", "png", "svg")
