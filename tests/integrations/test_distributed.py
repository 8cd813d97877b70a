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

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
EVERYWHERE = ("layers", "merged", "banks", "meshes", "planted", "checkpoints", "models")
PARTS = {2: (*EVERYWHERE, "llama"), 4: EVERYWHERE}
NIGHTLY = {4: ("llama",)}  # four imports of transformers


def cases(part: str) -> dict[str, Callable[[int, int, Path], None]]:
    found: dict[str, Any] = importlib.import_module(f"tests.integrations.distributed.{part}").CASES
    return found


def worker(rank: int, world: int, parts: tuple[str, ...], folder: Path) -> None:
    """Every case in turn, on all ranks; what one raised is written down, and the others go on."""
    told = {}
    for part in parts:
        for name, run in cases(part).items():
            dist.barrier()
            try:
                run(rank, world, folder)
                told[f"{part}: {name}"] = ""
            except Exception:
                told[f"{part}: {name}"] = traceback.format_exc()
    (folder / f"told.{rank}.json").write_text(json.dumps(told))


Told = dict[tuple[int, int], dict[str, str]]  # {(ranks, rank): {case: what went wrong}}


def told_by(table: dict[int, tuple[str, ...]], folders: pytest.TempPathFactory) -> Told:
    found: Told = {}
    for world, parts in table.items():
        folder = folders.mktemp(f"ranks{world}")
        ranks(worker, world, parts, folder, world=world)
        found |= {(world, r): json.loads((folder / f"told.{r}.json").read_text()) for r in range(world)}
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by(PARTS, tmp_path_factory)


@pytest.fixture(scope="module")
def told_at_night(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by(NIGHTLY, tmp_path_factory)


def check(told: Told, world: int, name: str) -> None:
    wrong = {rank: told[world, rank][name] for rank in range(world)}
    assert not any(wrong.values()), "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items() if text)


def names(table: dict[int, tuple[str, ...]]) -> list[tuple[int, str]]:
    return [(world, f"{part}: {name}") for world, parts in table.items() for part in parts for name in cases(part)]


@pytest.mark.parametrize(("world", "name"), names(PARTS))
def test_on_ranks(told: Told, world: int, name: str) -> None:
    check(told, world, name)


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "name"), names(NIGHTLY))
def test_on_more_ranks(told_at_night: Told, world: int, name: str) -> None:
    check(told_at_night, world, name)


def test_the_package_is_imported_by_name_alone(tmp_path: Path) -> None:
    from fresh import python

    code = "import json, sys, pyquant; print(json.dumps([m for m in sys.modules if 'integrations.distributed' in m]))"
    assert python(code, tmp_path) == []
    assert torch.distributed.is_available()
