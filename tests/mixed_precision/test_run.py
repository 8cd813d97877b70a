"""pyquant.search from end to end on models that are small enough to know the answer."""

from __future__ import annotations

import copy
import itertools
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from searched import FORMATS, batches, net, search
from torch import nn

import pyquant
from pyquant.errors import ArgumentError, CheckpointError, InfeasibleError, NonFiniteError, QuantizationWarning
from pyquant.mixed_precision import run
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.loss.evaluate import LossOfOutputs
from pyquant.ptq.calibrator import apply_ranges_
from pyquant.report.records.latency import LatencyTable


def fixed_latency(model: nn.Module, us: dict[str, float], bases: float = 10.0) -> LatencyTable:
    """A table as if it had been measured here: every group costs what its format says, times its weights."""
    from pyquant.mixed_precision.latency.measure import latency_fingerprint

    switchable = SwitchableModel(model, FORMATS, batches(), num_batches=4)
    rows = tuple(tuple(us[name] * numel / 100 for name in FORMATS) for numel in switchable.numel)
    return LatencyTable(
        groups=tuple(g.name for g in switchable.groups),
        layers=tuple(g.layers for g in switchable.groups),
        formats=FORMATS,
        weight_bits=(16, 8, 4),
        input_bits=(16, 8, 4),
        base_us=bases,
        group_us=rows,
        interval_us=tuple(tuple((u, u) for u in row) for row in rows),
        layer_us={g.layers[0]: row for g, row in zip(switchable.groups, rows, strict=True)},
        border_us=None,
        fingerprint=latency_fingerprint(switchable, batches()[0]),
    )


@pytest.mark.parametrize("limit", [1e-4, 1e-3, 1e-2])
def test_few_measurements_find_what_all_of_them_would(limit: float) -> None:
    model = net()
    plan = search(model, budget=20, max_loss=limit, max_drop=None)
    switchable = SwitchableModel(model, FORMATS, batches(), num_batches=4)
    loss = LossOfOutputs(switchable, "kl")
    sizes = switchable.group_bytes()
    true = [
        (float(switchable.other_bytes() + sum(sizes[g][f] for g, f in enumerate(c))), loss(c))
        for c in itertools.product(range(3), repeat=4)
    ]
    chosen, reference = plan.record.plan, plan.record.points[plan.record.reference]
    assert {(float(p.size_bytes), p.loss) for p in plan.record.points} <= set(true)
    assert plan.record.counts["configurations"] <= 20
    assert chosen.loss <= limit
    cheapest = min(size for size, lost in true if lost <= limit)
    assert reference.size_bytes - chosen.size_bytes >= 0.97 * (reference.size_bytes - cheapest)


