"""The goals of layers by the cost model: what it meets stays met, what it misses is named and gets no worse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyquant._native", reason="pyquant was installed without its native module")

from bench import modelled
from bench.cards import CARDS
from pyquant import _native
from pyquant.bench.model_shapes import MS

# Worst ratio of what is missed by the model, as docs/kernels.md has it with the term that holds it.
MISSED = {
    "W4A8, codes in, M 64": 1.29,
    "W4A16 g128, M 1": 1.7,
    "W4A16 g128, M 1 to 16, from 8192 x 8192 on": 1.5,
    "W4A16 g128, M 64": 0.52,
    "W4A16 g128, M 256": 0.54,
}


@pytest.fixture(scope="module")
def found() -> dict[modelled.Bar, modelled.Verdict]:
    return {bar: modelled.verdict(bar) for bar in modelled.BARS}


@pytest.mark.parametrize("bar", modelled.BARS, ids=lambda bar: f"{bar.card.split()[-1]}: {bar.name}")
def test_the_model_meets_a_goal_or_the_miss_is_known(
    found: dict[modelled.Bar, modelled.Verdict], bar: modelled.Bar
) -> None:
    worst = found[bar].worst
    if bar.name in MISSED:
        assert MISSED[bar.name] <= worst.gain < bar.floor, f"{worst}: met now, or worse than it was"
    else:
        assert worst.gain >= bar.floor, worst


def test_the_page_is_what_the_model_says_now(found: dict[modelled.Bar, modelled.Verdict]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text()
    shown = page.partition("<!-- modelled -->")[2].partition("<!-- end of modelled -->")[0].strip()
    assert shown == modelled.text(list(found.values())), "python -m bench.modelled --docs docs/kernels.md"


def test_a_goal_out_of_reach_is_said_to_be_missed(found: dict[modelled.Bar, modelled.Verdict]) -> None:
    bar, verdict = next(iter(found.items()))
    planted = replace(verdict, bar=replace(bar, floor=2.5))
    assert not planted.is_met
    assert "missed by" in modelled.text([planted])


def test_terms_add_up_to_the_time() -> None:
    def parts(terms: dict[str, float]) -> float:
        overlapped = sum(terms[name] ** 4 for name in ("arithmetic", "loads", "memory")) ** 0.25
        return overlapped + sum(terms[name] for name in ("launch", "latency", "stores", "sums"))

    for card in CARDS[:8]:
        for m in (1, 64, 2048):
            problem: dict[str, Any] = {"m": m, "n": 4096, "k": 4096, "out": "bf16"}
            row, us = _native.sweep(problem, card.device, "m", [m])[0]
            assert parts(_native.cost_terms(row, problem, card.device)) == pytest.approx(us)


@pytest.mark.parametrize("part", ["H200", "4090"])
def test_auto_mode_with_its_choice_counted_is_never_slower(part: str) -> None:
    card = next(card for card in CARDS if part in card.name)
    schemes = ("W8A8Dynamic", "W4A8Dynamic", "W4A16(group_size=128)")
    worst = modelled.auto_worst(card, schemes, modelled.LAYERS, MS)
    assert worst.gain >= 0.97, worst
