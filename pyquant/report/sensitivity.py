"""A SensitivityReport as Markdown and CSV; FORMATS is what the registry finds here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pyquant.report.plot import in_forms
from pyquant.report.records.environment import Environment
from pyquant.report.records.sensitivity import SensitivityReport, SensitivityStep
from pyquant.report.render import bullets, csv_text, environment_lines, page, section, table, table_of_columns
from pyquant.report.sensitivity_plot import picture

_ROWS = 40
_COLUMNS: Final = (
    "row",
    "group",
    "layers",
    "weights",
    "format",
    "loss",
    "sensitivity",
    "task",
    "drop",
    "latency_us",
    "suspect",
)
MODES: Final = {
    "one_at_a_time": "one group lowered at a time",
    "leave_one_out": "everything lowered but one group",
    "cumulative": "one group after another lowered, the least sensitive first",
}


def to_csv(record: SensitivityReport) -> str:
    """A row a cell (group and format), then one for each cumulative step; exact numbers, empty where not measured."""
    rows: list[tuple[object, ...]] = []
    for g, f in record.cells():
        group = record.groups[g]
        task = None if record.task is None else record.task.table[g][f]
        us = None if record.latency is None else record.latency.table[g][f]
        mode = record.mode if record.mode != "cumulative" else "one_at_a_time"
        rows.append(
            (
                mode,
                group.name,
                " ".join(group.layers),
                group.numel,
                record.formats[f],
                record.loss[g][f],
                record.sensitivity(g, f),
                task,
                record.drop(task),
                us,
                group.suspect,
            )
        )
    for step in record.steps:
        rows.append(
            (
                "step",
                step.group,
                "",
                "",
                step.format,
                step.loss,
                None,
                step.task,
                record.drop(step.task),
                step.latency_us,
                "",
            )
        )
    return csv_text(_COLUMNS, rows)


def to_markdown(record: SensitivityReport) -> str:
    """For people: losses, the user's metric and latency side by side, what skipping gains, steps, what it cost."""
    summary = f"{len(record.groups)} groups of layers, formats {', '.join(record.formats)}; {MODES[record.mode]}."
    parts = [
        f"# Sensitivity of {record.model}: {record.metric}, {record.mode.replace('_', ' ')}",
        f"{summary} Losses in {record.unit}, scored on {record.scored_on}. Cost: {record.cost.line()}.",
        baselines_table(record),
        "## Groups, the most sensitive first",
        groups_table(record),
    ]
    if record.mode == "leave_one_out":
        parts.append("`gain` is by how much the loss falls when the group is left out.")
    for format in record.formats[1:]:
        if steps := [s for s in record.steps if s.format == format]:
            parts.append(section(f"One after another in {format}", _steps(record, steps)))
            parts.append(_accumulation(record, format, steps))
    for format in record.formats[1:] if record.additive and record.mode != "cumulative" else ():
        if record.ranking(format):
            parts.append(section(f"What keeping groups in floating point gains: {format}", _skips(record, format)))
    parts.append(section("Refused", bullets(record.refusals)))
    fields = Environment.__dataclass_fields__
    if record.environment and set(record.environment) <= set(fields):
        parts.append(environment_lines(Environment(**record.environment)))
    return page(parts)


def groups_table(record: SensitivityReport) -> str:
    """The table of groups, in a form that also reads well in a terminal."""
    word = "gain" if record.mode == "leave_one_out" else "loss"
    order = record.ranking()
    at = {group.name: g for g, group in enumerate(record.groups)}
    order += [name for name in at if name not in order]
    shown = [at[name] for name in order[:_ROWS]]
    columns = {"group": order[:_ROWS], "weights": [f"{record.groups[g].numel:,}".replace(",", " ") for g in shown]}
    for f, name in list(enumerate(record.formats))[1:]:
        columns[f"{name} {word}"] = [
            "refused" if record.loss[g][f] is None else short(record.sensitivity(g, f)) for g in shown
        ]
        if record.task is not None and any(row[f] is not None for row in record.task.table):
            columns[f"{name} metric"] = [short(record.task.table[g][f]) for g in shown]
        if record.latency is not None:
            columns[f"{name} us"] = [_us(record.latency.table[g][f], record.latency.float_us) for g in shown]
    columns["often sensitive"] = [record.groups[g].suspect for g in shown]
    more = f"\n\n{_ROWS} of {len(order)}; all of them are in the CSV." if len(order) > _ROWS else ""
    return table_of_columns(columns) + more


def short(value: float | None) -> str:
    """A loss to three digits."""
    return "-" if value is None else f"{value:.3g}"


def baselines_table(record: SensitivityReport) -> str:
    """What the model has with everything in one format, as far as it is known; '' where that is nothing."""
    losses = ["0", *map(short, record.uniform[1:])]
    columns: dict[str, Sequence[str]] = {"everything in": record.formats, "loss": losses}
    if record.task is not None:
        columns["metric"] = [short(value) for value in record.task.uniform]
    if record.latency is not None:
        columns["latency us (predicted)"] = [_us(us, record.latency.float_us) for us in record.latency.uniform]
    return "" if len(columns) == 2 and set(losses[1:]) <= {"-"} else table_of_columns(columns)


def _steps(record: SensitivityReport, steps: Sequence[SensitivityStep]) -> str:
    columns = {"lowered": [str(i) for i in range(1, len(steps) + 1)], "group": [step.group for step in steps]}
    columns[f"loss ({record.step_unit})"] = [short(step.loss) for step in steps]
    if record.task is not None:
        columns["metric"] = [short(step.task) for step in steps]
    if record.latency is not None:
        columns["latency us"] = [_us(step.latency_us, record.latency.float_us) for step in steps]
    return table_of_columns(columns)


def _accumulation(record: SensitivityReport, format: str, steps: Sequence[SensitivityStep]) -> str:
    f = record.formats.index(format)
    singles = [row[f] or 0.0 for row in record.loss]
    whole = math.fsum(singles)
    if not record.additive or record.unit != record.step_unit or whole <= 0:
        return ""
    return (
        f"Single losses add up to {short(whole)}; all together cost {short(steps[-1].loss)}, "
        f"{steps[-1].loss / whole:.2f} times as much."
    )


def _skips(record: SensitivityReport, format: str) -> str:
    """What is left of the predicted loss when the most sensitive groups stay in floating point."""
    order, left = record.predicted_rest(format)
    names = ["none", *(f"+ {name}" for name in order)]
    rows = [[k, name, short(loss)] for k, (name, loss) in enumerate(zip(names, left, strict=True))]
    return table(["kept", "group", f"predicted loss of the rest ({record.unit})"], rows[: _ROWS // 2])


def _us(value: float | None, floats: float) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" + (f" ({value / floats - 1:+.1%})" if floats > 0 and value != floats else "")


FORMATS: Final = {"md": to_markdown, "csv": to_csv, **in_forms(picture)}
