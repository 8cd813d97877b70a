"""Plain records of a run, their statistics, and their Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev
from typing import Final

from bench.lm.measure import PLAIN, Cell
from bench.lm.subject import PERPLEXITY, Subject
from pyquant import Recipe, recommended, scheme_from_name
from pyquant.recipe.recommended import NAMES
from pyquant.report.records.environment import Environment
from pyquant.report.render import bullets, page, section, table

FLOAT_ROW: Final = "float"
_KINDS: Final = {  # of recipes, for a subject; others are language models
    "MiniLM": ("encoder",),
    "ViT on digits": ("vision",),
    **dict.fromkeys(("ResNet on digits", "MobileNet on digits"), ("vision", "cnn")),  # what cnn-* has no name for
}
INTERVAL: Final = (
    "±: 95 % interval by Student's t over the paired items (windows, sentences, images) of the mean of all draws; it "
    "says nothing of other texts. Draws: the lowest and highest mean of a draw of calibration data"
)


@dataclass(frozen=True)
class LmRow:
    """One way to quantise one subject's model, over all draws.

    value      perplexity, or the mean loss.
    rise       mean of the paired differences of the losses from the float model's; half: of its 95 % interval;
               lowest, highest: means of single draws.
    right      share of hits, None where there are none; right_rise, right_half: as rise and half, of the hits.
    seconds, peak_mb   of quantising, means of the draws; state_mb: of parameters and buffers.
    note       of a rival: its version, or why there are no figures.
    """

    subject: str
    measure: str
    scheme: str
    method: str
    draws: int
    value: float | None = None
    rise: float | None = None
    half: float | None = None
    lowest: float | None = None
    highest: float | None = None
    right: float | None = None
    seconds: float | None = None
    peak_mb: float | None = None
    state_mb: float | None = None
    note: str = ""
    right_rise: float | None = None
    right_half: float | None = None


@dataclass(frozen=True)
class LmGoal:
    """A limit, in per cent of the float perplexity, and what the best way that is meant reached.

    verdict  'PASS': the whole interval keeps it; 'pass': the mean does; 'MISS': neither; 'not measured'.
    """

    name: str
    limit: float
    measured: float | None
    half: float | None
    by: str
    verdict: str


@dataclass(frozen=True)
class LmReport:
    """Everything of one run."""

    environment: Environment
    rows: list[LmRow]
    goals: list[LmGoal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def row_of(subject: Subject, scheme: str, method: str, cells: Sequence[Cell], floats: Cell, note: str = "") -> LmRow:
    """The statistics of one way. cells: one a draw."""
    means = [fmean(cell.losses) for cell in cells]
    base = fmean(floats.losses)
    rise, half = interval(_paired([cell.losses for cell in cells], floats.losses))
    value = fmean(means)
    memory = [cell.peak_bytes for cell in cells if cell.peak_bytes is not None]
    hits = [cell.hits for cell in cells if cell.hits]
    right_rise, right_half = interval(_paired(hits, floats.hits)) if hits else (None, None)
    return LmRow(
        subject.name,
        subject.measure,
        scheme,
        method,
        len(cells),
        math.exp(value) if subject.measure == PERPLEXITY else value,
        rise,
        half,
        min(means) - base,
        max(means) - base,
        fmean(map(fmean, hits)) if hits else None,
        fmean(cell.seconds for cell in cells),
        fmean(memory) / 1e6 if memory else None,
        cells[0].state_bytes / 1e6,
        note,
        right_rise,
        right_half,
    )


def _paired(draws: Sequence[Sequence[float]], floats: Sequence[float]) -> list[float]:
    """Item by item, the mean of the draws minus the float model's."""
    return [fmean(items) - of for *items, of in zip(*draws, floats, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t (infinite for one value)."""
    if len(values) < 2:
        return fmean(values), math.inf
    return fmean(values), student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def student_t(freedom: int) -> float:
    """The two-sided 95 % point of Student's t, exact for 1 and 2 degrees of freedom, within 0.5 % from 3 on.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    if freedom == 1:
        return 12.7062
    if freedom == 2:
        return 4.3027
    z, n = NormalDist().inv_cdf(0.975), freedom
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / n**power for power, term in enumerate(terms))


def judged(name: str, limit: float, rows: Sequence[LmRow]) -> LmGoal:
    """A goal for the best of some rows: their rise of perplexity, in per cent."""
    known = [row for row in rows if row.rise is not None and row.half is not None]
    if not known:
        return LmGoal(name, limit, None, None, "", "not measured")
    best = min(known, key=lambda row: row.rise)  # type: ignore[arg-type, return-value]
    rise, high = _percent(best.rise), _percent(best.rise + best.half)  # type: ignore[operator]
    verdict = "PASS" if high <= limit else "pass" if rise <= limit else "MISS"
    return LmGoal(name, limit, rise, high - rise, f"{best.scheme}, {best.method}".strip(", "), verdict)


def _percent(nats: float | None) -> float:
    return 100 * math.expm1(nats or 0.0)


def markdown(report: LmReport) -> str:
    """The report for people."""
    parts = [
        "# Quantised language models and others",
        report.environment.line(),
        f"Command: `{report.environment.command}`",
    ]
    return page([*parts, body(report), bullets(report.notes)])


def body(report: LmReport) -> str:
    """The tables and goals, as they also stand in a page of the documentation."""
    parts = [
        section(name, rows_table([row for row in report.rows if row.subject == name]))
        for name in dict.fromkeys(row.subject for row in report.rows)
    ]
    return page([*parts, section("Goals", goals_table(report.goals)) if report.goals else ""]).strip()


def goals_table(goals: Sequence[LmGoal]) -> str:
    def told(goal: LmGoal) -> str:
        return "" if goal.measured is None else f"{goal.measured:.2f} ± {goal.half:.2f}"

    header = ["rise of the perplexity, %", "limit", "measured", "by", ""]
    return table(header, [[g.name, f"<= {g.limit:g}", told(g), g.by, g.verdict] for g in goals])


def rows_table(rows: Sequence[LmRow]) -> str:
    """One subject: what each way costs beside the float model."""
    measure = rows[0].measure
    is_lm, has_hits = measure == PERPLEXITY, any(row.right is not None for row in rows)
    rise = "rise, %" if is_lm else "rise"
    right = ["right, %", "points (95 %)"] if has_hits else []
    header = ["", measure, f"{rise} (95 %)", "draws", *right, "s", "peak, MB", "model, MB"]
    return table(header, [_cells(row, is_lm, has_hits) for row in rows])


def recipes_table(rows: Sequence[LmRow]) -> str:
    """What each recommended recipe costs: the rows that its scheme, ranges and improvers are, one a subject."""
    of = [
        (name, row) for name in NAMES for row in rows if row.value is not None and _is_of(recommended(name), name, row)
    ]
    is_lm, has_hits = any(row.measure == PERPLEXITY for _, row in of), all(row.right is not None for _, row in of)
    found = []
    for name, row in of:
        *cells, model = _cells(row, row.measure == PERPLEXITY, False)
        right = [_points(row)] if has_hits else []
        found.append([f"`{name}`", row.subject, row.measure, cells[2], cells[3], *right, cells[4], model])
    rise, right = "rise, % of perplexity" if is_lm else "rise", ["accuracy, points"] if has_hits else []
    return table(["recipe", "model", "measure", rise, "draws", *right, "s", "model, MB"], found)


def _is_of(recipe: Recipe, name: str, row: LmRow) -> bool:
    if not row.scheme or name.partition("-")[0] not in _KINDS.get(row.subject, ("llm",)):
        return row.method == name
    return scheme_from_name(row.scheme) == recipe.default_scheme() and row.method == ("+".join(recipe.improve) or PLAIN)


def _cells(row: LmRow, is_lm: bool, has_hits: bool) -> list[str]:
    label = ", ".join(part for part in (row.scheme, row.method) if part)
    label += f" ({row.note})" if row.note and row.value is not None else ""
    if row.value is None:
        return [label, row.note, *[""] * (7 if has_hits else 5)]
    unit = _percent if is_lm else (lambda nats: nats or 0.0)
    digits = 2 if is_lm else 5
    is_float = row.method == FLOAT_ROW
    half = (unit((row.rise or 0) + (row.half or 0)) - unit(row.rise)) if row.half is not None else math.inf
    around = f" ± {half:.{digits}f}" if math.isfinite(half) else ""
    spread = f"{unit(row.lowest):.{digits}f} to {unit(row.highest):.{digits}f}" if row.draws > 1 else "one"
    right = ["" if row.right is None else f"{100 * row.right:.2f}", "" if is_float else _points(row)]
    costs = ["", "", ""] if is_float else [f"{unit(row.rise):.{digits}f}{around}", spread, f"{row.seconds:.1f}"]
    peak = "" if is_float or row.peak_mb is None else f"{row.peak_mb:.0f}"
    value = f"{row.value:.4f}" if is_lm else f"{row.value:.5f}"
    return [label, value, *costs[:2], *(right if has_hits else []), costs[2], peak, f"{row.state_mb:.2f}"]


def _points(row: LmRow) -> str:
    """How many more in a hundred are right than the float model has."""
    if row.right_rise is None or row.right_half is None:
        return ""
    return f"{100 * row.right_rise:.2f} ± {100 * row.right_half:.2f}"
