"""The goals of `make gpu`, which gpu_goals.json states, and what results of a GPU say about them.

A goal that a run cannot answer is "not measured", never passed: also when our own candidate did not run at a shape
where the peer did.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.shared import geometric_mean
from pyquant.bench.model_shapes import MODELS
from pyquant.report.records.bench import Bar, GemmRow, Verdict
from pyquant.report.records.trade_off import TradeOff

STATED: Final[dict[str, list[dict[str, Any]]]] = json.loads(Path(__file__).with_name("gpu_goals.json").read_text())


@dataclass(frozen=True)
class Goal:
    """One goal of the linear layers.

    ours             candidates of which the fastest counts; peer: whose time is divided by theirs.
    floor, stretch   what must be reached; what physics should allow.
    m, n             least and largest, None: no limit; model: only the (K, N) of one; least_weights: of K x N.
    worst            the least ratio counts, not the geometric mean.
    of               'ratio' to the peer; 'limit': our share of the copy bandwidth; 'bits': share of right results.
    """

    number: str
    name: str
    ours: list[str]
    peer: str
    floor: float
    stretch: float
    m: tuple[int, int | None] = (1, None)
    n: tuple[int, int | None] = (1, None)
    model: str = ""
    least_weights: int = 0
    worst: bool = False
    of: str = "ratio"

    def where(self, m: int, k: int, n: int) -> bool:
        """Whether a shape counts."""
        inside = all(low <= value <= (high or value) for value, (low, high) in ((m, self.m), (n, self.n)))
        return inside and k * n >= self.least_weights and (not self.model or (k, n) in MODELS[self.model])


GEMM: Final = [Goal(**stated) for stated in STATED["gemm"]]


def verdicts(rows: Sequence[GemmRow], goals: Sequence[Goal] = GEMM) -> list[Verdict]:
    """A line for every goal. Ratios are median times, geometric mean over the shapes where both ran."""
    judge = {"ratio": _ratio, "limit": _limit, "bits": _bits}
    judged = []
    for goal in goals:
        measured, count, note = judge[goal.of](goal, [row for row in rows if goal.where(row.m, row.k, row.n)])
        judged.append(Verdict(goal.number, goal.name, goal.peer, measured, goal.floor, goal.stretch, count, note))
    return judged


def _ratio(goal: Goal, rows: Sequence[GemmRow]) -> tuple[float | None, int, str]:
    shapes = list(dict.fromkeys((row.m, row.k, row.n) for row in rows))
    us = {(row.m, row.k, row.n, row.candidate): row.median_us for row in rows}
    peers = [shape for shape in shapes if (*shape, goal.peer) in us]
    ours = [[us[key] for name in goal.ours if (key := (*shape, name)) in us] for shape in peers]
    if not shapes:
        return None, 0, "no shape of this goal was measured"
    if not peers:
        return None, 0, "the peer did not run"
    if missing := ours.count([]):
        return None, 0, f"ours did not run at {missing} of {len(peers)} shapes"
    ratios = [us[(*shape, goal.peer)] / min(times) for shape, times in zip(peers, ours, strict=True)]
    note = f"{'worst' if goal.worst else 'geometric mean'} of {len(ratios)} shapes"
    note += f"; the peer ran at {len(peers)} of {len(shapes)}" if len(peers) < len(shapes) else ""
    return min(ratios) if goal.worst else geometric_mean(ratios), len(ratios), note


def _limit(goal: Goal, rows: Sequence[GemmRow]) -> tuple[float | None, int, str]:
    bound = [row for row in rows if row.candidate in goal.ours and row.floor_kind == "bytes"]
    shares = [row.of_floor for row in bound if row.of_floor]
    if not shares:
        return None, 0, "no shape of this goal was measured with its floor"
    return geometric_mean(shares), len(shares), f"geometric mean of {len(shares)} shapes"


def _bits(_: Goal, rows: Sequence[GemmRow]) -> tuple[float | None, int, str]:
    checked = [row for row in rows if row.exact is not None]
    if not checked:
        return None, 0, "nothing with an exact contract was measured"
    wrong = sum(row.exact is False for row in checked)
    return 1.0 - wrong / len(checked), len(checked), f"{wrong} of {len(checked)} results differ"


def mlp_bars(columns: dict[str, TradeOff]) -> list[Bar]:
    """The goals of `bench mlp` for the GPU that it ran on, of {file name without ending: its record}.

    Empty where the run was not on a GPU or lacks a uniform configuration: the original experiment's reductions where
    there is int4 arithmetic (sm_80, 86, 89), int8's and an int4 that is not slower elsewhere.
    """
    machine = columns["mlp"].environment.get("", "")
    chip = next((int(word[3:]) for word in machine.replace(",", " ").split() if word.startswith("sm_")), None)
    times = {name: [line.cost for line in record.lines] for name, record in columns.items()}
    if chip is None or any(len(costs) != len(columns["mlp"].formats) for costs in times.values()):
        return []
    bars, formats, base = [], ("float", "int8", "int4"), columns["mlp"].formats[0]
    for goal in STATED["mlp"]:
        if chip not in goal.get("sm", [chip]) or chip in goal.get("not_sm", []):
            continue
        record = columns[goal["column"]]
        if "at_least" in goal:
            reduction = 0.0 if record.pair is None else record.pair.reduction
            bars.append(Bar(goal["name"], goal["at_least"], reduction, ">="))
        else:
            of, over = (times[goal["column"]][formats.index(goal[key])] for key in ("of", "over"))
            bars.append(Bar(goal["name"].replace("float", base), goal["at_most"], of / over, "<="))
    return bars
