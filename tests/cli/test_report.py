"""`pyquant report` renders saved records, or says what is wrong and writes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from trade_offs import seed_trade_off, small_trade_off

from pyquant.cli.main import main
from pyquant.report.records.record import save_record


def test_named_formats_of_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (
        save_record(tmp_path / "one.json", small_trade_off()),
        save_record(tmp_path / "two.json", seed_trade_off()),
    )
    out = tmp_path / "out"
    assert main(["report", str(one), str(two), "--out", str(out), "--format", "md", "html"]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["one.html", "one.md", "two.html", "two.md"]
    assert capsys.readouterr().out.count("wrote ") == 4


def test_benchmarks_of_now_and_before_are_rendered(tmp_path: Path) -> None:
    fixtures = Path(__file__).resolve().parents[1] / "report/records/fixtures"
    before = [str(fixtures / f"{name}_before_kinds.json") for name in ("gemm", "model")]
    assert main(["report", *before, "--out", str(tmp_path / "a")]) == 0
    assert main(["report", str(tmp_path / "a/gemm_before_kinds.json"), "--out", str(tmp_path / "b")]) == 0
    for ending in ("json", "md", "csv"):
        first, again = (tmp_path / folder / f"gemm_before_kinds.{ending}" for folder in "ab")
        assert first.read_bytes() == again.read_bytes()
    assert "µs" in (tmp_path / "b/gemm_before_kinds.md").read_text()


def test_without_matplotlib_all_but_pictures_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    one, out = save_record(tmp_path / "one.json", small_trade_off()), tmp_path / "out"
    assert main(["report", str(one), "--out", str(out)]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["one.csv", "one.html", "one.json", "one.md"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("left out: png, svg: ")
    assert last.endswith("pip install matplotlib")
    assert main(["report", str(one), "--out", str(tmp_path / "asked"), "--format", "png"]) == 1  # asked for by name


@pytest.mark.parametrize(
    ("files", "words", "code", "told"),
    [
        (["one.json"], ["--format", "pdf"], 2, "json, md, csv, png, svg, html"),
        (["one.json", "sub/one.json"], [], 2, "two files called one"),
        (["missing.json"], [], 1, "missing.json"),
        (["bad.json"], [], 1, "allowed: "),
    ],
)
def test_refusals_write_nothing(
    files: list[str], words: list[str], code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one.json", "sub/one.json"):
        save_record(tmp_path / name, small_trade_off())
    (tmp_path / "bad.json").write_text("{}")
    out = tmp_path / "out"
    assert main(["report", *[str(tmp_path / name) for name in files], "--out", str(out), *words]) == code
    assert told in capsys.readouterr().err
    assert not out.exists()
