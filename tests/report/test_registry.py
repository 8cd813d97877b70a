"""The table of what is rendered how: every kind, every format, and clear refusals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from trade_offs import small_trade_off

from pyquant.errors import ArgumentError, CheckpointError
from pyquant.report import registry
from pyquant.report.records.record import load_record, save_record


def test_a_saved_record_is_rendered_in_every_format_that_it_has(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    record = small_trade_off()
    loaded = load_record(save_record(tmp_path / "one.json", record))
    assert loaded == record
    written = registry.write(loaded, tmp_path / "new" / "folder", "one")
    assert [path.name for path in written] == ["one.json", "one.md", "one.csv", "one.png", "one.svg", "one.html"]
    assert sorted(path.name for path in written) == sorted(p.name for p in (tmp_path / "new" / "folder").iterdir())
    assert load_record(written[0]) == record


def test_every_kind_in_the_table_names_a_module_with_formats() -> None:
    from importlib import import_module

    known = {"md", "csv", "png", "svg", "html"}
    for kind, module in registry.MODULES.items():
        formats = import_module(module).FORMATS
        assert formats, kind
        assert set(formats) <= known, kind


def test_refusals_name_what_there_is(tmp_path: Path) -> None:
    record = small_trade_off()
    with pytest.raises(ArgumentError, match=r"'?pdf'?.*trade-off: json, md, csv, png, svg, html"):
        registry.render(record, "pdf")
    with pytest.raises(ArgumentError, match="pdf"):
        registry.write(record, tmp_path / "new", "x", ("md", "pdf"))
    assert not (tmp_path / "new").exists()  # nothing is written before everything is rendered

    @dataclass(frozen=True)
    class Other:
        value: int

    with pytest.raises(ArgumentError, match=r"Other.*one of: .*trade-off"):
        registry.formats_of(Other(1))
    (tmp_path / "bad.json").write_text('{"kind": "nonsense", "version": 1}')
    with pytest.raises(CheckpointError, match=r"nonsense.*trade-off"):
        load_record(tmp_path / "bad.json")


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("name", "kind"), [("gemm", "GemmReport"), ("model", "Figures")])
def test_files_from_before_kinds_are_read(name: str, kind: str, tmp_path: Path) -> None:
    found = load_record(ROOT / f"tests/report/records/fixtures/{name}_before_kinds.json")
    assert type(found).__name__ == kind
    assert load_record(save_record(tmp_path / "new.json", found)) == found
    assert [path.suffix for path in registry.write(found, tmp_path, "x", ("json", "md"))] == [".json", ".md"]


RESULTS = sorted((ROOT / "bench/results").glob("*/*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_results_of_the_benchmarks_are_read_and_rendered(file: Path) -> None:
    assert registry.render(load_record(file), "md").startswith(b"#")


def test_results_of_every_benchmark_on_cpus_are_kept() -> None:
    names = {file.stem for file in RESULTS}
    assert {"cpu_linear", "cpu_linear_one_thread", "calib", "fake_quantize", "qat_step", "mlp"} <= names
