"""A SensitivityReport as Markdown and CSV; FORMATS is what the registry finds here."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from typing import Any, Final

from pyquant.report.records.environment import Environment
from pyquant.report.records.sensitivity import SensitivityReport
from pyquant.report.render import table
from pyquant.report.sensitivity_plot import to_png, to_svg

_ROWS = 40
MODES: Final = {
    "one_at_a_time": "one group lowered at a time",
    "leave_one_out": "everything lowered but one group",
    "cumulative": "one group after another lowered, the least sensitive first",
}


def to_csv(record: SensitivityReport) -> str:
    """A row a cell (group and format), then one for each cumulative step; exact numbers, empty where not measured."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["row", "group", "layers", "weights", "format", "loss", "sensitivity", "task", "drop", "latency_us",
                     "suspect"])  # fmt: skip
    for g, f in record.cells():
        group = record.groups[g]
        task = None if record.task is None else record.task.table[g][f]
        drop = None if task is None or record.task is None else record.task.drop(task)
        us = None if record.latency is None else record.latency.table[g][f]
        writer.writerow([
            record.mode if record.mode != "cumulative" else "one_at_a_time", group.name, " ".join(group.layers),
            group.numel, record.formats[f], *map(_cell, (record.loss[g][f], record.sensitivity(g, f), task, drop, us)),
            group.suspect,
        ])  # fmt: skip
    for step in record.steps:
        drop = None if step.task is None or record.task is None else record.task.drop(step.task)
        writer.writerow(["step", step.group, "", "", step.format,
                         *map(_cell, (step.loss, None, step.task, drop, step.latency_us)), ""])  # fmt: skip
    return out.getvalue()


def to_markdown(record: SensitivityReport) -> str:
    """For people: losses, the user's metric and latency side by side, what skipping gains, steps, what it cost."""
    summary = f"{len(record.groups)} groups of layers, formats {', '.join(record.formats)}; {MODES[record.mode]}."
    parts = [
        f"# Sensitivity of {record.model}: {record.metric}, {record.mode.replace('_', ' ')}",
        f"{summary} Losses in {record.unit}, scored on {record.scored_on}. Cost: {record.cost.line()}.",
        _baselines(record),
        "## Groups, the most sensitive first",
        groups_table(record),
    ]
    if record.mode == "leave_one_out":
        parts.append("`gain` is by how much the loss falls when the group is left out.")
    for format in record.formats[1:]:
        if steps := [s for s in record.steps if s.format == format]:
            parts += [f"## One after another in {format}", _steps(record, format), _accumulation(record, format, steps)]
    for format in record.formats[1:] if record.additive and record.mode != "cumulative" else ():
        if record.ranking(format):
            parts += [f"## What keeping groups in floating point gains: {format}", _skips(record, format)]
    if record.refusals:
        parts += ["## Refused", "\n".join(f"- {line}" for line in record.refusals)]
    fields = Environment.__dataclass_fields__
    if record.environment and set(record.environment) <= set(fields):
        environment = Environment(**record.environment)
        parts.append(f"{environment.line()}\n\nCommand: `{environment.command}`")
    return "\n\n".join(part for part in parts if part) + "\n"


def groups_table(record: SensitivityReport) -> str:
    """The table of groups, in a form that also reads well in a terminal."""
    lowered = range(1, len(record.formats))
    word = "gain" if record.mode == "leave_one_out" else "loss"
    header = ["group", "weights"]
    for f in lowered:
        name = record.formats[f]
        header += [f"{name} {word}"]
        header += (
            [f"{name} metric"] if record.task is not None and any(row[f] is not None for row in _tasks(record)) else []
        )
        header += [f"{name} us"] if record.latency is not None else []
    header.append("often sensitive")
    order = record.ranking()
    at = {group.name: g for g, group in enumerate(record.groups)}
    order += [name for name in at if name not in order]
    rows = []
    for name in order[:_ROWS]:
        g = at[name]
        row = [name, f"{record.groups[g].numel:,}".replace(",", " ")]
        for f in lowered:
            row.append(short(record.sensitivity(g, f)) if record.loss[g][f] is not None else "refused")
            if record.task is not None and any(r[f] is not None for r in _tasks(record)):
                row.append(short(record.task.table[g][f]))
            if record.latency is not None:
                row.append(_us(record.latency.table[g][f], record.latency.float_us))
        rows.append([*row, record.groups[g].suspect])
    more = f"\n\n{_ROWS} of {len(order)}; all of them are in the CSV." if len(order) > _ROWS else ""
    return table(header, rows) + more


