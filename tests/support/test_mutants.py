"""Every planted bug is noticed by the check that guards it, and every check passes without the bug."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mutants
import planted_rules
import pytest
import torch
from problems import BASE_SEED
from sample import drawn, sampled

from csrc import planted_engine

ALL = mutants.load_all()
CAUGHT = [m for m in ALL if m.survives is None]
RULES = [m for m in CAUGHT if m.area == "rules"]
CODE = [m for m in CAUGHT if m.area != "rules"]
# The check that guards a bug is a test of every run; that it notices the bug is tested for a third of them, others for
# every commit, and at night for all.
DRAWN = drawn(CODE, len(CODE) // 3, "mutants")
NOTICES = list({m.notice: m for m in CODE})


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _compiled_once(folder_of_the_run: Path) -> Iterator[None]:
    planted_engine.shared = folder_of_the_run
    yield
    planted_engine.shared = None


def is_noticed(mutant: mutants.Mutant, seed: int) -> bool:
    with mutant.plant():
        try:
            mutant.notice(seed)
        except Exception:  # a crash is noticed too
            return True
    return False


@pytest.mark.parametrize("fifth", sampled(range(5), 1, "seeds of rules"))
@pytest.mark.parametrize("mutant", RULES, ids=lambda m: m.name)
def test_rules_reject_the_bug_for_every_seed(mutant, fifth):
    missed = [seed for seed in range(4 * fifth, 4 * fifth + 4) if not is_noticed(mutant, seed)]
    assert not missed, f"'{mutant.name}' passes for seeds {missed}"


@pytest.mark.parametrize("fifth", sampled(range(5), 2, "seeds of the honest epilogue"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rules_accept_the_honest_epilogue(dtype, fifth):
    for seed in range(8 * fifth, 8 * fifth + 8):
        c = planted_rules.case(seed, dtype)
        planted_rules.judge(c, c.acc, planted_rules.epilogue(c, c.acc).to(dtype))


def of_the_drawn(cases: Sequence[Any], is_drawn: Callable[[Any], bool], name: Callable[[Any], str]) -> list[Any]:
    return [pytest.param(c, id=name(c), marks=() if is_drawn(c) else pytest.mark.nightly) for c in cases]


@pytest.mark.parametrize(
    "notice",
    of_the_drawn(NOTICES, {m.notice for m in DRAWN}.__contains__, lambda n: f"{n.__module__}.{n.__name__}"),
)
def test_checks_pass_without_a_bug(notice):
    for seed in (BASE_SEED, BASE_SEED + 1):
        notice(seed)


@pytest.mark.parametrize("mutant", of_the_drawn(CODE, DRAWN.__contains__, lambda m: f"{m.area}: {m.name}"))
def test_bug_is_noticed(mutant):
    assert is_noticed(mutant, BASE_SEED), f"'{mutant.name}' in {mutant.area} passes {mutant.notice.__name__}"


@pytest.mark.parametrize("mutant", [m for m in ALL if m.survives], ids=lambda m: f"{m.area}: {m.name}")
def test_survivor_still_survives(mutant):
    """A survivor that is noticed after all has lost its excuse and moves to the caught ones."""
    assert not is_noticed(mutant, BASE_SEED)


def test_there_are_enough_and_nearly_all_are_caught():
    assert len(planted_rules.BUGS) == 17
    assert len(ALL) >= 60
    assert len(CAUGHT) >= 0.98 * len(ALL), [f"{m.name}: {m.survives}" for m in ALL if m.survives]


def test_source_is_as_before_after_a_mutant():
    from pyquant import numerics

    before = numerics.code_from_real.__code__
    mutant = next(m for m in CODE if m.name == "rounds half up")
    with mutant.plant():
        assert numerics.code_from_real.__code__ is not before
    assert numerics.code_from_real.__code__ is before
