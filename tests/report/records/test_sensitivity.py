"""Skip lists and rankings by hand, luck and refusals included."""

from __future__ import annotations

import itertools
import math
import random

from pyquant.report.records.record import from_plain, to_plain
from pyquant.report.records.sensitivity import (
    Cells,
    SensitivityCost,
    SensitivityGroup,
    SensitivityReport,
    SensitivityStep,
    SensitivityTask,
)

COST = SensitivityCost(0, 0, 0, 0, 0)


def _report(loss: Cells, mode: str = "one_at_a_time", **more: object) -> SensitivityReport:
    groups = tuple(SensitivityGroup(f"g{i}", (f"g{i}.a", f"g{i}.b"), 10) for i in range(len(loss)))
    fields: dict[str, object] = {"uniform": (0.0, None), "steps": (), "task": None}
    fields |= more
    return SensitivityReport(
        "Net",
        "kl",
        "nats",
        mode,
        ("fp32", "int4"),
        groups,
        loss,
        True,
        "nats",
        latency=None,
        refusals=(),
        cost=COST,
        scored_on="",
        **fields,
    )  # type: ignore[arg-type]


def test_no_larger_set_could_be_lowered() -> None:
    draw = random.Random(1)
    for _ in range(50):
        single = [draw.choice([0.0, draw.random(), -0.1]) for _ in range(6)]
        report = _report(tuple((0.0, s) for s in single))
        most = draw.random() * 2
        skipped = {layer[:2] for layer in report.skip_list(most)}
        lowered = [i for i in range(6) if f"g{i}" not in skipped]
        assert math.fsum(max(0, single[i]) for i in lowered) <= most
        for other in itertools.combinations(range(6), len(lowered) + 1):
            assert math.fsum(max(0, single[i]) for i in other) > most


def test_groups_that_refuse_are_skipped_and_not_ranked() -> None:
    report = _report(((0.0, 0.5), (0.0, None), (0.0, 0.1)))
    assert report.ranking() == ["g0", "g2"]
    assert report.skip_list(1.0) == ["g1.a", "g1.b"]
    assert report.skip_list(0.2) == ["g0.a", "g0.b", "g1.a", "g1.b"]


def test_left_out_groups_are_those_that_gain_most() -> None:
    report = _report(((0.0, 0.4), (0.0, 0.9), (0.0, 0.7)), "leave_one_out", uniform=(0.0, 1.0))
    assert report.ranking() == ["g0", "g2", "g1"]
    assert report.skip_list(1.0) == []
    assert report.skip_list(0.5) == ["g0.a", "g0.b"]
    assert report.skip_list(0.2) == ["g0.a", "g0.b", "g2.a", "g2.b"]
    assert len(report.skip_list(0.0)) in (4, 6)


def test_steps_count_as_they_were_measured_also_where_luck_returns() -> None:
    steps = tuple(
        SensitivityStep("int4", f"g{g}", loss, 1 - 10 * loss) for g, loss in ((2, 0.01), (0, 0.05), (1, 0.03))
    )
    task = SensitivityTask(1.0, True, ((1.0, None),) * 3, (1.0, 0.7))
    report = _report(((0.0, 0.02), (0.0, 0.03), (0.0, 0.01)), "cumulative", steps=steps, task=task)
    assert report.skip_list(0.02) == ["g0.a", "g0.b", "g1.a", "g1.b"]
    assert report.skip_list(0.04) == []
    assert report.skip_list(0.31, by="task") == []
    assert report.skip_list(0.15, by="task") == ["g0.a", "g0.b", "g1.a", "g1.b"]
    assert from_plain(to_plain(report)) == report


def test_a_task_metric_that_falls_is_a_drop() -> None:
    task = SensitivityTask(2.0, False, ((2.0, 2.5), (2.0, 1.9)), (2.0, None))
    report = _report(((0.0, 0.1), (0.0, 0.2)), task=task)
    assert report.ranking(by="task") == ["g0", "g1"]
    assert report.sensitivity(0, 1, "task") == 0.5
    assert report.skip_list(0.1, by="task") == ["g0.a", "g0.b"]
