"""bench.qat_gpu as far as a machine without a GPU can tell: what it trains, and what it says of times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/ is no part of the installed package

from bench import qat_gpu
from pyquant.measure.environment import describe_environment
from pyquant.measure.timing import CpuClock
from pyquant.report.records.figures import Figures
from pyquant.report.records.record import load_record

SHAPE = (16, 32, 24)


def test_every_variant_takes_a_step() -> None:
    seconds = qat_gpu.measure(SHAPE, "cpu", CpuClock(), 2)
    assert set(seconds) == {qat_gpu.PLAIN, qat_gpu.SIMULATED, qat_gpu.INTEGER}
    assert all(value > 0 for value in seconds.values())


def test_a_step_changes_the_weights_of_its_own_copy() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 4), torch.randn(3, 8).bfloat16()
    before = linear.weight.clone()
    for name in (qat_gpu.PLAIN, *qat_gpu.GOALS):
        qat_gpu.step_of(linear, x, name)()
    assert torch.equal(linear.weight, before)


@pytest.mark.parametrize(("simulated", "integer", "holds"), [(1.05, 0.9, True), (1.2, 0.9, False), (1.05, 0.95, False)])
def test_verdicts(simulated: float, integer: float, holds: bool) -> None:
    rows = {SHAPE: {qat_gpu.PLAIN: 2e-3, qat_gpu.SIMULATED: 2e-3 * simulated, qat_gpu.INTEGER: 2e-3 * integer}}
    text, all_hold = qat_gpu.report(rows)
    assert all_hold is holds
    assert f"| 2.00 | {simulated:.2f} | {integer:.2f} |" in text
    assert text.count("PASS") + text.count("MISS") == 2


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("not run: there is a GPU here")
    assert qat_gpu.main([]) == 2
    assert "CUDA" in capsys.readouterr().out


def test_results_are_written(tmp_path: Path) -> None:
    rows = {SHAPE: {qat_gpu.PLAIN: 2e-3, qat_gpu.SIMULATED: 2.1e-3, qat_gpu.INTEGER: 1.9e-3}}
    qat_gpu.write(tmp_path, rows, describe_environment("cpu"), "text")
    figures = load_record(tmp_path / "qat_step.json", Figures)
    shape, *seconds = zip(("tokens", "K", "N"), SHAPE, strict=True), *rows[SHAPE].items()
    assert figures.rows("seconds a step") == [{**dict(shape), **{f"{name}, s": value for name, value in seconds}}]
    assert figures.environment.torch == torch.__version__
    assert "text" in (tmp_path / "qat_step.md").read_text()
