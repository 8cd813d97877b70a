"""Trade-offs: fronts, pairs of equal quality and uniform lines, against brute force and the seed's own figures."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from trade_offs import CAPACITY, LATENCY, seed_points, seed_trade_off, small_trade_off

from pyquant.report.records.record import load_record, save_record
from pyquant.report.records.trade_off import (
    TradeOff,
    TradeOffAxis,
    TradeOffPoint,
    configuration_text,
    largest_spread,
    trade_off,
)


def test_the_seeds_ratios_give_the_figures_that_were_predicted_for_them() -> None:
    made = seed_trade_off()
    qualities = [p.quality for p in made.points]
    assert (len(qualities), len(set(qualities)), min(qualities), max(qualities)) == (729, 184, 258048, 1032192)
    assert made.pair is not None
    assert round(made.pair.reduction, 3) == 0.418
    assert [round(line.cost) for line in made.lines] == [20000, 13800, 10600]
    slow, fast = made.points[made.pair.slow], made.points[made.pair.fast]
    assert slow.quality == fast.quality
    assert slow.cost * (1 - made.pair.reduction) == pytest.approx(fast.cost)


def test_ideal_ratios_and_their_extreme_pair() -> None:
    points = seed_points({"fp32": 1.0, "int8": 0.5, "int4": 0.25})
    pair = largest_spread([p.cost for p in points], [p.quality for p in points])
    assert pair is not None
    assert round(pair.reduction, 3) == 0.685
    assert points[pair.fast].quality == points[pair.slow].quality == 688128
    assert configuration_text(list(points[pair.fast].configuration.values())) == "int4 int4 int4 fp32 fp32 fp32"


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_front_and_pair_are_those_of_brute_force(higher_is_better: bool) -> None:
    random.seed(3)
    for _ in range(60):
        points = [
            TradeOffPoint({"a": random.choice("xyz")}, float(random.randint(1, 9)), float(random.randint(0, 5)))
            for _ in range(random.randint(1, 14))
        ]
        made = trade_off(points, "", LATENCY, CAPACITY, higher_is_better=higher_is_better, formats=("x", "y", "z"))
        sign = -1 if higher_is_better else 1

        def beats(p: TradeOffPoint, q: TradeOffPoint, sign: int = sign) -> bool:
            one, other = (p.cost, sign * p.quality), (q.cost, sign * q.quality)
            return one != other and one[0] <= other[0] and one[1] <= other[1]

        best = {(p.cost, p.quality) for p in points if not any(beats(q, p) for q in points)}
        assert {(p.cost, p.quality) for p in made.front} == best
        assert len(made.front) == len(best)  # of equal points one
        pairs = itertools.product(points, points)
        widest = max(1 - p.cost / q.cost for p, q in pairs if p.quality == q.quality)
        assert (made.pair.reduction if made.pair else 0) == pytest.approx(max(widest, 0))


def test_predictions_do_not_push_measured_points_off_the_front() -> None:
    made = small_trade_off()
    assert [p.on_front for p in made.points] == [True, True, False, False]
    assert [line.name for line in made.lines] == ["uniform fp32"]
    only_predicted = [replace(p, measured=False) for p in made.points]
    again = trade_off(only_predicted, "", LATENCY, CAPACITY, higher_is_better=False, formats=made.formats)
    assert [p.on_front for p in again.points] == [True, True, False, True]


def test_no_pair_where_no_two_points_are_equal_in_quality_or_differ_in_latency() -> None:
    assert largest_spread([], []) is None
    assert largest_spread([1.0, 2.0], [1.0, 2.0]) is None
    assert largest_spread([2.0, 2.0], [1.0, 1.0]) is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"cost": float("nan")}, "cost nan"),
        ({"cost": 0.0}, "cost 0.0"),
        ({"quality": float("inf")}, "quality inf"),
        ({"configuration": {"b": "x"}}, "groups"),
        ({"configuration": {"a": "z"}}, "format 'z'"),
    ],
)
def test_bad_points_are_named(change: dict[str, object], told: str) -> None:
    good = TradeOffPoint({"a": "x"}, 1.0, 1.0)
    with pytest.raises(ValueError, match=rf"points\[1\].*{told}.*allowed"):
        trade_off([good, replace(good, **change)], "", LATENCY, CAPACITY, higher_is_better=True, formats=("x",))
    with pytest.raises(ValueError, match="points: none"):
        trade_off([], "", LATENCY, CAPACITY, higher_is_better=True, formats=("x",))


def test_files_give_the_record_back_with_the_order_of_its_groups(tmp_path: Path) -> None:
    names = [f"layer {i}" for i in (1, 2, 10, 3)]
    points = [TradeOffPoint(dict(zip(names, formats)), 1.0, 1.0) for formats in (["x", "x", "y", "x"], ["y"] * 4)]
    ordered = trade_off(points, "", LATENCY, CAPACITY, higher_is_better=True, formats=("x", "y"))
    for made in (small_trade_off(), seed_trade_off(), replace(ordered, environment={"torch": "2", "": "a CPU"})):
        loaded = load_record(save_record(tmp_path / "t.json", made), TradeOff)
        assert loaded == made
        assert loaded.caption == made.caption
        assert [loaded.text_of(p) for p in loaded.points] == [made.text_of(p) for p in made.points]
    assert loaded.groups == tuple(names)
    assert loaded.text_of(loaded.points[0]) == "x x y x"
    assert loaded.caption == "a CPU; torch 2"


def test_configurations_of_many_groups_are_counted() -> None:
    groups = [f"h.{i}" for i in range(12)]
    formats = dict.fromkeys(groups, "int8") | {"h.3": "fp32", "h.9": "fp32"}
    made = trade_off(
        [TradeOffPoint(formats, 2.0, 1.0), TradeOffPoint(dict.fromkeys(groups, "int8"), 1.0, 1.0)],
        "t",
        TradeOffAxis("latency", "us"),
        TradeOffAxis("loss"),
        higher_is_better=False,
        formats=("fp32", "int8"),
    )
    assert [made.text_of(p) for p in made.points] == ["10 x int8, 2 x fp32 (h.3, h.9)", "all int8"]