def short(value: float | None) -> str:
    """A loss to three digits.

    Example:
        >>> short(0.00012345), short(None), short(0.0)
        ('0.000123', '-', '0')
    """
    return "-" if value is None else f"{value:.3g}"


def _tasks(record: SensitivityReport) -> Any:
    return record.task.table if record.task is not None else ()


def _baselines(record: SensitivityReport) -> str:
    header, floats = ["everything in", "loss"], [record.formats[0], "0"]
    rows = [floats, *([name, short(record.uniform[f])] for f, name in enumerate(record.formats) if f)]
    if record.task is not None:
        header.append("metric")
        for row, value in zip(rows, record.task.uniform, strict=True):
            row.append(short(value))
    if record.latency is not None:
        header.append("latency us (predicted)")
        for row, us in zip(rows, record.latency.uniform, strict=True):
            row.append(_us(us, record.latency.float_us))
    if len(header) == 2 and all(row[1] == "-" for row in rows[1:]):
        return ""
    return table(header, rows)


def _steps(record: SensitivityReport, format: str) -> str:
    header = ["lowered", "group", f"loss ({record.step_unit})"]
    header += ["metric"] if record.task is not None else []
    header += ["latency us"] if record.latency is not None else []
    rows = []
    for i, step in enumerate([s for s in record.steps if s.format == format]):
        row = [str(i + 1), step.group, short(step.loss)]
        row += [short(step.task)] if record.task is not None else []
        row += [_us(step.latency_us, record.latency.float_us)] if record.latency is not None else []
        rows.append(row)
    return table(header, rows)


def _accumulation(record: SensitivityReport, format: str, steps: list[Any]) -> str:
    """How errors add up through the layers."""
    f = record.formats.index(format)
    singles = [row[f] or 0.0 for row in record.loss]
    whole = math.fsum(singles)
    if not record.additive or record.unit != record.step_unit or whole <= 0:
        return ""
    return (f"Single losses add up to {short(whole)}; all together cost {short(steps[-1].loss)}, "
            f"{steps[-1].loss / whole:.2f} times as much.")  # fmt: skip


def _skips(record: SensitivityReport, format: str) -> str:
    """What is left of the predicted loss when the most sensitive groups stay in floating point."""
    f = record.formats.index(format)
    order = record.ranking(format)
    at = {group.name: g for g, group in enumerate(record.groups)}
    single = [record.sensitivity(at[name], f) or 0.0 for name in order]
    whole = record.uniform[f] if record.mode == "leave_one_out" else math.fsum(max(0.0, s) for s in single)
    left = [whole or 0.0]
    for s in single:
        left.append(left[-1] - (s if record.mode == "leave_one_out" else max(0.0, s)))
    if record.mode != "leave_one_out":
        left[-1] = 0.0  # of sums in another order something in the last digit may be left
    rows = [["0", "none", short(left[0])]]
    rows += [[str(k), f"+ {name}", short(left[k])] for k, name in enumerate(order, 1)]
    return table(["kept", "group", f"predicted loss of the rest ({record.unit})"], rows[: _ROWS // 2])


def _us(value: float | None, floats: float) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" + (f" ({value / floats - 1:+.1%})" if floats > 0 and value != floats else "")


def _cell(value: float | None) -> str:
    return "" if value is None else repr(value)


FORMATS: Final[dict[str, Callable[[SensitivityReport], str | bytes]]] = {
    "md": to_markdown,
    "csv": to_csv,
    "png": to_png,
    "svg": to_svg,
}
