"""sensitivity(): configurations by hand, the stated cost, resumed, killed and distributed runs, skip lists in use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from children import ranks
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import nets

import pyquant
from pyquant.errors import ArgumentError, CheckpointError, NonFiniteError, PyquantError, QuantizationWarning
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.loss.evaluate import LossOfOutputs
from pyquant.mixed_precision.loss.sensitivity import cost_of, sensitivity
from pyquant.mixed_precision.spread import spread_rows
from pyquant.nn.qlinear import QLinear
from pyquant.report.records.record import load_record, save_record, to_plain
from pyquant.report.records.sensitivity import SensitivityReport

FORMATS = ("fp32", "int8", "int4")


class Accuracy:
    """Agreement with the labels of the float model."""

    def __init__(self, model: nn.Module) -> None:
        self.x = torch.cat(nets.batches(4))
        with torch.no_grad():
            self.labels = model(self.x).argmax(-1)

    def __call__(self, model: nn.Module) -> torch.Tensor:
        return (model(self.x).argmax(-1) == self.labels).float().mean()


class Table:
    """A latency table."""

    def predict(self, config: tuple[int, ...]) -> float:
        return 10 + sum((8, 5, 3)[f] * (g + 1) for g, f in enumerate(config))


def _run(metric: str = "kl", mode: str = "one_at_a_time", task: bool = False, **more: Any) -> SensitivityReport:
    model = nets.classifier()
    more.setdefault("latency", Table())
    return sensitivity(
        model, nets.batches(), FORMATS, metric, mode, num_batches=4, eval_fn=Accuracy(model) if task else None, **more
    )


def test_one_at_a_time_is_the_loss_of_each_configuration() -> None:
    report = _run(task=True)
    switchable = SwitchableModel(nets.classifier(), FORMATS, nets.batches(), num_batches=4)
    loss, accuracy = LossOfOutputs(switchable, "kl"), Accuracy(switchable.model)
    for g in range(3):
        for f in range(3):
            config = tuple(f if i == g else 0 for i in range(3))
            assert report.loss[g][f] == loss(config)
            with switchable.using(config) as model, torch.no_grad():
                assert report.task.table[g][f] == accuracy(model).item()
            assert report.latency.table[g][f] == Table().predict(config)
    assert report.uniform == (0.0, None, None)
    assert report.latency.uniform == tuple(Table().predict((f,) * 3) for f in range(3))
    assert list(report.usual_suspects) == ["0", "4"]
    assert report.environment["torch"] == torch.__version__
    assert report.ranking() == sorted("024", key=lambda n: -report.loss[int(n) // 2][2])


def test_leave_one_out_lowers_everything_else() -> None:
    report = _run(mode="leave_one_out", task=True)
    switchable = SwitchableModel(nets.classifier(), FORMATS, nets.batches(), num_batches=4)
    loss = LossOfOutputs(switchable, "kl")
    for f in (1, 2):
        assert report.uniform[f] == loss((f,) * 3)
        for g in range(3):
            config = tuple(0 if i == g else f for i in range(3))
            assert report.loss[g][f] == loss(config)
            assert report.latency.table[g][f] == Table().predict(config)
            assert report.sensitivity(g, f) == report.uniform[f] - report.loss[g][f]
    assert report.skip_list(report.uniform[2]) == []
    assert report.skip_list(report.uniform[2] - 1e-9) == report.ranking()[:1]


def test_cumulative_lowers_the_least_sensitive_first_and_measures_each_step() -> None:
    report = _run(mode="cumulative", task=True)
    switchable = SwitchableModel(nets.classifier(), FORMATS, nets.batches(), num_batches=4)
    loss = LossOfOutputs(switchable, "kl")
    for f in (1, 2):
        steps = [s for s in report.steps if s.format == FORMATS[f]]
        assert [s.group for s in steps] == report.ranking(FORMATS[f])[::-1]
        lowered = [0, 0, 0]
        for step in steps:
            lowered[int(step.group) // 2] = f
            assert step.loss == loss(tuple(lowered))
            assert step.latency_us == Table().predict(tuple(lowered))
            assert step.task is not None
        assert report.uniform[f] == steps[-1].loss == loss((f,) * 3)
        assert report.task.uniform[f] == steps[-1].task
    kept = report.skip_list(steps[1].loss)
    assert kept == [steps[2].group]
    assert report.skip_list(0.0) == ["0", "2", "4"]


def test_held_out_batches_are_what_is_scored_on() -> None:
    held_out = nets.batches(2, seed=8)
    report = _run(batches=iter(held_out))
    switchable = SwitchableModel(nets.classifier(), FORMATS, nets.batches(), num_batches=4)
    assert report.loss[1][2] == LossOfOutputs(switchable, "kl", held_out)((0, 2, 0)) != _run().loss[1][2]
    assert report.scored_on == "2 batches, given apart"
    assert report.cost.forward_passes == 2 * 7


ANALYSES = [
    (metric, mode, task)
    for metric in ("kl", "eval", "fisher", "noise", "hessian", "error")
    for mode in ("one_at_a_time", "leave_one_out", "cumulative")
    for task in (False, True)
    if (task or metric != "eval") and (mode != "leave_one_out" or metric in ("kl", "eval"))
]


@pytest.mark.parametrize(("metric", "mode", "task"), ANALYSES)
def test_the_cost_is_what_it_was_said_to_be(metric: str, mode: str, task: bool) -> None:
    model, passes, told = nets.classifier(), [0], []
    accuracy = Accuracy(model)

    def count(*_: object) -> None:
        passes[0] += 1

    model.register_forward_pre_hook(count)
    report = sensitivity(
        model,
        nets.batches(),
        FORMATS,
        metric,
        mode,
        num_batches=4,
        eval_fn=accuracy if task else None,
        progress=lambda *step: told.append(step),
    )
    cost = cost_of(model, FORMATS, metric, mode, num_batches=4, with_eval=task)
    assert cost == report.cost
    assert passes[0] == cost.calibration_passes + cost.forward_passes + cost.eval_calls
    assert [step[:2] for step in told] == [(i + 1, cost.evaluations) for i in range(cost.evaluations)]
    assert str(cost.forward_passes) in cost.line()


def test_one_journal_serves_every_metric_and_mode_and_saves_all_passes(tmp_path: Path) -> None:
    journal = tmp_path / "j.jsonl"
    for metric, mode, task in (
        ("kl", "cumulative", True),
        ("fisher", "one_at_a_time", False),
        ("eval", "cumulative", True),
    ):
        alone = _run(metric, mode, task)
        first = _run(metric, mode, task, journal=journal)
        size = journal.stat().st_size
        model, passes = nets.classifier(), [0]
        eval_fn = Accuracy(model) if task else None
        model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))  # noqa: B023
        again = sensitivity(
            model,
            nets.batches(),
            FORMATS,
            metric,
            mode,
            num_batches=4,
            eval_fn=eval_fn,
            journal=journal,
            latency=Table(),
        )
        assert alone == first == again
        assert journal.stat().st_size == size
        assert passes[0] == again.cost.calibration_passes
        if metric == "kl":  # eval_fn is part of what a journal is of
            journal = tmp_path / "k.jsonl"
        else:
            journal = tmp_path / "j.jsonl"


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    _run(journal=tmp_path / "j.jsonl")
    with pytest.raises(CheckpointError, match="another model, data or settings"):
        sensitivity(nets.classifier(1), nets.batches(), FORMATS, num_batches=4, journal=tmp_path / "j.jsonl")
    with pytest.raises(CheckpointError):
        _run(journal=tmp_path / "j.jsonl", batches=nets.batches(4, seed=9))


CHILD = """
import sys
import warnings
sys.path[:0] = {path!r}
import nets
from pyquant.mixed_precision.loss.sensitivity import sensitivity

