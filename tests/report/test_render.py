"""Records become JSON, CSV and Markdown without losing a figure."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from pyquant.report.gemm import gemm_markdown, to_csv
from pyquant.report.records.bench import Bar, Ceiling, GemmReport, GemmRow, Unavailable, Verdict
from pyquant.report.records.environment import Environment
from pyquant.report.records.record import from_plain
from pyquant.report.registry import render
from pyquant.report.render import bars_section, table, write_text

MACHINE = Environment(
    "cpu", "Some CPU", ["avx2"], 2, 1, "2.13.0", "3.11", "Linux x86_64", "0.1.0", command="python -m x"
)


def gemm_report() -> GemmReport:
    rows = [
        GemmRow(1, 64, 32, "base", False, 10.0, 1.0, 0.1, 5, floor_us=5.0, floor_kind="bytes", sqnr_db=140.0),
        GemmRow(1, 64, 32, "QLinear W8A8Dynamic", True, 2.5, 4.0, 0.1, 5, 2.0, "bytes", True, 40.0, "cpu linear"),
        GemmRow(1, 64, 32, "broken", True, 250.0, 0.04, 0.1, 5, exact=False),
        GemmRow(8, 64, 32, "base", False, 20.0, 1.0, 0.1, 5),
    ]
    return GemmReport(
        MACHINE,
        "base",
        rows,
        [Ceiling("copy", 12.5, "GB/s")],
        [Unavailable("peer|x", "no library", "M=1 K=64 N=32")] * 2,
        [Bar("speed", 3.0, 4.0), Bar("overhead", 6.0, 7.5, "<=", "us")],
        ["a note"],
    )


def test_json_round_trip_keeps_every_row() -> None:
    data = json.loads(render(gemm_report(), "json").decode())
    assert data["kind"] == "gemm"
    assert [row["candidate"] for row in data["rows"]] == ["base", "QLinear W8A8Dynamic", "broken", "base"]
    assert data["rows"][1]["of_floor"] == pytest.approx(0.8)
    assert [bar["passed"] for bar in data["bars"]] == [True, False]
    assert data["environment"]["command"] == "python -m x"


def gpu_report() -> GemmReport:
    floors = {"floor_us": 1.0, "floor_kind": "ops", "exact": True, "moved_bytes": 1000, "ops": 2e6, "peak": "int8"}
    rows = [
        GemmRow(1, 64, 32, "base", False, 10.0, 1.0, 0.1, 5, moved_bytes=4000, ops=2e6, peak="bf16"),
        GemmRow(1, 64, 32, "ours", True, 2.0, 5.0, 0.1, 5, **floors),
    ]
    ceilings = [Ceiling("copy", 1000.0, "GB/s"), Ceiling("bf16", 9e4, "Gop/s"), Ceiling("int8", 1.8e5, "Gop/s")]
    verdicts = [
        Verdict("1", "fast", "base", 5.0, 1.6, 1.75, 1),
        Verdict("2", "slow", "base", 0.5, 1.0, 2.0, 1),
        Verdict("3", "absent", "nobody", None, 1.0, 1.5, 0, "the peer did not run"),
    ]
    return GemmReport(MACHINE, "base", rows, ceilings, verdicts=verdicts)


def test_verdicts_are_told_in_every_form() -> None:
    text = gemm_markdown(gpu_report())
    lines = [line for line in text.splitlines() if "|" in line]
    assert any("fast" in line and "5.000x" in line and "PASS" in line and "1 shapes" in line for line in lines)
    assert any("slow" in line and "MISS" in line for line in lines)
    assert any("absent" in line and "not measured" in line and "the peer did not run" in line for line in lines)
    data = json.loads(render(gpu_report(), "json").decode())
    assert [v["verdict"] for v in data["verdicts"]] == ["PASS", "MISS", "not measured"]
    columns = next(csv.DictReader(io.StringIO(to_csv(gpu_report()))))
    assert (columns["moved_bytes"], columns["peak"]) == ("4000", "bf16")


def test_records_of_benchmarks_come_back_equal() -> None:
    for report in (gemm_report(), gpu_report()):
        assert from_plain(json.loads(render(report, "json").decode())) == report


def test_json_has_no_infinities() -> None:
    row = GemmRow(1, 1, 1, "a", False, 1.0, 1.0, 0.0, 1, sqnr_db=float("inf"))
    text = render(GemmReport(MACHINE, "a", [row]), "json").decode()
    assert json.loads(text, parse_constant=pytest.fail)["rows"][0]["sqnr_db"] == "inf"


def test_csv_has_one_line_a_row() -> None:
    lines = list(csv.DictReader(io.StringIO(to_csv(gemm_report()))))
    assert len(lines) == 4
    assert lines[1]["candidate"] == "QLinear W8A8Dynamic"
    assert float(lines[1]["ratio"]) == 4.0
    assert lines[3]["floor_us"] == ""


def test_gemm_markdown_tells_everything() -> None:
    text = gemm_markdown(gemm_report(), "Title")
    for wanted in (
        "# Title",
        "Some CPU",
        "`python -m x`",
        "## M = 1",
        "## M = 8",
        "2.5 (4.00x, 80%)",
        "NOT EXACT",
        "12 GB/s",
        "no library (2x)",
        "a note",
        "PASS",
        "FAIL",
    ):
        assert wanted in text, wanted


def test_bars_pass_and_fail_by_direction() -> None:
    assert Bar("x", 2.0, 2.0).passed
    assert not Bar("x", 2.0, 1.99).passed
    assert Bar("x", 2.0, 2.0, "<=").passed
    assert not Bar("x", 2.0, 2.01, "<=").passed
    assert not Bar("x", 2.0, float("nan")).passed
    assert bars_section([Bar("x", 2.0, 1.0)]).count("FAIL") == 1


def test_table_escapes_bars_and_pads() -> None:
    lines = table(["a", "long header"], [["x|y", 1]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert "x\\|y" in lines[2]


def test_write_text_replaces_whole_files(tmp_path: Path) -> None:
    path = write_text(tmp_path / "new" / "a.md", "one")
    assert write_text(path, "two").read_text() == "two"
    assert [p.name for p in path.parent.iterdir()] == ["a.md"]


def test_write_text_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.md", "one")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["a.md"]
