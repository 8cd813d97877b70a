"""The report of bench.minilm: its page, its picture, and its file, which `pyquant report` reads as any other."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.minilm import report as minilm  # noqa: E402
from bench.minilm.report import ModelReport, ModelRow, model_markdown, model_png  # noqa: E402
from pyquant.errors import UnsupportedError  # noqa: E402
from pyquant.report.records.bench import Bar  # noqa: E402
from pyquant.report.records.environment import Environment  # noqa: E402
from pyquant.report.records.figures import figures_of  # noqa: E402
from pyquant.report.records.record import load_record, plain_of, save_record  # noqa: E402
from pyquant.report.registry import render  # noqa: E402


def model_report() -> ModelReport:
    machine = Environment("cpu", "Some CPU", [], 2, 1, "2.13.0", "3.11", "Linux x86_64", "0.1.0")
    rows = [
        ModelRow("fp32", 4_000_000, {"batch 1": 10.0}, {"batch 1": 1.0}, 1.0, 1.0, 1.0),
        ModelRow(
            "int8", 1_000_000, {"batch 1": 2.5}, {"batch 1": 4.0}, 0.9975, 0.99, 0.95, "A bad one.", 9, True, True
        ),
        ModelRow("odd", 1_000_000, {"batch 1": 2.5}, {"batch 1": 4.0}, 0.9, 0.8, 0.5, "Worse.", 9, False, True),
    ]
    return ModelReport(machine, "toy", "3 sentences", "fp32", rows, [Bar("cosine", 0.997, 0.9975, unit="")])


def test_model_markdown_tells_worst_and_reload() -> None:
    text = model_markdown(model_report())
    for wanted in ("4.0", "2.50 (4.00)", "0.99750", "A bad one.", "bits equal", "BITS DIFFER", "95.0%"):
        assert wanted in text, wanted


def test_the_picture_has_a_panel_a_question_and_honest_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert model_png(model_report())[:8] == b"\x89PNG\r\n\x1a\n"
    figures = []
    monkeypatch.setattr(minilm, "saved", lambda figure, caption: figures.append(figure))
    model_png(model_report())
    drawn = [axis for axis in figures[0].axes if axis.has_data()]
    assert len(drawn) == 3
    assert all(axis.get_xlim()[0] == 0 for axis in drawn)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no rows"):
        model_png(replace(model_report(), rows=[]))


def test_its_file_is_a_table_of_figures(tmp_path: Path) -> None:
    saved = load_record(save_record(tmp_path / "minilm.json", figures_of(model_report())))
    assert [row["cosine_mean"] for row in saved.rows("rows")] == [1.0, 0.9975, 0.9]
    assert [row["latency_ms batch 1"] for row in saved.rows("rows")] == [10.0, 2.5, 2.5]
    assert b"A bad one." in render(saved, "md")


def test_files_of_the_kind_that_it_had_are_read(tmp_path: Path) -> None:
    older = tmp_path / "minilm.json"
    older.write_text(json.dumps({"kind": "model", "version": 1, **plain_of(model_report())}))
    read, now = load_record(older), figures_of(model_report())
    assert (read.tables, read.bars, read.environment) == (now.tables, now.bars, now.environment)
