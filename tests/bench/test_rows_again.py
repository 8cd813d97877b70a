"""bench.rows_again: what the model of now says of times of another day."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import rows, rows_again
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment
from pyquant.measure.tune import problems_for
from pyquant.report.records.figures import Figures

SCHEMES = ("W8A8", "W4A16(group_size=128)")


def _figures(scale: dict[str, float], gpu: str = "NVIDIA H200, sm_90, 132 SMs") -> Figures:
    """Times of `scale` by scheme, over what the model says."""
    shapes = []
    for scheme in SCHEMES:
        problem = problems_for([(4096, 4096, scheme)], [64], torch.bfloat16, rows.DryRig.device)[0]
        shape = rows.timed(rows.DryRig(), scheme, problem, 1.5, only_compiled=False)
        timed = [replace(row, us=scale[scheme] * row.modelled_us) for row in shape.rows]
        shapes.append(replace(shape, rows=timed))
    return rows.figures(rows.RowsReport(replace(describe_environment("cpu"), gpu=gpu), shapes))


def test_times_that_the_model_expects_lose_nothing() -> None:
    found = [*rows_again.again(_figures({"W8A8": 1.0, "W4A16(group_size=128)": 1.25}))]
    assert [one.scheme for one in found] == [*SCHEMES]
    assert [one.loss for one in found] == [1, 1]
    said = rows_again.text(found)
    assert "| sm90_w4a16 " in said
    assert {line.split("|")[3].strip() for line in said.splitlines() if "sm90_w4a16" in line} == {"1.25"}
    assert {line.split("|")[3].strip() for line in said.splitlines() if "sm90_s8s8" in line} == {"1.00"}


def test_a_choice_that_was_not_the_quickest_or_not_timed_is_told() -> None:
    figures = _figures(dict.fromkeys(SCHEMES, 1.0))
    (kernels,) = (table for table in figures.tables if table.title == "kernels")
    us, row = kernels.header.index("us"), kernels.header.index("row")
    first = kernels.rows[0]
    first[us] = 2 * first[us]  # type: ignore[operator]
    one = next(rows_again.again(figures))
    assert one.loss is not None
    assert 1.3 < one.loss <= 2
    first[row] = "gemm_of_another_day"
    one = next(rows_again.again(figures))
    assert one.loss is None
    assert "gemm_of_another_day" not in one.us


def test_an_unknown_card_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"measured on 'NVIDIA Z1'"):
        [*rows_again.again(_figures(dict.fromkeys(SCHEMES, 1.0), "NVIDIA Z1"))]
