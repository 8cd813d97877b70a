"""The accuracy driver: its data, its goals and verdicts, and a run of everything on very little."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.accuracy import __main__ as driver  # noqa: E402
from bench.accuracy import (  # noqa: E402
    again,
    equalized,
    goals,
    learned_rotation,
    reconstruction,
    rotated,
    text,
    tried,
    weight_ranges,
)
from bench.accuracy.measure import BEST, Figures, Rig, SeedResult, Size, inject_outliers, measure  # noqa: E402
from bench.accuracy.models import TASKS, ByteTransformer  # noqa: E402
from bench.accuracy.records import goals_table, judge, recovered_table, rows_table  # noqa: E402
from bench.accuracy.train import Schedule  # noqa: E402
from bench.markers import get, put  # noqa: E402
from pyquant import equalize_  # noqa: E402
from pyquant.errors import ArgumentError, CheckpointError  # noqa: E402
from pyquant.measure.environment import describe_environment  # noqa: E402
from pyquant.report.records.record import load_record  # noqa: E402

has_sklearn = importlib.util.find_spec("sklearn") is not None
TINY = Size(share=0.01, test=0.1, qat=0.004)


def test_verdicts() -> None:
    assert judge("", "<=", 0.5, None, [0.1, 0.11, 0.12]).verdict == "PASS"
    assert judge("", "<=", 0.5, None, [0.1, 0.4, 0.8]).verdict == "pass"  # only the mean
    assert judge("", "<=", 0.5, None, [0.6, 0.6, 0.6]).verdict == "MISS"
    assert judge("", ">=", 0.5, None, [0.8, 0.81, 0.82]).verdict == "PASS"
    assert judge("", ">=", 0.5, None, [0.2, 0.3]).verdict == "MISS"
    assert judge("", ">=", 0.5, None, [0.7]).verdict == "pass"  # one seed has no interval
    assert judge("", "<=", 0.5, None, [math.nan, 0.1]).verdict == "MISS"
    found = judge("", "<=", 0.5, None, [1.0, 2.0, 3.0])
    assert (found.mean, found.half_width) == (2.0, pytest.approx(4.303 / 3**0.5))


def test_the_share_recovered_is_against_the_float_control() -> None:
    qat, control = f"W4A8, QAT {BEST}", f"float control, {BEST}"
    figures = {"W4A8": Figures(0.10, 0), qat: Figures(0.02, 0), control: Figures(-0.02, 0)}
    goal = next(g for g in goals.GOALS if g.name.startswith("W4A8"))
    assert goal.of(figures) == pytest.approx(0.08 / 0.12)
    assert goal.quick < goal.goal
    (found,) = goals.recovered({"gpt3": [figures]})
    assert (found.recipe, found.of_control, found.of_start) == (BEST, [goal.of(figures)], [pytest.approx(0.8)])
    assert "0.67" in recovered_table([found])


def test_every_goal_is_judged_where_its_task_was_measured() -> None:
    figures = dict.fromkeys(
        (
            "W8A8",
            "W4 GPTQ",
            "W4 MSE",
            "A4 affine",
            "A4 signed",
            "A8 entropy",
            "W4A8",
            "W4A4 affine",
            f"W4A8, QAT {BEST}",
            f"W4A4 affine, QAT {BEST}",
            f"float control, {BEST}",
        ),
        Figures(0.001, 0.0),
    )
    found = goals.verdicts({"bytemlp": [figures] * 3}, quick=False)
    assert len(found) == sum("bytemlp" in goal.tasks for goal in goals.GOALS)
    assert {goal.verdict for goal in found} == {"PASS", "MISS"}
    assert all("byte MLP" in goal.name for goal in found)


def test_the_limits_are_those_of_the_documentation() -> None:
    document = (ROOT / "docs" / "accuracy.md").read_text()
    for goal in goals.GOALS:
        assert f"{goal.direction} {goal.goal:g}" in document, goal.name
        assert goal.name in document


def test_data_repeats_itself_and_held_out_text_is_not_trained_on() -> None:
    train, held_out = text.corpus()
    assert int(train.max()) < text.VOCABULARY
    shared = bytes(held_out[:4000].tolist())[1000:3000]
    assert shared not in bytes(train.tolist())
    for name in ("bytemlp", "gpt3"):
        first, again = (list(TASKS[name].batches("train", 2, 3, 7)) for _ in range(2))
        other = next(TASKS[name].batches("train", 1, 3, 8))
        assert all(torch.equal(a, b) for x, y in zip(first, again) for a, b in zip(x, y))
        assert not torch.equal(first[0][0], other[0])
    ids, following = next(TASKS["gpt3"].batches("test", 1, 2, 0))
    assert torch.equal(ids[:, 1:], following[:, :-1])


def test_outliers_leave_the_function_as_it_is() -> None:
    torch.manual_seed(0)
    model = ByteTransformer()
    ids = torch.randint(text.VOCABULARY, (2, 20))
    changed = inject_outliers(copy.deepcopy(model))
    torch.testing.assert_close(changed(ids), model(ids), rtol=1e-4, atol=1e-4)
    assert changed.blocks[0].norm1.weight.max() == 50


def test_the_schedule_rises_and_falls() -> None:
    factors = [Schedule("sgd", 1.0).factor(step, 100) for step in range(100)]
    assert factors[0] == 0.1
    assert max(factors) == factors[9] == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.0103, abs=1e-3)


def test_nothing_to_measure_is_an_error_and_no_empty_table(monkeypatch, capsys) -> None:
    monkeypatch.setattr(driver.importlib.util, "find_spec", lambda name: None)
    assert driver.main(["--quick", "--tasks", "digits"]) == 2
    shown = capsys.readouterr()
    assert "scikit-learn is not installed" in shown.err
    assert not shown.out


def test_the_driver_writes_its_results(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(driver, "QUICK", TINY)
    threads = torch.get_num_threads()
    code = driver.main(["--quick", "--tasks", "bytemlp", "--jobs", "1", "--out", str(tmp_path)])
    torch.set_num_threads(threads)
    assert code in (0, 1)  # a model of twenty steps says nothing about the goals
    rows = load_record(tmp_path / "accuracy.json").rows("rows")
    assert {row["what"] for row in rows} >= {
        "W8A8",
        "W4 GPTQ",
        "W4A4 affine, QAT SGD 1 %",
        f"W4A8, QAT {BEST}",
    }
    assert all(math.isfinite(row["rise"][0]) and abs(row["rise"][0]) < 1 for row in rows)
    shown = (tmp_path / "accuracy.md").read_text()
    assert "W4A8: share that QAT recovers (byte MLP)" in shown
    assert "W4A8: share that QAT recovers (byte MLP)" in capsys.readouterr().out


def test_a_run_of_all_tasks_that_was_stopped_goes_on(tmp_path: Path, monkeypatch) -> None:
    calls: list[tuple[str, int]] = []

    def result(name: str, seed: int, size: Size) -> SeedResult:
        calls.append((name, seed))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return SeedResult(name, seed, (2 + seed / 3, 50 / 3), {"W8A8": Figures(seed / 7, -seed / 9)})

    monkeypatch.setattr(driver, "measure", result)
    monkeypatch.setattr(driver, "verdicts", lambda *_: [])
    monkeypatch.setattr(driver, "recovered", lambda *_: [])
    run = ["--tasks", "bytemlp", "gpt3", "--seeds", "2", "--jobs", "1"]
    keep = ["--keep", str(tmp_path / "kept")]
    with pytest.raises(KeyboardInterrupt):
        driver.main([*run, *keep, "--out", str(tmp_path / "stopped")])
    assert driver.main([*run, *keep, "--out", str(tmp_path / "resumed")]) == 0
    assert calls == [("gpt3", 0), ("gpt3", 1), ("bytemlp", 0), ("bytemlp", 0), ("bytemlp", 1)]
    assert driver.main([*run, "--out", str(tmp_path / "whole")]) == 0
    resumed, whole = (load_record(tmp_path / name / "accuracy.json") for name in ("resumed", "whole"))
    assert resumed.rows("rows") == whole.rows("rows")
    with pytest.raises(CheckpointError, match="a journal with size"):
        driver.main([*run, *keep, "--quick", "--out", str(tmp_path / "other")])


def test_what_was_tried_is_a_table(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "a.md"
    path.write_text("<!-- tried -->\n<!-- end of tried -->\n")
    chosen = (tried.TRIALS[0], tried.Trial("muon", 4.0, 1.0, start="GPTQ", learns=("*.input",), longer=2, batch=2))
    monkeypatch.setattr(tried, "TRIALS", chosen)
    threads = torch.get_num_threads()
    assert tried.main(["--task", "bytemlp", "--docs", str(path)], TINY) == 0
    torch.set_num_threads(threads)
    shown = path.read_text()
    assert "AdamW 30 %, labels " in shown
    assert "Muon 400 %, teacher alone, from GPTQ, learned *.input, 2 x the steps, 2 x the batch " in shown
    last = [cell.strip() for cell in shown.strip().splitlines()[-3].strip("|").split("|")]
    assert all(math.isfinite(float(cell)) for cell in last[1:])
    assert abs(float(last[3])) < 1e-2  # a float model that learns from itself nearly stays what it is


def test_the_ways_of_rotation_keep_the_function_and_their_goals_are_judged(tmp_path: Path, monkeypatch) -> None:
    rig = Rig.__new__(Rig)  # an untrained model: rotate_ itself compares the outputs before and after
    rig.seed, rig.model, rig.calibration = 0, ByteTransformer().eval(), list(TASKS["gpt3"].batches("train", 8, 2, 0))
    online = [len(rotated._changed(rig, way, rig.model).state_dict()) for way in rotated.WAYS]
    assert len(set(online)) == 1
    kinds = {way: str(rotated._changed(rig, way, rig.model)).count("HadamardLinear") for way in rotated.WAYS}
    assert [kinds[way] for way in rotated.WAYS] == [0, 0, 0, 3, 6, 6]

    rises = {(way, scheme): (0.09, 0.08) for way in rotated.WAYS for scheme in rotated.SCHEMES}
    rises[f"outliers, {rotated.BEST}", rotated.AFFINE] = (0.5, 0.5)
    monkeypatch.setattr(rotated, "measure", lambda name, seed, size: rises)
    path = tmp_path / "a.md"
    path.write_text("<!-- rotated -->\n<!-- end of rotated -->\n")
    assert rotated.main(["--jobs", "1", "--docs", str(path)]) == 1
    shown = path.read_text()
    assert "| rotated" in shown
    assert "0.0900 / 0.0800" in shown
    assert shown.count("PASS") == 2  # signed and affine below their limits; W4A16, W4A8 and the outliers above
    assert shown.count("MISS") == 3


def test_the_ways_of_reconstruction_and_their_goals(tmp_path: Path, monkeypatch) -> None:
    rig = Rig.__new__(Rig)
    rig.seed, rig.model, rig.calibration = 0, ByteTransformer().eval(), list(TASKS["gpt3"].batches("train", 8, 2, 0))
    x = rig.calibration[0][0]
    lines = list(reconstruction._lines(rig, "gpt3"))
    assert len({line for line, _, _ in lines}) == len(lines) == 10
    assert {line for line, _, _ in reconstruction.GOALS} <= {line for line, _, _ in lines}
    with torch.no_grad():
        for line, model, _ in lines:  # the same function, with outliers and rotation or without
            torch.testing.assert_close(model(x), rig.model(x), rtol=1e-3, atol=1e-3, msg=line)

    rises = {(line, scheme): 0.08 for line, _, _ in lines for scheme in reconstruction.SCHEMES}
    monkeypatch.setattr(reconstruction, "measure", lambda name, seed, size: rises)
    path = tmp_path / "a.md"
    path.write_text("<!-- reconstruction -->\n<!-- end of reconstruction -->\n")
    assert reconstruction.main(["--jobs", "1", "--docs", str(path)]) == 1
    shown = path.read_text()
    assert "| block by block, the default" in shown
    assert shown.count("PASS") == 5  # W4A16 and W4A8 above their limits
    assert shown.count("MISS") == 2


@pytest.mark.skipif(not has_sklearn, reason="scikit-learn is an extra and not installed")
def test_eight_bits_cost_nothing_on_digits() -> None:
    threads = torch.get_num_threads()
    result = measure("digits", 0, Size(share=0.3, test=0.5))
    torch.set_num_threads(threads)
    assert isinstance(result, SeedResult)
    assert result.base[1] > 80
    assert abs(result.figures["W8A8"].rise) < 0.02
    assert abs(result.figures["A8 entropy"].rise) < 0.02
    assert result.figures["W4A4 signed"].rise > result.figures["W8A8"].rise


def test_tables_go_between_the_markers(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("x\n<!-- goals -->\nold\n<!-- end of goals -->\ny\n")
    put(path, "goals", goals_table([judge("g", "<=", 1, 0.5, [0.2, 0.3])]))
    put(path, "goals", goals_table([judge("g", "<=", 1, 0.5, [0.2, 0.3])]) + rows_table([]))
    assert path.read_text().startswith("x\n<!-- goals -->\n\n| goal")
    assert path.read_text().endswith("<!-- end of goals -->\ny\n")
    assert "old" not in path.read_text()
    with pytest.raises(ArgumentError, match="both markers"):
        put(path, "rows", "")


def test_the_table_of_weight_ranges(tmp_path: Path, monkeypatch) -> None:
    def rises(name: str, seed: int, size: Size) -> weight_ranges.Rises:
        keys = [
            (what, m, how)
            for what in weight_ranges.SCHEMES
            for m in weight_ranges.METHODS
            for how in ("rounding", "gptq")
        ]
        return {(what, m, how): 0.03 + 0.01 * (m == "max") + 0.001 * seed for what, m, how in keys}

    monkeypatch.setattr(weight_ranges, "measure", rises)
    path = tmp_path / "a.md"
    path.write_text("<!-- weight_ranges -->\n<!-- end of weight_ranges -->\n")
    assert weight_ranges.main(["--jobs", "1", "--docs", str(path)]) == 0
    shown = path.read_text()
    assert shown.count("| 0.0100 ± 0.0000 |") == 4 * len(weight_ranges.SCHEMES)
    assert "| bytemlp, groups of 32 " in shown


def test_a_driver_that_was_stopped_goes_on(tmp_path: Path, monkeypatch) -> None:
    calls: list[tuple[str, int]] = []

    def rises(name: str, seed: int, size: Size) -> weight_ranges.Rises:
        calls.append((name, seed))
        if len(calls) == 3:
            raise KeyboardInterrupt
        keys = itertools.product(weight_ranges.SCHEMES, weight_ranges.METHODS, ("rounding", "gptq"))
        return {key: 1 / (3 + seed + len("".join(key))) for key in keys}

    monkeypatch.setattr(weight_ranges, "measure", rises)
    path, keep = tmp_path / "a.md", ["--jobs", "1", "--keep", str(tmp_path / "kept")]
    path.write_text("<!-- weight_ranges -->\n<!-- end of weight_ranges -->\n")
    with pytest.raises(KeyboardInterrupt):
        weight_ranges.main([*keep, "--docs", str(path)])
    assert weight_ranges.main([*keep, "--docs", str(path)]) == 0
    (first, second), twice = weight_ranges.NAMES, 2
    assert calls == [*((first, seed) for seed in (0, 1, twice, twice)), *((second, seed) for seed in range(3))]
    resumed = path.read_text()
    weight_ranges.main(["--jobs", "1", "--docs", str(path)])
    assert path.read_text() == resumed
    with pytest.raises(CheckpointError, match="a journal with size"):
        weight_ranges.main(keep, TINY)
    path.write_text("")
    calls.clear()
    with pytest.raises(ArgumentError, match="both markers"):
        weight_ranges.main(["--docs", str(path)])
    assert not calls


def test_pages_are_compared_with_what_comes_out_now(tmp_path: Path, monkeypatch, capsys) -> None:
    machine = describe_environment("cpu", clock="none: nothing is timed").line()
    words = {"a": f"{machine}\n\n| x | 0.0611 |", "b": machine.replace("torch 2.", "torch 9.") + "\n\n| y | 1 |"}
    for name, page in words.items():
        (tmp_path / f"{name}.md").write_text(f"<!-- {name} -->\n\n{page}\n\n<!-- end of {name} -->\n")
    monkeypatch.setattr(again, "ROOT", tmp_path)
    monkeypatch.setattr(again, "PAGES", {n: again.Page(f"{n}.md", f"bench.{n}", (n,)) for n in words})
    printed = {"a": words["a"].replace("2 of 2 cores used", "1 of 2 cores used"), "b": words["b"].replace("1 |", "2 |")}
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        name = command[2].removeprefix("bench.")
        put(Path(command[command.index("--docs") + 1]), name, printed[name])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert again.main(["--jobs", "1", "--keep", str(tmp_path / "k")]) == 0
    shown = capsys.readouterr().out
    assert "a: a.md comes out again" in shown
    assert "b: not run: b.md was written on another machine: " in shown
    assert commands[0][-4:] == ["--jobs", "1", "--keep", str(tmp_path / "k" / "a.journal")]
    printed["a"] = words["a"].replace("0.0611", "0.0613")
    assert again.main([]) == 1
    assert "-| x | 0.0611 |\n+| x | 0.0613 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        again.main(["--only", "c"])


def test_every_table_of_accuracy_is_among_those_that_are_compared() -> None:
    for name, page in again.PAGES.items():
        assert importlib.util.find_spec(page.module), name
        assert all(get(ROOT / page.path, marker) for marker in (*page.markers, *filter(None, [page.machine])))
    known = {(page.path, marker) for page in again.PAGES.values() for marker in page.markers}
    for name in ("accuracy", "calibration", "rotation", "reconstruction"):
        markers = re.findall(r"<!-- end of (.*?) -->", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"))
        others = [marker for marker in markers if not marker.startswith("bench.")]
        assert others
        assert {(f"docs/{name}.md", marker) for marker in others} <= known


def test_the_models_of_equalisation_are_the_same_function(tmp_path: Path, monkeypatch) -> None:
    task = TASKS["digits"]
    model, x = task.make().eval(), torch.rand(6, 64)
    with torch.no_grad():
        want = model(x)
        model = equalized.spread(model, 0)
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
        assert max(equalize_(model).values()) > 4
        torch.testing.assert_close(model(x), want, rtol=1e-4, atol=1e-5)
    rises = {(scheme, way): 0.05 for scheme in equalized.SCHEMES for way in equalized.WAYS}
    monkeypatch.setattr(equalized, "measure", lambda name, seed, size: rises)
    path = tmp_path / "a.md"
    path.write_text("<!-- equalized -->\n<!-- end of equalized -->\n")
    assert equalized.main(["--jobs", "1", "--docs", str(path)]) == 0
    assert "| digits, W8A8, a scale a layer" in path.read_text()


def test_the_table_of_learned_rotations(tmp_path: Path, monkeypatch) -> None:
    def rises(name: str, seed: int, size: Size) -> learned_rotation.Rises:
        names, ways, hows = learned_rotation.SCHEMES, learned_rotation.WAYS, learned_rotation.HOW
        found = {(name, way, how): 0.05 for name in names for way in ways for how in hows}
        return found | {("", "accepted", name): float(seed > 0) for name in names}

    monkeypatch.setattr(learned_rotation, "measure", rises)
    path = tmp_path / "a.md"
    path.write_text("<!-- learned_rotation -->\n<!-- end of learned_rotation -->\n")
    assert learned_rotation.main(["--jobs", "1", "--docs", str(path)]) == 0
    assert path.read_text().count("| 2 of 3 ") == len(learned_rotation.SCHEMES)
