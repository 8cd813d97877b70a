"""Layers of which 2 and 4 ranks (gloo) hold shares: the bits of one rank, checkpoints for other numbers of ranks."""

from __future__ import annotations

import importlib
import json, os, time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from children import ranks

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
WORLDS = (2, 4)
PARTS = ("models",)


def cases(part: str) -> dict[str, Callable[[int, int, Path], None]]:
    found: dict[str, Any] = importlib.import_module(f"tests.integrations.distributed.{part}").CASES
    return found


def worker(rank: int, world: int, folder: Path) -> None:
    """Every case in turn, on all ranks; what one raised is written down, and the others go on."""
    torch.set_num_threads(1)
    told = {}
    for part in PARTS:
        for name, run in cases(part).items():
            dist.barrier()
            begin = time.perf_counter()
            try:
                run(rank, world, folder)
                told[f"{part}: {name}"] = ""
            except Exception:
                told[f"{part}: {name}"] = traceback.format_exc()
            if rank == 0 and "TIMES" in os.environ: open(os.environ["TIMES"], "a").write(f"{world} {time.perf_counter() - begin:.2f} {name}\n")
    (folder / f"told.{rank}.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, str]]:
    """{(ranks, rank): {case: what went wrong}}; one start of processes for all cases."""
    found = {}
    for world in WORLDS:
        folder = tmp_path_factory.mktemp(f"ranks{world}")
        ranks(worker, world, folder, world=world)
        found |= {(world, r): json.loads((folder / f"told.{r}.json").read_text()) for r in range(world)}
    return found


NAMES = [f"{part}: {name}" for part in PARTS for name in cases(part)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", NAMES)
def test_on_ranks(told: dict[tuple[int, int], dict[str, str]], name: str, world: int) -> None:
    wrong = {rank: told[world, rank][name] for rank in range(world)}
    assert not any(wrong.values()), "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items() if text)
