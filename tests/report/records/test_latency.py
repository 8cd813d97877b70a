"""A latency table adds up, refuses what it did not measure, and goes to a file and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pyquant.errors import ArgumentError, CheckpointError
from pyquant.report.records.latency import LatencyTable, MeasuredConfig
from pyquant.report.records.record import from_plain, to_plain


def _table(**changes: object) -> LatencyTable:
    table = LatencyTable(
        groups=("qkv", "out"),
        layers=(("q", "k"), ("out",)),
        formats=("fp32", "int8", "w4"),
        weight_bits=(16, 8, 4),
        input_bits=(16, 8, 8),
        base_us=5.0,
        group_us=((10.0, 4.0, None), (8.0, 3.0, 2.0)),
        interval_us=(((9.0, 11.0), (3.9, 4.1), None), ((7.5, 8.5), (3.0, 3.0), (1.0, 3.0))),
        layer_us={"q": (6.0, 3.0, None), "k": (4.0, 1.0, None), "out": (8.0, 3.0, 2.0)},
        border_us=(((0.0, 1.0, 2.0), (0.5, 0.0, 0.25), (None, None, None)),),
        uniform=(MeasuredConfig((0, 0), 23.0, 22.0, 24.0, 23.0),),
        held_out=(MeasuredConfig((1, 0), 16.0, 15.0, 18.0, 17.5), MeasuredConfig((0, 2), 20.0, 19.0, 21.0, 19.0)),
        clock="cpu",
        rounds=9,
        fingerprint={"cpu": "a", "threads": "1"},
        scale=1.02,
        notes=("one",),
    )
    return dataclasses.replace(table, **changes)


def test_a_prediction_is_base_groups_and_borders() -> None:
    table = _table()
    assert table.predict((0, 0)) == 5 + 10 + 8
    assert table.predict((1, 0)) == 5 + 4 + 8 + 0.5
    assert table.predict({"out": "w4", "qkv": "fp32"}) == 5 + 10 + 2 + 2
    assert table.us("qkv", "int8") == 4.0
    assert table.allowed == ((True, True, False), (True, True, True))
    assert _table(border_us=None).predict((1, 0)) == 5 + 4 + 8


def test_errors_are_stated() -> None:
    table = _table()
    assert table.bias == pytest.approx((17.5 / 16 + 19 / 20) / 2)
    assert table.median_error == pytest.approx((0.09375 + 0.05) / 2)
    assert table.worst_error == pytest.approx(0.09375)
    empty = _table(held_out=())
    assert empty.bias is empty.median_error is empty.worst_error is None


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ((2, 0), "qkv: w4"),
        ((0,), "2 numbers"),
        ((0, 3), "2 numbers in"),
        ((0, -1), "2 numbers in"),
        ({"qkv": "fp32"}, "every group"),
        ({"qkv": "fp32", "out": "int2"}, "'int2'"),
    ],
)
def test_configurations_of_something_else_are_refused(config: object, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        _table().predict(config)  # type: ignore[arg-type]


def test_it_goes_to_a_file_and_back(tmp_path: Path) -> None:
    table = _table()
    path = table.save(tmp_path / "latency.json")
    assert LatencyTable.load(path, {"cpu": "a", "threads": "1"}) == table
    with pytest.raises(CheckpointError, match=r"latency.json: threads is '1', and '4' here"):
        LatencyTable.load(path, {"cpu": "a", "threads": "4"})
    with pytest.raises(CheckpointError, match="gpu is 'nothing', and 'b' here"):
        LatencyTable.load(path, {"cpu": "a", "threads": "1", "gpu": "b"})
    with pytest.raises(CheckpointError, match="threads is '1', and 'nothing' here"):
        LatencyTable.load(path, {"cpu": "a"})


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = _table().save(tmp_path / "latency.json")
    path.write_text(path.read_text().replace('"base_us": 5.0', '"base_us": "nan"'))
    with pytest.raises(CheckpointError, match="base_us"):
        LatencyTable.load(path)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"base_us": -1.0}, "base_us"),
        ({"group_us": ((1.0, 2.0, 3.0),)}, "group_us"),
        ({"group_us": ((1.0, 2.0), (1.0, 2.0))}, "group_us"),
        ({"group_us": ((1.0, 2.0, float("nan")), (1.0, 2.0, 3.0))}, "group_us"),
        ({"layer_us": {"q": (1.0, 1.0, 1.0)}}, "layer_us"),
        ({"border_us": ()}, "border_us"),
        ({"weight_bits": (16,)}, "weight_bits"),
    ],
)
def test_tables_that_do_not_fit_are_refused(changes: dict[str, object], argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        _table(**changes)


def test_costs_of_layers_by_bits() -> None:
    assert _table().layer_costs() == {"q": {16: 6.0, 8: 3.0}, "k": {16: 4.0, 8: 1.0}, "out": {16: 8.0, 8: 3.0, 4: 2.0}}
    with pytest.raises(ArgumentError, match="also one of 4 bits"):
        _table().layer_costs(inputs=True)


def test_searches_can_take_its_tables_as_arrays() -> None:
    table = _table()
    assert np.isnan(np.array(table.group_us, dtype=float)).sum() == 1
    assert np.array(table.border_us, dtype=float).shape == (1, 3, 3)
    assert from_plain(to_plain(table)) == table
