"""Which record is drawn how: one table from the kind of a record to the module that renders it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from pyquant.errors import ArgumentError, UnsupportedError
from pyquant.io import strict_json
from pyquant.io.atomic import write_file
from pyquant.report.records.record import kind_of, to_plain

# Kind of record -> the module that draws it. A new kind is a dataclass in pyquant.report.records and a line here; the
# module has FORMATS: {ending of the file: function of the record -> text or bytes}. JSON needs no entry.
MODULES: Final[dict[str, str]] = {
    "calibration-bench": "pyquant.report.calibration_bench",
    "errors": "pyquant.report.error",
    "figures": "pyquant.report.figures",
    "gemm": "pyquant.report.gemm",
    "latency-table": "pyquant.report.latency",
    "onnx-export": "pyquant.report.onnx_export",
    "qat": "pyquant.report.qat",
    "search": "pyquant.report.search",
    "sensitivity": "pyquant.report.sensitivity",
    "trade-off": "pyquant.report.trade_off",
}
Renderer = Callable[[Any], "str | bytes"]


def formats_of(record: Any) -> tuple[str, ...]:
    """The formats that a record can be rendered to, 'json' first. Raises ArgumentError for what is no such record."""
    return ("json", *_renderers(record))


def render(record: Any, form: str) -> bytes:
    """A record in one format, as the bytes of a file.

    form  'json', 'md', 'csv', 'png', 'svg', 'html': what formats_of lists.
    Raises ArgumentError for a format that this kind has not; UnsupportedError where pictures need matplotlib.
    """
    renderers = _renderers(record)
    if form == "json":
        return strict_json.compact(to_plain(record))
    if form not in renderers:
        raise ArgumentError("format", form, f"for a {_kind(record)}: " + ", ".join(formats_of(record)))
    content = renderers[form](record)
    return content.encode("utf-8") if isinstance(content, str) else content


def write(record: Any, folder: str | os.PathLike[str], stem: str, forms: tuple[str, ...] | None = None) -> list[Path]:
    """Files `stem`.md, `stem`.png ... of a record, each whole or not at all. -> their paths.

    forms  None: every format that the record has. All are rendered before the first is written.
    Raises as render; OSError where the folder cannot be written.
    """
    return _write({form: render(record, form) for form in forms or formats_of(record)}, folder, stem)


def write_files(record: Any, **paths: str | os.PathLike[str] | None) -> None:
    """The files that are wanted of a record: {format: path, or None}. Raises as render."""
    for form, path in paths.items():
        if path:
            write_file(path, render(record, form))


def write_possible(record: Any, folder: str | os.PathLike[str], stem: str) -> tuple[list[Path], str]:
    """write() in every format that can be made here. -> paths, and one line about the others; '' where there is none.

    Without matplotlib there are no pictures; everything else of a record needs no package.
    """
    rendered: dict[str, bytes] = {}
    missing: dict[str, str] = {}
    for form in formats_of(record):
        try:
            rendered[form] = render(record, form)
        except UnsupportedError as error:
            missing[form] = str(error)
    left_out = f"left out: {', '.join(missing)}: {next(iter(missing.values()))}" if missing else ""
    return _write(rendered, folder, stem), left_out


def _write(rendered: Mapping[str, bytes], folder: str | os.PathLike[str], stem: str) -> list[Path]:
    return [write_file(Path(folder) / f"{stem}.{form}", data) for form, data in rendered.items()]


def _kind(record: Any) -> str:
    kind = kind_of(record)
    if kind is None or kind not in MODULES:
        raise ArgumentError("record", kind or type(record).__name__, "one of: " + ", ".join(sorted(MODULES)))
    return kind


def _renderers(record: Any) -> Mapping[str, Renderer]:
    formats: Mapping[str, Renderer] = importlib.import_module(MODULES[_kind(record)]).FORMATS
    return formats
