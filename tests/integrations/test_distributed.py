"""Layers of which 2 and 4 ranks (gloo) hold shares: the bits of one rank, checkpoints for other numbers of ranks.

One start of processes for each number runs the CASES of every module of tests/integrations/distributed.
"""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from children import ranks
from sample import drawn

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
PARTS = ("layers", "merged", "banks", "meshes", "planted", "checkpoints", "models")
MODULES = {part: f"tests.integrations.distributed.{part}" for part in (*PARTS, "llama")}
# What four ranks show that two do not: shares of unequal sizes or of nothing, meshes of two dimensions. Of what is left
# every commit runs some on four, and of what two ranks run a part.
FOUR = {
    "layers": ("uneven", "sequences", "embeddings", "hadamard", "taken_from_one", "refused"),
    "merged": ("both_orders", "rows_of_each", "some_of_them"),
    "banks": ("bits", "layouts", "planted"),
    "meshes": ("two_dimensions", "experts_have_a_name", "with_fsdp", "checkpoints", "gradients", "refused"),
    "checkpoints": ("reshard groups",),
    "models": ("quantised_from_shards",),
}
MORE = 4


def cases(part: str) -> dict[str, Callable[[int, int, Path], None]]:
    found: dict[str, Any] = importlib.import_module(MODULES[part]).CASES
    return found


def names(*parts: str) -> list[str]:
    return [f"{part}: {name}" for part in parts for name in cases(part)]


def worker(rank: int, world: int, names: list[str], folder: Path) -> None:
    """Every case in turn, on all ranks; what one raised is written down, and the others go on."""
    told = {}
    for case in names:
        part, _, name = case.partition(": ")
        dist.barrier()
        try:
            cases(part)[name](rank, world, folder)
            told[case] = ""
        except Exception:
            told[case] = traceback.format_exc()
    (folder / f"told.{rank}.json").write_text(json.dumps(told))


Table = list[tuple[int, str]]  # (ranks, case)
Told = dict[tuple[int, int], dict[str, str]]  # {(ranks, rank): {case: what went wrong}}
_ALWAYS = {f"{part}: {name}" for part, taken in FOUR.items() for name in taken}
_DRAWN = drawn([name for name in names(*PARTS) if name not in _ALWAYS], MORE, "four ranks")
_EVERY = names(*PARTS, "llama")
_OF_TWO = drawn(_EVERY, len(_EVERY) * 2 // 5, "two ranks")
DAY: Table = [(2, name) for name in _EVERY if name in _OF_TWO]
DAY += [(4, name) for name in names(*PARTS) if name in _ALWAYS or name in _DRAWN]
NIGHT: Table = [(ranks, name) for ranks in (2, 4) for name in _EVERY if (ranks, name) not in DAY]


def told_by(table: Table, folders: pytest.TempPathFactory) -> Told:
    """By one start of processes for each number of ranks."""
    found: Told = {}
    for world in sorted({world for world, _ in table}):
        folder = folders.mktemp(f"ranks{world}")
        run = [name for number, name in table if number == world]
        first = {"torch._dynamo", *(MODULES[name.partition(": ")[0]] for name in run)}
        if any(name.startswith("llama") for name in run):
            first |= {f"transformers.models.{m}.modeling_{m}" for m in ("llama", "qwen3_moe", "deepseek_v2")}
        ranks(worker, world, run, folder, world=world, first=sorted(first))
        found |= {(world, r): json.loads((folder / f"told.{r}.json").read_text()) for r in range(world)}
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by(DAY, tmp_path_factory)


@pytest.fixture(scope="module")
def told_at_night(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by(NIGHT, tmp_path_factory)


def check(told: Told, world: int, name: str) -> None:
    wrong = {rank: told[world, rank][name] for rank in range(world)}
    assert not any(wrong.values()), "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items() if text)


@pytest.mark.parametrize(("world", "name"), DAY)
def test_on_ranks(told: Told, world: int, name: str) -> None:
    check(told, world, name)


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "name"), NIGHT)
def test_on_more_ranks(told_at_night: Told, world: int, name: str) -> None:
    check(told_at_night, world, name)


def test_what_four_ranks_run_is_among_the_cases() -> None:
    assert set(names(*PARTS)) >= _ALWAYS


def test_the_package_is_imported_by_name_alone(tmp_path: Path) -> None:
    from fresh import python

    code = "import json, sys, pyquant; print(json.dumps([m for m in sys.modules if 'integrations.distributed' in m]))"
    assert python(code, tmp_path) == []
    assert torch.distributed.is_available()