def told(done, total, what):
    print(done, flush=True)
    if done == 4:
        sys.stdin.readline()

sensitivity(nets.classifier(), nets.batches(), ("fp32", "int8", "int4"), "kl", "cumulative", num_batches=4,
            progress=told, journal={journal!r})
"""


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    journal, other = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    path = [str(Path(__file__).parents[1]), str(Path(pyquant.__file__).parents[1])]
    code = CHILD.format(path=path, journal=str(journal))
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == "4":
                break
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert journal.read_bytes().count(b"\n") == 5  # the header and four evaluations
    with journal.open("ab") as file:
        file.write(b'{"crc32":"0123')  # a line that was being written
    told: list[int] = []
    for name, kept in (("resumed", journal), ("whole", other)):
        report = _run("kl", "cumulative", journal=kept, latency=None, progress=lambda done, *_: told.append(done))
        save_record(tmp_path / f"{name}.json", report)
    assert told == [*range(1, 11)] * 2
    assert (tmp_path / "resumed.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    assert journal.read_bytes() == other.read_bytes()


CASES = [("kl", "cumulative", True), ("eval", "leave_one_out", True)]
CASES += [(metric, "one_at_a_time", False) for metric in ("fisher", "noise", "error")]


def _worker(rank: int, folder: Path) -> None:
    for metric, mode, task in CASES:
        report = _run(metric, mode, task, journal=folder / f"{metric}.jsonl")
        save_record(folder / str(rank) / f"{metric}.json", report)
    try:
        sensitivity(nets.classifier(rank), nets.batches(), FORMATS, num_batches=4)
    except ArgumentError as error:
        (folder / f"differ.{rank}").write_text(str(error))
    try:
        spread_rows(range(3), _halved, 1)
    except (PyquantError, ValueError) as error:
        (folder / f"failed.{rank}").write_text(f"{type(error).__name__}: {error}")
    (folder / f"spread.{rank}").write_text(repr(spread_rows([2, 3, 7], _halved, 1)))


def _halved(x: int) -> list[float]:
    if x == 1:
        raise ValueError("one cannot be halved")
    return [x / 2]


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    ranks(_worker, tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for metric, mode, task in CASES:
            alone = to_plain(_run(metric, mode, task, journal=tmp_path / "alone.jsonl" if metric == "kl" else None))
            for rank in (0, 1):
                found = to_plain(load_record(tmp_path / str(rank) / f"{metric}.json", SensitivityReport))
                assert {**found, "environment": 0} == {**alone, "environment": 0}, (metric, rank)
    finally:
        torch.set_num_threads(threads)
    assert sorted((tmp_path / "kl.jsonl").read_bytes().splitlines()) == sorted(
        (tmp_path / "alone.jsonl").read_bytes().splitlines()
    )
    for rank in (0, 1):
        assert "the same in every process" in (tmp_path / f"differ.{rank}").read_text()
        assert (tmp_path / f"spread.{rank}").read_text() == "[[1.0], [1.5], [3.5]]"
    assert (tmp_path / "failed.1").read_text() == "ValueError: one cannot be halved"
    assert "process 1 of 2 failed" in (tmp_path / "failed.0").read_text()


def test_the_skip_list_is_what_a_quantizer_and_a_recipe_take() -> None:
    torch.manual_seed(0)
    model = nets.planted()
    report = sensitivity(model, nets.batches(2, 64, 128), ("fp32", "int4"), num_batches=2)
    rest = sum(sorted(row[1] for row in report.loss)[:-1])
    skipped = report.skip_list(rest * 1.001)
    assert skipped == [nets.PLANTED]
    quantizer = pyquant.SelectiveQuantizer(verbose=False)
    quantizer.register_skip_quantization(layer_names=set(skipped))
    twin = quantizer.quantize_module(nets.planted())
    assert type(twin.get_submodule(nets.PLANTED)) is nn.Linear
    recipe = {"selective_quantizer_params": {"skip_modules": skipped}, "calib_params": {"num_calib_batches": 2}}
    quantised = pyquant.quantize_recipe_(nets.planted(), recipe, nets.batches(2, 64, 128))
    kinds = {name: type(m) for name, m in quantised.named_modules() if isinstance(m, (nn.Linear, QLinear))}
    assert kinds == {str(2 * i): nn.Linear if str(2 * i) in skipped else QLinear for i in range(5)}


def test_groups_that_refuse_a_format_are_told_and_skipped() -> None:
    report = sensitivity(nets.classifier(), nets.batches(), ("fp32", "W4A8Dynamic(group_size=16)"), num_batches=4)
    assert report.loss[0][1] is None
    assert "group_size" in report.refusals[0]
    assert report.skip_list(1e9) == ["0"]
    assert report.ranking() == [n for n in report.ranking() if n != "0"]
    assert report.cost.evaluations == 2


def test_projections_of_one_input_share_a_row() -> None:
    report = sensitivity(nets.Attention(), nets.tokens(2), num_batches=2, metric="fisher")
    assert report.groups[0].layers == ("q", "k", "v")
    assert set(report.skip_list(0.0)) == {"q", "k", "v", "out", "up", "down", "head"}


def test_a_task_metric_alone_needs_no_data() -> None:
    model = nets.classifier()
    report = sensitivity(model, None, ("fp32", "W8A8Dynamic"), "eval", eval_fn=Accuracy(model))
    assert report.task.baseline == 1.0
    assert report.loss[0][1] == 1.0 - report.task.table[0][1]
    with pytest.raises(ArgumentError, match="batches"):
        sensitivity(model, None, ("fp32", "W8A8Dynamic"), "fisher")


def test_wrong_arguments_are_refused_before_anything_runs() -> None:
    def data() -> Any:
        raise AssertionError("data was fetched")
        yield

    model = nets.classifier()
    for more in ({"metric": "best"}, {"mode": "all"}):
        with pytest.raises(ArgumentError, match=next(iter(more))):
            sensitivity(model, data(), **more)
    for more, match in (
        ({"repeats": 0}, "repeats"),
        ({"metric": "fisher", "mode": "leave_one_out"}, "leave_one_out"),
        ({"metric": "eval"}, "eval_fn"),
        ({"loss": "accuracy"}, "loss"),
        ({"eval_fn": 3}, "eval_fn"),
    ):
        with pytest.raises(ArgumentError, match=match):
            sensitivity(model, nets.batches(), num_batches=1, **more)
    table = Table()
    table.formats = ("fp32", "int4")  # type: ignore[attr-defined]
    with pytest.raises(ArgumentError, match="latency"):
        _run(latency=table)
    with pytest.raises(ArgumentError, match="SwitchableModel"):
        sensitivity(SwitchableModel(model, FORMATS, nets.batches(), num_batches=4), nets.batches())
    report = _run("error")
    with pytest.raises(ArgumentError, match="predicts losses"):
        report.skip_list(0.1)
    for bad in (-1, float("nan"), True, "x"):
        with pytest.raises(ArgumentError, match="max_drop"):
            report.skip_list(bad)
    with pytest.raises(ArgumentError, match="format"):
        _run().skip_list(0.1, "fp32")
    with pytest.raises(ArgumentError, match="by"):
        _run().skip_list(0.1, by="task")


@pytest.mark.parametrize("mode", ["one_at_a_time", "cumulative"])
def test_a_metric_that_fails_is_found_before_anything_is_measured(mode: str) -> None:
    told: list[object] = []
    with pytest.raises(NonFiniteError, match="eval_fn"):
        sensitivity(
            nets.classifier(),
            nets.batches(),
            FORMATS,
            mode=mode,
            num_batches=4,
            eval_fn=lambda model: float("nan"),
            progress=lambda *step: told.append(step),
        )
    assert told == []


def test_a_metric_of_the_wrong_direction_is_asked_about() -> None:
    model = nets.classifier()
    target = [model(x) for x in nets.batches()]

    def error(model: nn.Module) -> float:
        return 1.0 + sum(float((model(x) - y).abs().mean()) for x, y in zip(nets.batches(), target, strict=True))

    given = {"num_batches": 4, "eval_fn": error}
    with pytest.warns(QuantizationWarning, match="higher_is_better=False"):
        sensitivity(model, nets.batches(), FORMATS, **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        sensitivity(model, nets.batches(), FORMATS, **given, higher_is_better=False)


def test_the_record_survives_its_file(tmp_path: Path) -> None:
    report = _run(mode="cumulative", task=True)
    assert load_record(save_record(tmp_path / "r.json", report), SensitivityReport) == report
    assert os.listdir(tmp_path) == ["r.json"]


def test_what_is_in_no_group_is_named() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.attention(x, x, x)[0])
            return y

    data = [torch.randn(2, 3, 16)]
    with pytest.warns(pyquant.QuantizationWarning, match=r"search and sensitivity: \d+% .*attention .*expose_linears_"):
        report = pyquant.sensitivity(Attends().eval(), data, formats=("float", "int8"))
    assert [group.name for group in report.groups] == ["head"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", pyquant.QuantizationWarning)
        pyquant.sensitivity(Attends().eval(), data, formats=("float", "int8"), filter_fn=lambda _, name: name == "head")
        exposed = pyquant.expose_linears_(Attends().eval())
        assert len(pyquant.sensitivity(exposed, data, formats=("float", "int8")).groups) > 1
