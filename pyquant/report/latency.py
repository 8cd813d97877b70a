"""A LatencyTable as Markdown, CSV and a heat map; FORMATS is what the registry finds here."""

from __future__ import annotations

import math
from typing import Any, Final

from pyquant.report.plot import in_forms, new_figure, saved, without_frame
from pyquant.report.records.latency import LatencyTable, MeasuredConfig
from pyquant.report.render import bullets, csv_text, page, section, table

_MACHINE = ("cpu", "gpu", "driver", "cuda", "threads", "torch", "pyquant")
_DARK = 0.6  # how far from 1 a ratio is whose colour wants white digits
_UNRELIABLE = 0.25  # of the median error: a tenth is usual
_MOST_LABELS = 80  # rows of a picture that can still be read one by one


def to_csv(record: LatencyTable) -> str:
    """A row a group and format: microseconds with their interval, and against the first format; refused ones empty."""
    rows: list[tuple[object, ...]] = [("", "", "", record.base_us, "", "", "")]
    for group, layers, row, intervals in zip(
        record.groups, record.layers, record.group_us, record.interval_us, strict=True
    ):
        for name, us, interval in zip(record.formats, row, intervals, strict=True):
            figures = ("", "", "", "") if us is None or interval is None else (us, *interval, _ratio(us, row[0]))
            rows.append((group, " ".join(layers), name, *figures))
    return csv_text(["group", "layers", "format", "us", "low_us", "high_us", "ratio"], rows, 10)


def to_markdown(record: LatencyTable) -> str:
    """For people: every group in every format, whole models measured and predicted, and what it all belongs to."""
    shown = [*record.groups, "everything else"]
    rows = [*record.group_us, (record.base_us,) * len(record.formats)]
    totals = [_total([row[f] for row in rows]) for f in range(len(record.formats))]
    cells = [[name, *map(_us, row)] for name, row in zip(shown, rows, strict=True)]
    inputs = [f"{key} {value}" for key, value in record.fingerprint.items() if key.startswith("input ")]
    machine = [f"{key} {record.fingerprint[key]}" for key in _MACHINE if record.fingerprint.get(key)]
    return page(
        [
            "# Latency of layers",
            _summary(record),
            section("Groups, in microseconds", table(["group", *record.formats], [*cells, ["together", *totals]])),
            section("Borders", _borders(record)),
            section("Whole models", _whole(record)),
            bullets(record.notes),
            "; ".join([*machine, *inputs, f"clock {record.clock}", f"{record.rounds} rounds"]),
        ]
    )


def _summary(record: LatencyTable) -> str:
    text = f"{len(record.groups)} groups in {len(record.formats)} formats, measured in {record.rounds} rounds"
    if record.bias is None or record.median_error is None:
        return text + "; nothing was held out, so how well sums predict whole models is not known."
    summary = (
        f"{text}. {len(record.held_out)} random configurations, which the table did not see: predicted / measured "
        f"{record.bias:.3f} (bias, the median), median error {record.median_error:.1%}, worst {record.worst_error:.1%}."
    )
    if record.median_error <= _UNRELIABLE:
        return summary
    return (
        f"{summary}\n\n**These figures predict little**: most often another program kept the machine busy. Measure "
        "again on a quiet one, with more seconds, or on one thread."
    )


def _borders(record: LatencyTable) -> str:
    header = ["between", "formats", "us"]
    rows = [
        [f"{record.groups[g]}, {record.groups[g + 1]}", f"{record.formats[a]}, {record.formats[b]}", _us(us)]
        for g, border in enumerate(record.border_us or ())
        for a, row in enumerate(border)
        for b, us in enumerate(row)
        if us
    ]
    return table(header, rows) if rows else "None that cost anything."


def _whole(record: LatencyTable) -> str:
    def row(name: str, one: MeasuredConfig) -> list[str]:
        interval = f"{one.low_us:.1f} .. {one.high_us:.1f}"
        error = f"{one.predicted_us / one.measured_us - 1:+.1%}" if one.measured_us > 0 else "-"
        return [name, f"{one.measured_us:.1f}", interval, f"{one.predicted_us:.1f}", error]

    rows = [row(f"uniform {_kinds(record, one)}", one) for one in record.uniform]
    rows += [row(f"held out: {_kinds(record, one)}", one) for one in record.held_out]
    return table(["configuration", "measured [us]", "interval [us]", "predicted [us]", "error"], rows)


def _kinds(record: LatencyTable, one: MeasuredConfig) -> str:
    """How many groups have which format; of a uniform configuration the format."""
    counts = [(one.config.count(f), name) for f, name in enumerate(record.formats)]
    used = [(n, name) for n, name in counts if n]
    return used[0][1] if len(used) == 1 else ", ".join(f"{n} {name}" for n, name in used)


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _total(values: list[float | None]) -> str:
    present = [v for v in values if v is not None]
    return f"{math.fsum(present):.1f}" if len(present) == len(values) else "-"


def _ratio(us: float, base: float | None) -> float:
    return us / base if base else math.nan


def picture(record: LatencyTable, form: str) -> bytes:
    """Colours say what share of the first format's time a format takes; numbers say microseconds.

    Raises UnsupportedError where matplotlib is not installed.
    """
    groups, formats = len(record.groups), len(record.formats)
    height = max(2.8, 1.5 + 0.24 * min(groups, _MOST_LABELS))
    figure, axes = new_figure(3.2 + 1.5 * formats, height)
    ratios = [[math.nan if us is None else _ratio(us, row[0]) for us in row] for row in record.group_us]
    image = axes.imshow(ratios, cmap="coolwarm", vmin=0.0, vmax=2.0, aspect="auto")
    axes.set_xticks(range(formats), [name.replace("(", "\n(") for name in record.formats])
    axes.xaxis.tick_top()
    if groups <= _MOST_LABELS:
        axes.set_yticks(range(groups), record.groups, fontsize=7)
        for g, row in enumerate(record.group_us):
            for f, us in enumerate(row):
                color = "white" if abs(ratios[g][f] - 1) > _DARK else "black"
                axes.text(f, g, _us(us), ha="center", va="center", fontsize=7, color=color)
    else:
        axes.set_ylabel(f"{groups} groups, in the order of the model")
    without_frame(axes, tuple(axes.spines))
    bar: Any = figure.colorbar(image, ax=axes, fraction=0.05)
    bar.set_label(f"time / time in {record.formats[0]}", fontsize=8)
    error = "" if record.median_error is None else f"; sums miss whole models by {record.median_error:.1%} (median)"
    axes.set_title(f"Microseconds of each group{error}", fontsize=9, pad=14)
    machine = "; ".join(record.fingerprint[key] for key in ("cpu", "gpu") if record.fingerprint.get(key))
    return saved(figure, f"{machine}; clock: {record.clock}", form, width=100, size=7)


FORMATS: Final = {"md": to_markdown, "csv": to_csv, **in_forms(picture)}