def test_the_plan_is_a_recipe_that_ptq_and_qat_take_unchanged(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, data = net(), batches()
    plan = search(model)
    assert any(scheme is not None for scheme in plan.schemes.values())
    path = plan.save(tmp_path / "recipe.yaml")
    applied = plan.apply_(copy.deepcopy(model))
    by_file = pyquant.quantize_recipe_(copy.deepcopy(model), path, data)
    by_ranges = pyquant.quantize_recipe_(copy.deepcopy(model), plan.recipe, ranges=plan.ranges)
    for batch in data:
        assert torch.equal(applied(batch), by_file(batch))
        assert torch.equal(applied(batch), by_ranges(batch))
    trained = pyquant.prepare_(copy.deepcopy(model), path)
    apply_ranges_(trained, plan.ranges)
    trained = pyquant.prepare_qat_(trained)
    assert {n for n, m in trained.named_modules() if hasattr(m, "fake_quantizers")} == {
        name for name, scheme in plan.schemes.items() if scheme is not None
    }
    for batch in data:  # no step was made: the codes are those of the plan
        assert torch.equal(pyquant.convert_(copy.deepcopy(trained)).eval()(batch), applied(batch))


def test_the_limit_holds_for_what_was_measured_and_the_cheapest_is_taken() -> None:
    plan = search(max_drop=0.1, budget=60)
    chosen = plan.record.plan
    assert chosen.drop is not None
    assert chosen.drop <= 0.1
    cheaper = [p for p in plan.record.points if p.drop is not None and p.drop <= 0.1 and p.cost < chosen.cost]
    assert all(p.loss > chosen.loss for p in cheaper), "only luck, by the trend, may be left out"


def test_a_task_metric_decides_where_there_is_one() -> None:
    model, data = net(), batches(seed=7)
    labels = [model(x).argmax(-1) for x in data]

    def accuracy(candidate: nn.Module) -> float:
        hits = [(candidate(x).argmax(-1) == y).float().mean() for x, y in zip(data, labels, strict=True)]
        return float(sum(hits) / len(hits))

    plan = search(model, eval_fn=accuracy, max_drop=0.02)
    assert plan.record.plan.quality is not None
    assert plan.record.plan.quality >= 0.98
    assert accuracy(plan.apply_(model)) == plan.record.plan.quality


def test_what_passed_by_luck_is_left_out_and_the_record_says_so() -> None:
    calls: list[float] = []

    def luck(candidate: nn.Module) -> float:
        calls.append(1.0 if len(calls) in (0, 7) else 0.5)
        return calls[-1]

    plan = search(eval_fn=luck, max_drop=0.05, evaluations=10)
    assert len(calls) > 8
    assert set(plan.configuration.values()) == {"fp32"}
    assert any("1 of the configurations measured keeps the limit of 0.05 alone" in note for note in plan.record.notes)
    assert not any("taken for luck" in note for note in search().record.notes)


def test_slower_formats_are_dropped_with_the_reason_and_never_chosen() -> None:
    model = net()
    table = fixed_latency(model, {"fp32": 8.0, "int8": 4.0, "int4": 9.0})
    plan = search(model, objective="latency", latency=table, max_drop=1.0, latency_seconds=0.2, candidates=2)
    whys = [group.dropped["int4"] for group in plan.record.groups]
    assert all(re.fullmatch(r"costs \S+ ms and more where fp32 costs \S+ ms: not faster by 1 %", why) for why in whys)
    assert all("int4" not in p.configuration.values() for p in plan.record.points[9:])
    assert "int4" not in plan.configuration.values()


@pytest.mark.parametrize("options", [{}, {"never_slower_margin": 0.0}, {"max_loss": 1.0}, {"max_drop": 1.0}])
def test_a_limit_is_kept_where_that_is_slower(options: dict[str, Any]) -> None:
    """All of int8 keeps it, and int8 is 2 % slower than float everywhere."""
    table = fixed_latency(net(), {"fp32": 1.0, "int8": 1.02, "int4": 1.05})
    options = {"max_drop": None, "max_effective_bits": 10.0, "objective": "latency", **options}
    plan = search(net(), latency=table, candidates=1, latency_seconds=0.1, **options)
    assert plan.record.plan.effective_bits <= 10.0
    assert not any("int8" in group.dropped for group in plan.record.groups)


def test_where_nothing_is_faster_the_plan_is_the_float_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(ledger: Any, switchable: Any, configs: list[Any], *others: Any) -> dict[Any, Any]:
        return {config: (10.0 - 0.01 * (i > 0), 9.9, 10.1) for i, config in enumerate(configs)}

    monkeypatch.setattr(run, "timed", timed)  # layers this small are quicker in integers on some machines
    model = net()
    table = fixed_latency(model, {"fp32": 8.0, "int8": 8.0, "int4": 7.99})
    plan = search(model, objective="latency", latency=table, max_drop=1.0, latency_seconds=0.2)
    assert set(plan.configuration.values()) == {"fp32"}
    assert "nothing that keeps the limits is faster" in plan.record.verdict
    before = plan.apply_(model)
    assert type(before[0]) is nn.Linear


def test_limits_on_size_and_bits_hold() -> None:
    free = search(max_drop=None, max_loss=10.0)
    reference = free.record.points[free.record.reference]
    plan = search(max_drop=None, max_size_bytes=reference.size_bytes / 2, objective="effective_bits")
    assert plan.record.plan.size_bytes <= reference.size_bytes / 2
    plan = search(max_drop=None, max_effective_bits=7.0)
    assert plan.record.plan.effective_bits <= 7.0
    assert plan.record.plan.loss == min(p.loss for p in plan.record.points if p.effective_bits <= 7.0)


def test_runs_repeat_bit_for_bit() -> None:
    assert search().record == search().record


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"colour": 1}, "colour"),
        ({"budget": 0}, "budget"),
        ({"metric": "taste"}, "metric"),
        ({"algorithm": "luck"}, "algorithm"),
        ({"objective": "joy"}, "objective"),
        ({"max_drop": -1}, "max_drop"),
        ({"max_drop": None}, "max_drop"),
        ({"metric": "mse"}, "eval_fn"),
        ({"max_loss": "much"}, "max_loss"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=f"'{named}'"):
        search(**options)


