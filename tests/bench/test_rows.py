"""bench.rows and bench.decoder without a GPU: what they time, say and refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import decoder, rows  # noqa: E402
from bench.cards import CARDS  # noqa: E402
from pyquant import _native  # noqa: E402
from pyquant.measure.environment import describe_environment  # noqa: E402
from pyquant.measure.tune import TORCH, problems_for  # noqa: E402

DEVICE = next(card.device for card in CARDS if card.name == "NVIDIA H200")


class _Rig:
    """Kernels take what the model says, but for those that a test names."""

    device = DEVICE
    name = "fake"

    def __init__(self, us: dict[str, float] | None = None, wrong: set[str] | None = None) -> None:
        self.us, self.wrong, self.clock = us or {}, wrong or set(), self

    def prepare(self, problem: dict[str, Any]) -> Callable[[str], tuple[Callable[[], str], bool]]:
        def build(name: str) -> tuple[Callable[[], str], bool]:
            run = lambda: name  # noqa: E731
            run.us = self.us.get(name) or (1e3 if name == TORCH else _native.cost_us(name, problem, DEVICE))  # type: ignore[attr-defined]
            return run, name not in self.wrong

        return build

    def seconds(self, candidate: Any, calls: int) -> float:
        return float(candidate.us * 1e-6 * calls)


def _timed(rig: _Rig, scheme: str = "W8A8", within: float = 2.0) -> rows.Shape:
    problem = problems_for([(4096, 4096, scheme)], [64], torch.bfloat16, DEVICE)[0]
    return rows.timed(rig, scheme, problem, within, only_compiled=False)


def test_the_model_chooses_the_best_where_the_clock_agrees_with_it() -> None:
    shape = _timed(_Rig())
    assert len(shape.rows) > 3
    assert shape.chosen is shape.best
    assert shape.loss == 1
    assert all(row.us == pytest.approx(row.modelled_us) for row in shape.rows)
    assert all(row.modelled_us <= 2 * shape.chosen.modelled_us for row in shape.rows)
    assert len(_timed(_Rig(), within=1.05).rows) < len(shape.rows)


def test_a_quicker_kernel_is_a_loss_and_a_wrong_one_is_named() -> None:
    first, second = _timed(_Rig()).rows[:2]
    shape = _timed(_Rig({second.row: first.us / 2}))
    assert shape.best.row == second.row
    assert shape.loss == pytest.approx(2)
    wrong = _timed(_Rig(wrong={first.row}))
    assert wrong.wrong == {first.row: "its result differs from the specification"}
    assert first.row not in {row.row for row in wrong.rows}


def test_the_report_names_choices_losses_and_what_is_wrong() -> None:
    first, second = _timed(_Rig()).rows[:2]
    shapes = [
        _timed(_Rig({second.row: first.us / 2})),
        _timed(_Rig(), "FP16(dtype=bfloat16)"),
        _timed(_Rig(wrong={first.row})),
    ]
    assert shapes[1].torch_us == pytest.approx(1e3)
    text = rows.markdown(rows.RowsReport(describe_environment("cpu"), shapes))
    assert "| 2.00 |" in text
    assert f"{first.row}: its result differs" in text


def test_no_shape_is_begun_after_the_deadline() -> None:
    assert [*rows.measure(_Rig(), ["W8A8"], [(4096, 4096)], [1], 2.0, deadline=0.0)] == []


@pytest.mark.parametrize("driver", [rows, decoder])
def test_without_a_gpu_the_drivers_say_so(driver: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert driver.main([]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_the_decoder_runs_as_every_variant() -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    found = decoder.measure(decoder.decoder(1, sizes), (1, 3), ("wall",), 1)
    report = decoder.DecoderReport(describe_environment("cpu"), 1, *found)
    assert report.failed == {}
    assert {row.tokens for row in report.rows} == {1, 3}
    assert all(value > 10 for value in report.db.values())
    assert "| tokens | bf16" in decoder.markdown(report)
