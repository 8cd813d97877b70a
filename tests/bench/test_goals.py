"""The goals: a ratio where both ran, never a pass by absence."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/ is no part of the installed package

from bench import gemm
from bench.goals import GEMM as GOALS
from bench.goals import Goal, verdicts
from pyquant.bench.kernels import ADAPTERS
from pyquant.bench.kernels.layers import codes_name, layer_name
from pyquant.bench.kernels.rows import CHOSEN, VLLM
from pyquant.bench.kernels.torch_own import LINEAR_BF16, MM_BF16
from pyquant.bench.model_shapes import MODELS, MS, shapes_of
from pyquant.report.records.bench import GemmReport, GemmRow, Verdict
from pyquant.report.records.environment import Environment
from pyquant.report.records.record import load_record, save_record

LLAMA = (8192, 8192)
W8A8_CODES, W4A8_CODES = codes_name("W8A8"), codes_name("W4A8(group_size=None)")
W8A8_DYNAMIC, BF16 = layer_name("W8A8Dynamic"), layer_name("FP16(dtype=bfloat16)")
RATIOS = [goal for goal in GOALS if goal.of == "ratio"]


def row(m: int, kn: tuple[int, int], name: str, us: float, exact: bool | None = None, **more: object) -> GemmRow:
    return GemmRow(m, *kn, name, name not in (MM_BF16, LINEAR_BF16), us, 1.0, 0.0, 5, exact=exact, **more)  # type: ignore[arg-type]


def verdict_of(rows: list[GemmRow], number: str) -> Verdict:
    return next(v for v in verdicts(rows) if v.goal == number)


def test_a_goal_is_the_geometric_mean_over_its_shapes() -> None:
    rows = [row(m, LLAMA, MM_BF16, 100.0) for m in (1, 2048, 8192)]
    rows += [row(2048, LLAMA, W8A8_CODES, 50.0), row(8192, LLAMA, W8A8_CODES, 80.0), row(1, LLAMA, W8A8_CODES, 1.0)]
    verdict = verdict_of(rows, "1")
    assert verdict.measured == pytest.approx((2.0 * 1.25) ** 0.5)
    assert (verdict.verdict, verdict.shapes) == ("MISS", 2)
    assert (
        verdict_of([*rows, row(4096, LLAMA, MM_BF16, 100.0), row(4096, LLAMA, W8A8_CODES, 50.0)], "1").verdict == "PASS"
    )


def test_a_shape_that_ours_could_not_run_is_no_pass() -> None:
    rows = [row(m, LLAMA, MM_BF16, 100.0) for m in (2048, 8192)] + [row(2048, LLAMA, W8A8_CODES, 10.0)]
    verdict = verdict_of(rows, "1")
    assert verdict.verdict == "not measured"
    assert "1 of 2" in verdict.note


def test_a_missing_peer_is_named() -> None:
    rows = [row(2048, LLAMA, W8A8_CODES, 10.0)]
    assert verdict_of(rows, "1").note == "the peer did not run"
    assert verdict_of([], "1").note == "no shape of this goal was measured"
    both = [*rows, row(2048, LLAMA, MM_BF16, 20.0), row(8192, LLAMA, W8A8_CODES, 10.0)]
    assert verdict_of(both, "1").verdict == "PASS"
    assert "the peer ran at 1 of 2" in verdict_of(both, "1").note


def test_never_slower_takes_the_better_of_two_and_the_worst_shape() -> None:
    rows = [row(1, LLAMA, LINEAR_BF16, 10.0), row(64, LLAMA, LINEAR_BF16, 10.0)]
    rows += [row(1, LLAMA, W8A8_DYNAMIC, 5.0), row(64, LLAMA, W8A8_DYNAMIC, 20.0)]
    assert verdict_of(rows, "15").measured == pytest.approx(0.5)
    assert verdict_of([*rows, row(64, LLAMA, BF16, 10.2)], "15").measured == pytest.approx(10 / 10.2)
    assert verdict_of([*rows, row(64, LLAMA, BF16, 10.2)], "15").verdict == "PASS"


def test_our_own_candidates_are_peers_too() -> None:
    rows = [row(64, (4096, 4096), CHOSEN, 10.0), row(64, (4096, 4096), VLLM, 14.0)]
    assert verdict_of(rows, "4").measured == pytest.approx(1.4)
    rows = [row(4096, LLAMA, W4A8_CODES, 10.0), row(4096, LLAMA, W8A8_CODES, 8.0)]
    assert verdict_of(rows, "11").verdict == "MISS"


def test_bandwidth_and_bits() -> None:
    fast = row(1, LLAMA, W8A8_CODES, 10.0, True, floor_us=8.0, floor_kind="bytes")
    assert verdict_of([fast], "5b").measured == pytest.approx(0.8)
    assert verdict_of([fast], "5b").verdict == "PASS"
    assert verdict_of([fast], "17").verdict == "PASS"
    assert verdict_of([fast, row(2, LLAMA, CHOSEN, 1.0, False)], "17").verdict == "MISS"
    assert verdict_of([row(1, LLAMA, MM_BF16, 1.0)], "17").verdict == "not measured"


@pytest.mark.parametrize("goal", RATIOS, ids=lambda goal: goal.number)
def test_every_goal_can_be_answered_by_the_default_grid(goal: Goal) -> None:
    names = {adapter.name for adapter in ADAPTERS}
    assert {*goal.ours, goal.peer} <= names
    assert goal.floor <= goal.stretch
    assert any(goal.where(m, k, n) for m in MS for k, n in shapes_of(MODELS))
    rows = [
        row(m, (k, n), name, us)
        for m in MS
        for k, n in shapes_of(MODELS)
        if goal.where(m, k, n)
        for name, us in [(goal.peer, goal.floor * 1.001), *((name, 1.0) for name in goal.ours)]
    ]
    assert verdict_of(rows, goal.number).verdict == "PASS"
    slower = [row(r.m, (r.k, r.n), r.candidate, 1.01 if r.candidate in goal.ours else r.median_us) for r in rows]
    assert verdict_of(slower, goal.number).verdict == "MISS"


def test_all_numbers_are_there_in_order() -> None:
    numbers = [int(re.match(r"\d+", v.goal)[0]) for v in verdicts([])]
    assert sorted(set(numbers)) == [*range(1, 16), 17]


def test_the_driver_judges_the_reports_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Environment("cuda", "a CPU", [], 2, 2, "2.13", "3.11", "Linux", "1.0", gpu="a GPU")
    rows = [row(2048, LLAMA, MM_BF16, 100.0), row(2048, LLAMA, W8A8_CODES, 50.0)]
    for name in ("gemm", "gemm-1of2"):
        save_record(tmp_path / f"{name}.json", GemmReport(machine, MM_BF16, rows))
    (tmp_path / "gemm.partial.jsonl").write_text("")
    gemm.add_verdicts(tmp_path)
    for name in ("gemm", "gemm-1of2"):
        judged = {v.goal: v.verdict for v in load_record(tmp_path / f"{name}.json", GemmReport).verdicts}
        assert (judged["1"], judged["2"]) == ("PASS", "not measured")
        assert "## Goals" in (tmp_path / f"{name}.md").read_text()
    assert capsys.readouterr().out.count("| 1    |") == 2