@pytest.mark.parametrize("sensitivity", ["fisher", "noise", "error", "hessian", "mse"])
def test_other_first_tables_lead_to_the_same_place(sensitivity: str) -> None:
    model = net()
    plan = search(model, sensitivity=sensitivity, max_drop=None, max_loss=1e-2, budget=20)
    usual = search(model, max_drop=None, max_loss=1e-2, budget=20)
    reference = usual.record.points[usual.record.reference].size_bytes
    assert plan.record.plan.loss <= 1e-2
    assert reference - plan.record.plan.size_bytes >= 0.9 * (reference - usual.record.plan.size_bytes)


@pytest.mark.parametrize("algorithm", ["exhaustive", "greedy", "bisection"])
def test_every_algorithm_keeps_the_limit(algorithm: str) -> None:
    plan = search(algorithm=algorithm, max_drop=None, max_loss=1e-2, budget=90)
    assert plan.record.plan.loss <= 1e-2
    assert plan.record.settings["algorithm"] == algorithm


@pytest.mark.parametrize("max_drop", [0.05, None])
def test_exhaustive_needs_as_many_as_there_are(max_drop: float | None) -> None:
    """Not in each of the rounds that a limit on a metric makes of the budget."""
    limits = {"max_drop": max_drop, "max_loss": 1e-2}
    assert len(search(algorithm="exhaustive", budget=81, **limits).record.points) == 81
    with pytest.raises(ArgumentError, match=r"argument 'budget': got 9; allowed: at least \d\d: all configurations"):
        search(algorithm="exhaustive", budget=9, **limits)


@pytest.mark.parametrize(("max_drop", "saved"), [(2.0, 2.0), (None, None), (math.inf, None), (0.05, 0.05)])
def test_a_recipe_has_the_limit_of_its_search(max_drop: float | None, saved: float | None, tmp_path: Path) -> None:
    """Metrics in percent have limits above 1."""
    plan = search(max_drop=max_drop, max_loss=1e-2, eval_fn=lambda model: 71.5)
    plan.save(tmp_path / "plan.yaml")
    read = pyquant.Recipe.load(tmp_path / "plan.yaml").search
    assert read is not None
    assert read.max_drop == saved


