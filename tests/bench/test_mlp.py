"""The founding experiment with a clock of our own: order, journal, resuming, and what is said about it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/ is no part of the installed package

from bench.goals import mlp_bars
from pyquant.bench import mlp
from pyquant.bench.mlp import END_TO_END, KERNEL, MlpBench, MlpResult, additivity_of, run_mlp_bench, trade_off_of
from pyquant.bench.mlp_net import BITS, Joint, all_configs, joints
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.measure.environment import describe_environment
from pyquant.nn.qlinear import QLinear
from pyquant.ops import LinearSpec
from pyquant.report.records.bench import Bar

BENCH = MlpBench((32, 16, 24), 3, tuple(all_configs(2)), runs=4, float_type=torch.bfloat16)
CPU = describe_environment()


class FakeClock:
    """Runs a candidate and says that it took as long as its layers' bits; counts."""

    name = "cpu"

    def __init__(self) -> None:
        self.calls = 0

    def seconds(self, candidate: Any, calls: int) -> float:
        assert calls == 1
        candidate()
        self.calls += 1
        return 1e-6 * self.bits(candidate)

    def bits(self, candidate: Any) -> int:
        """Of the weights: of layers in a chain, of ops on their own, or of one layer."""
        if isinstance(candidate.func, QLinear):
            return candidate.func.scheme.weights.bits
        if candidate.func is torch.ops.pyquant.qlinear.default:
            return LinearSpec.from_ints(candidate.args[3]).w_bits
        if candidate.func is torch.ops.pyquant.float_linear.default:
            return 16
        parts = candidate.args[0]
        return sum(one.scheme.weights.bits if isinstance(one, QLinear) else self.bits(one) for one in parts)


def run(clock: FakeClock, **changes: Any) -> mlp.MlpResult:
    journal = changes.pop("journal", None)
    return run_mlp_bench(replace(BENCH, **changes), clock, environment=CPU, journal=journal)


def test_every_round_times_everything_once() -> None:
    clock = FakeClock()
    result = run(clock)
    assert clock.calls == 4 * (2 * 9 + (9 + 3) + (9 + 5))  # columns; layers on ready inputs; between their neighbours
    for column in (KERNEL, END_TO_END):
        assert list(result.times[column]) == all_configs(2)
        for config, samples in result.times[column].items():
            wanted = sum(BITS[name] for name in config)
            assert samples.median == pytest.approx(wanted)
            assert (samples.mean, samples.std, samples.low) == pytest.approx((wanted, 0.0, wanted))
        assert result.additivity[column].worst == pytest.approx(0.0)
        assert result.additivity[column].configs == 9
    assert result.checked > 0


def test_a_killed_run_goes_on_and_ends_with_the_same_rounds(tmp_path: Path) -> None:
    journal = tmp_path / "new" / "rounds.jsonl"
    first = FakeClock()
    run(first, runs=2, journal=journal)
    with journal.open("a") as file:
        file.write("[1.0, 2.0")  # killed while it wrote
    second = FakeClock()
    result = run(second, journal=journal)
    assert second.calls == first.calls  # two rounds more, not four
    lines = journal.read_text().splitlines()
    assert len(lines) == 5
    assert all(len(json.loads(line)["value"]) == first.calls // 2 for line in lines[1:])
    assert result.times[KERNEL]["int8", "int4"].median == pytest.approx(12.0)
    third = FakeClock()
    run(third, journal=journal)
    assert third.calls == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [({"batch": 4}, "batch '3'"), ({"seed": 1}, "seed '0'"), ({"configs": BENCH.configs[:4]}, "candidates")],
)
def test_rounds_of_another_setting_are_refused(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    journal = tmp_path / "rounds.jsonl"
    run(FakeClock(), runs=1, journal=journal)
    before = journal.read_bytes()
    with pytest.raises(CheckpointError, match=told):
        run(FakeClock(), runs=1, journal=journal, **change)
    assert journal.read_bytes() == before


@pytest.mark.parametrize("text", ["nonsense\n", "{}\n", '{"kind": "other", "key": {}}\n'])
def test_a_file_that_is_no_journal_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl"):
        run(FakeClock(), runs=1, journal=path)
    assert path.read_text() == text


def test_additivity_sees_what_a_border_costs() -> None:
    single = {joint: 10.0 for config in all_configs(2) for joint in joints(config)}
    assert additivity_of(dict.fromkeys(all_configs(2), 20.0), single).worst == 0.0
    single[Joint(1, "int8", "float", True)] = 15.0
    found = additivity_of(dict.fromkeys(all_configs(2), 20.0), single)
    assert (found.median, found.worst) == (0.0, 0.25)
    assert additivity_of(dict.fromkeys(all_configs(2), 25.0), single, count=5).bias == pytest.approx(-0.2)


def test_few_runs_make_no_headline() -> None:
    few, enough = (trade_off_of(run(FakeClock(), runs=n), KERNEL, CPU) for n in (4, 7))
    assert few.pair is None
    assert any("too few for a headline" in note for note in few.notes)
    assert enough.pair is not None
    assert not any("too few" in note for note in enough.notes)


def test_the_records_keep_the_columns_apart_and_state_the_formula() -> None:
    result = run(FakeClock())
    kernel, whole = (trade_off_of(result, column, CPU) for column in (KERNEL, END_TO_END))
    assert "products alone" in kernel.cost.definition
    assert "quantising and converting included" in whole.cost.definition
    assert kernel.formats == ("bf16", "int8", "int4")  # no float16 is claimed where none ran
    assert kernel.quality.definition == "sum over layers of output dimension x bits of its format"
    assert [point.quality for point in kernel.points][:2] == [16 * 16 + 24 * 16, 16 * 16 + 24 * 8]
    by_input = trade_off_of(result, KERNEL, CPU, "input")
    assert by_input.points[1].quality == 32 * 16 + 16 * 8
    assert "input dimension" in by_input.quality.definition
    assert not any("PASS" in note or "MISS" in note for note in kernel.notes)  # goals are a GPU's
    assert any(note.startswith("Additivity") for note in kernel.notes)


def test_goals_follow_the_gpu() -> None:
    result = run(FakeClock(), runs=7)

    def bars(gpu: str, result: MlpResult = result) -> dict[str, Bar]:
        environment = replace(CPU, gpu=gpu)
        columns = {"mlp": KERNEL, "mlp_end_to_end": END_TO_END}
        judged = mlp_bars({stem: trade_off_of(result, column, environment) for stem, column in columns.items()})
        return {bar.name: bar for bar in judged}

    assert bars("") == {}
    ampere = bars("Some GPU, sm_80, 108 SMs")
    assert ampere["int8 against bf16, kernels"].measured == pytest.approx(0.5)
    assert ampere["int8 against bf16, kernels"].passed
    assert ampere["int4 against bf16, kernels"].goal == 0.53
    assert ampere["spread at equal capacity, kernels"].measured > 0
    hopper = bars("Other GPU, sm_90, 132 SMs")
    assert "int4 against bf16, kernels" not in hopper
    assert hopper["int4 against int8, kernels"].measured == pytest.approx(0.5)
    assert bars("Some GPU, sm_80", run(FakeClock(), configs=BENCH.configs[:1])) == {}


def test_wrong_experiments_are_refused() -> None:
    for change, told in (
        ({"runs": 0}, "runs"),
        ({"batch": 0}, "batch"),
        ({"configs": (("int8",),)}, "int8.*2 formats"),
    ):
        with pytest.raises(ArgumentError, match=told):
            replace(BENCH, **change)
