"""Every JSON that the project writes is read back: records of every kind by load_record, the rest by named readers."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest

from pyquant.cli.main import main
from pyquant.report import registry
from pyquant.report.records.environment import Environment
from pyquant.report.records.figures import figures_of
from pyquant.report.records.record import KINDS, import_kinds, load_record, save_record

ROOT = Path(__file__).resolve().parents[3]
import_kinds()
OURS = sorted(kind for kind, (cls, _) in KINDS.items() if cls.__module__.startswith("pyquant."))
MACHINE = Environment("cpu", "a CPU", ["avx2"], 2, 2, "2.13", "3.11", "Linux", "1.0")

# Files that make JSON by themselves, without save_record -> who reads it.
OTHER_WRITERS = {
    "bench/depth.py": "itself; what its process says",
    "pyquant/cli/doctor.py": "printed for scripts",
    "pyquant/cli/inspect.py": "printed for scripts",
    "pyquant/cli/tune.py": "printed for scripts",
    "pyquant/cli/verify.py": "printed for scripts",
    "pyquant/io/compressed_tensors.py": "itself; digests of a checkpoint's entries",
    "pyquant/io/journal.py": "itself",
    "pyquant/io/manifest.py": "itself; config.json and the index of a checkpoint",
    "pyquant/io/pretrained/quantized.py": "the config.json of its docstring's example",
    "pyquant/io/strict_json.py": "itself",
    "pyquant/mixed_precision": "digests and messages between processes, no file",
    "pyquant/ops/tuned.py": "itself; the table of tuned kernels",
    "pyquant/ptq/ranges_file.py": "itself; saved ranges",
    "pyquant/recipe/documents.py": "itself; recipes",
    "pyquant/report/registry.py": "load_record",
    "pyquant/report/trade_off_html.py": "the page that it is written into",
    "pyquant/report/records/record.py": "load_record",
    "bench/gpu/resume.py": "itself; which steps are done",
    "bench/lm/cnn.py": "itself; how a network in the cache was trained",
    "bench/lm/peers.py": "itself; messages between it and a rival's process",
    "bench/lm/run.py": "itself; digests and options that tell whether a journal is of the same run",
    "bench/lm/train.py": "itself, of a training that goes on; cloze lines for bench.lm",
    "bench/minilm/reload.py": "bench/minilm/__main__.py, its parent process",
    "tools/sanitize.py": "itself, of a run that goes on",
    "tools/wheels.py": "the SBOM beside a wheel, for other tools: CycloneDX",
}


def sample(hint: Any, depth: int = 0) -> Any:
    """A value of a type, with something in every list, mapping and optional field."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{f.name: sample(hints[f.name], depth + 1) for f in dataclasses.fields(hint)})  # type: ignore[operator]
    if origin in (typing.Union, types.UnionType):
        return sample(next(a for a in args if a is not type(None)), depth)
    if origin is list:
        return [sample(args[0], depth + 1)]
    if origin is tuple:
        return tuple(sample(a, depth + 1) for a in args if a is not Ellipsis)
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return {"text": sample(args[1], depth + 1)}
    return {str: "text", int: 3, float: 1.5, bool: True, Any: None}[hint]


@pytest.mark.parametrize("kind", OURS)
def test_every_kind_is_read_back_and_rendered_by_a_module(kind: str, tmp_path: Path) -> None:
    if kind != "latency-table":  # its fields must fit each other: test_latency.py reads one back
        value = sample(KINDS[kind][0])
        assert load_record(save_record(tmp_path / "one.json", value)) == value
    assert importlib.import_module(registry.MODULES[kind]).FORMATS["md"]


def test_there_are_as_many_kinds_as_are_drawn() -> None:
    assert sorted(registry.MODULES) == OURS


def test_records_are_read_by_a_process_that_has_imported_nothing_else() -> None:
    file = ROOT / "tests/report/records/fixtures/gemm_before_kinds.json"
    code = f"from pyquant.report.records.record import load_record; print(type(load_record({str(file)!r})).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.strip() == "GemmReport", done.stderr


RESULTS = sorted((ROOT / "bench/results").glob("*/*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_committed_result_becomes_a_page(file: Path, tmp_path: Path) -> None:
    assert main(["report", str(file), "--out", str(tmp_path), "--format", "md", "json"]) == 0
    assert (tmp_path / f"{file.stem}.md").read_text().startswith("# ")
    again = load_record(tmp_path / f"{file.stem}.json")
    assert again == load_record(file)


def test_numbers_of_a_report_from_before_kinds_are_kept() -> None:
    (file,) = (ROOT / "bench/results").glob("*/cpu_scaling.json")
    data, figures = json.loads(file.read_text()), load_record(file)
    (rows,) = [table for table in figures.tables if table.title == "rows"]
    speedup = [name for name in rows.header if name.startswith("speedup ")]
    assert len(rows.rows) == len(data["rows"])
    for cells, row in zip(rows.rows, data["rows"], strict=True):
        assert dict(zip(rows.header, cells, strict=True))["median_us 1"] == row["median_us"]["1"]
        assert len(speedup) == len(row["speedup"])
    assert [bar.measured for bar in figures.bars] == [bar["measured"] for bar in data["bars"]]


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    rise: list[float]
    share: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Report:
    environment: Environment
    seconds: float
    pairs: dict[str, list[tuple[float, float]]]
    rows: list[Row]
    names: tuple[str, ...] = ("a", "b")
    notes: tuple[str, ...] = ("a note",)


def test_any_report_of_dataclasses_becomes_figures(tmp_path: Path) -> None:
    report = Report(MACHINE, 2.5, {"t": [(1.0, math.inf)]}, [Row("x", [0.5, 1.0], {2: 1.9}), Row("y", [], {})])
    figures = load_record(save_record(tmp_path / "f.json", figures_of(report)))
    run, pairs, rows = figures.tables
    assert run.rows == [["seconds", 2.5], ["names", "a, b"]]
    assert pairs.rows == [["t", [1.0, math.inf]]]
    assert (rows.header, rows.rows) == (["name", "rise", "share 2"], [["x", [0.5, 1.0], 1.9], ["y", [], None]])
    page = registry.render(figures, "md").decode()
    assert "| x    | 0.5, 1 | 1.9     |" in page
    assert "- a note" in page


def writers() -> set[str]:
    making = re.compile(r"\bjson\.dumps?\(|\b(compact|pretty|lines)\((?!\))")
    files = [path for folder in ("pyquant", "bench", "tools", "examples") for path in (ROOT / folder).rglob("*.py")]
    names = {str(path.relative_to(ROOT)) for path in files if making.search(path.read_text())}
    return {"pyquant/mixed_precision" if re.match("pyquant/(mixed_precision|analyse)/", n) else n for n in names}


def test_every_writer_of_json_has_its_reader() -> None:
    assert writers() == set(OTHER_WRITERS)