class Broken(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.net, self.factor = net(), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * self.factor


@pytest.mark.parametrize("sensitivity", ["kl", "fisher", "hessian", "noise"])
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_model_that_gives_no_numbers_is_blamed_itself(factor: float, sensitivity: str) -> None:
    for run_it in (
        lambda: search(Broken(factor).eval(), sensitivity=sensitivity),
        lambda: pyquant.sensitivity(Broken(factor).eval(), batches(), ("float", "int8"), metric=sensitivity),
    ):
        with pytest.raises(NonFiniteError, match="argument 'model': got NaN or infinity in its outputs"):
            run_it()


def test_what_is_no_data_and_no_journal_is_named(tmp_path: Path) -> None:
    for run_it in (pyquant.search, lambda model, x, data, formats, **_: pyquant.sensitivity(model, data, formats)):
        with pytest.raises(ArgumentError, match="argument 'data': got no batches"):
            run_it(net(), batches()[0], [], FORMATS, objective="size")
    with pytest.raises(CheckpointError, match="a folder; allowed: a regular file"):
        search(journal=tmp_path)


def test_the_name_is_the_functions_alone() -> None:
    import importlib

    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("pyquant.search")
    assert callable(pyquant.search)


def test_a_limit_on_latency_is_kept_by_the_clock_and_not_by_the_table_alone() -> None:
    model = net()
    table = fixed_latency(model, {"fp32": 8e3, "int8": 4e3, "int4": 2e3})
    settings = {"objective": "latency", "latency": table, "max_drop": None, "latency_seconds": 0.2}
    half = table.predict((0, 0, 0, 0)) * 0.6  # far more than the real model takes: only the table says no to fp32
    plan = search(model, max_latency_us=half, **settings)
    chosen = plan.record.plan
    assert chosen.latency_us is not None
    assert chosen.latency_us <= half
    assert chosen.predicted_us is not None
    assert chosen.predicted_us <= half
    assert chosen.loss == min(p.loss for p in plan.record.points if p.latency_us is not None and p.predicted_us <= half)  # type: ignore[operator]
    slow = fixed_latency(model, {"fp32": 8e-3, "int8": 4e-3, "int4": 2e-3}, bases=1e-3)  # the table promises too much
    with pytest.raises(InfeasibleError, match="end to end us"):
        search(model, max_latency_us=1.0, **{**settings, "latency": slow})


def test_a_limit_that_nothing_can_keep_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> None:
        raise AssertionError("a loss was measured")

    monkeypatch.setattr(LossOfOutputs, "__call__", nothing)
    monkeypatch.setattr(run, "latency_table", nothing)
    with pytest.raises(InfeasibleError, match=r"max_size_bytes 10: .* is the least") as raised:
        search(max_drop=None, max_size_bytes=10.0, objective="latency")
    assert set(raised.value.nearest.values()) == {"int4"}  # type: ignore[attr-defined]


def test_the_float_model_is_evaluated_once_and_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> None:
        raise AssertionError("something was measured before the metric of the float model")

    def broken(model: nn.Module) -> float:
        calls.append(model)
        return float("nan")

    calls: list[nn.Module] = []
    with monkeypatch.context() as patched:
        patched.setattr(LossOfOutputs, "__call__", nothing)
        patched.setattr(run, "latency_table", nothing)
        with pytest.raises(NonFiniteError, match=r"eval_fn.*nan"):
            search(eval_fn=broken, objective="latency")
    assert len(calls) == 1
    floats: list[bool] = []
    search(eval_fn=lambda model: floats.append(is_float(model)) or 1.0, budget=6)  # type: ignore[func-returns-value]
    assert floats.count(True) == 1
    assert floats[0]


def is_float(model: nn.Module) -> bool:
    return all(type(layer) in (nn.Linear, nn.ReLU) for layer in model.children())


def test_a_metric_that_all_lowered_configurations_improve_asks_for_its_direction() -> None:
    target = [net()(x) for x in batches()]

    def error(model: nn.Module) -> float:
        return 1.0 + sum(float((model(x) - y).abs().mean()) for x, y in zip(batches(), target, strict=True))

    with pytest.warns(QuantizationWarning, match=r"none of the \d+ lowered .* has 1\..*higher_is_better=False"):
        search(eval_fn=error, max_drop=10.0, budget=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        search(eval_fn=error, max_drop=10.0, higher_is_better=False, budget=8)
        search(eval_fn=lambda model: 0.5, max_drop=10.0, budget=8)
    with pytest.warns(QuantizationWarning, match="Where more of it is better, higher_is_better=True"):
        search(eval_fn=lambda model: -error(model), max_drop=10.0, higher_is_better=False, budget=8)


def test_the_nearest_is_the_one_that_misses_least() -> None:
    model = net()
    switchable = SwitchableModel(model, FORMATS, batches(), num_batches=4)
    narrow = (2, 2, 2, 2)
    least = switchable.other_bytes() + sum(row[2] for row in switchable.group_bytes())
    most = 0.99 * LossOfOutputs(switchable, "kl")(narrow)  # so near that all of int4 misses it by less than more bytes
    with pytest.raises(InfeasibleError, match=r"the nearest is .*: loss .* exceeds") as raised:
        search(model, max_drop=None, max_loss=most, max_size_bytes=1.001 * least, budget=20)
    assert raised.value.nearest == switchable.named(narrow)  # type: ignore[attr-defined]
