"""Sensitivity reports as text and pictures: every figure of the record is there, nothing missing is invented."""

from __future__ import annotations

import csv
import dataclasses
import io

import pytest

from pyquant.errors import ArgumentError
from pyquant.report import registry
from pyquant.report.records.sensitivity import (
    SensitivityCost,
    SensitivityGroup,
    SensitivityLatency,
    SensitivityReport,
    SensitivityStep,
    SensitivityTask,
)

NAMES = ("embed.proj", "block.q+block.k", "head")


def _report(
    mode: str = "one_at_a_time", metric: str = "kl", additive: bool = True, groups: int = 3
) -> SensitivityReport:
    names = NAMES if groups == 3 else tuple(f"layer{i}" for i in range(groups))
    loss = tuple((0.0, 1e-4 * (g + 1), None if g == 0 else 0.01 * (g + 1)) for g in range(groups))
    steps = (
        SensitivityStep("int8", NAMES[0], 1e-4, 0.9, 110.0),
        SensitivityStep("int8", NAMES[1], 3.5e-4, 0.85, 100.0),
        SensitivityStep("int8", NAMES[2], 7.5e-4, 0.8, 90.0),
    )
    whole = (0.0, 7.5e-4, None)
    return SensitivityReport(
        "Net",
        metric,
        "nats per token",
        mode,
        ("fp32", "int8", "int4"),
        tuple(SensitivityGroup(n, (n,), 1000 * (g + 1), "first" if g == 0 else "") for g, n in enumerate(names)),
        loss,
        additive,
        "nats per token",
        whole if mode != "one_at_a_time" else (0.0, None, None),
        steps if mode == "cumulative" else (),
        SensitivityTask(0.95, True, tuple((0.95, 0.9, None) for _ in names), (0.95, 0.8, None)),
        SensitivityLatency(120.0, ((120.0, 110.0, None), *((120.0, 110.0, 99.0),) * (groups - 1)), (120.0, 90.0, 70.0)),
        ("embed.proj: int4: because",),
        SensitivityCost(8, 28, 0, 13, 7),
        "4 batches, given apart",
    )


@pytest.mark.parametrize("mode", ["one_at_a_time", "leave_one_out", "cumulative"])
def test_the_markdown_has_every_figure(mode: str) -> None:
    text = registry.render(_report(mode), "md").decode()
    for part in (
        "# Sensitivity of Net: kl",
        "nats per token",
        "given apart",
        "28 forward passes",
        "refused",
        "0.9",
        "110.0 (-8.3%)",
        "first",
        "embed.proj: int4: because",
    ):
        assert part in text, part
    assert "7 calls of eval_fn" in text
    assert ("0.00075" in text) == (mode != "one_at_a_time")
    rows = [line for line in text.splitlines() if line.startswith("| ") and NAMES[2] in line]
    assert rows
    if mode == "cumulative":
        assert "Single losses add up to 0.0006; all together cost 0.00075, 1.25 times as much." in text


def test_the_most_sensitive_group_comes_first() -> None:
    lines = registry.render(_report(), "md").decode().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| group"))
    assert [line.split("|")[1].strip() for line in lines[start + 2 : start + 5]] == [NAMES[2], NAMES[1], NAMES[0]]


def test_the_csv_holds_exact_numbers() -> None:
    report = _report("cumulative")
    rows = list(csv.DictReader(io.StringIO(registry.render(report, "csv").decode())))
    cells = [row for row in rows if row["row"] == "one_at_a_time"]
    assert [(r["group"], r["format"], float(r["loss"])) for r in cells] == [
        (report.groups[g].name, report.formats[f], report.loss[g][f]) for g, f in report.cells()
    ]
    assert [float(r["loss"]) for r in rows if r["row"] == "step"] == [s.loss for s in report.steps]
    assert all(float(r["drop"]) == 0.95 - float(r["task"]) for r in rows if r["task"])


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (_report("cumulative"), "single losses added"),
        (_report(metric="error", additive=False), "are no losses"),
        (_report(groups=70), "50 most sensitive of 70"),
    ],
)
def test_pictures_are_drawn(report: SensitivityReport, text: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    svg = registry.render(report, "svg").decode()
    assert "Sensitivity of Net" in svg
    assert text in svg


def test_equal_records_give_equal_pictures() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    report = _report("leave_one_out")
    assert registry.render(report, "png").startswith(b"\x89PNG")
    assert registry.render(report, "svg") == registry.render(report, "svg")


def test_a_bare_report_is_drawn_too() -> None:
    bare = dataclasses.replace(_report(), task=None, latency=None, refusals=())
    text = registry.render(bare, "md").decode()
    assert "latency" not in text
    assert "metric" not in text
    with pytest.raises(ArgumentError, match="html"):
        registry.render(bare, "html")
