"""A search that was killed, or that processes share, ends with the bytes of one undisturbed process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from children import fork, ranks, wait
from searched import record_of, search, search_to

from pyquant.errors import CheckpointError

BUDGET = 8


def _killed_after(pieces: int, journal: Path) -> int:
    """Runs a search in a child that kills itself after so many pieces of work. -> its exit code."""
    done = 0

    def progress(what: str, stage_done: int, total: int) -> None:
        nonlocal done
        done += 1
        if done == pieces:
            os.kill(os.getpid(), signal.SIGKILL)

    return wait(fork(lambda: search(journal=journal, budget=BUDGET, progress=progress)))


def test_a_killed_search_ends_with_the_same_plan_byte_for_byte(tmp_path: Path) -> None:
    undisturbed = record_of(search(journal=tmp_path / "whole", budget=BUDGET))
    whole = (tmp_path / "whole").read_bytes()
    lines = whole.count(b"\n") - 1
    assert lines > 12
    for pieces in (1, 5, lines // 2, lines - 1, lines):
        journal = tmp_path / f"killed-{pieces}"
        assert _killed_after(pieces, journal) == -signal.SIGKILL
        assert journal.read_bytes().count(b"\n") - 1 == pieces
        with journal.open("ab") as file:  # and a line that was being written
            file.write(b'{"crc32":"0')
        again = search(journal=journal, budget=BUDGET)
        assert record_of(again) == undisturbed
        assert journal.read_bytes() == whole


def test_a_journal_of_other_work_is_refused(tmp_path: Path) -> None:
    search(journal=tmp_path / "journal", budget=4)
    with pytest.raises(CheckpointError, match="fingerprint"):
        search(journal=tmp_path / "journal", budget=5)


def _process(rank: int, folder: str) -> None:
    search_to(Path(folder) / f"rank{rank}", journal=Path(folder) / "journal", budget=BUDGET, batch=2)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")
def test_two_processes_find_the_plan_of_one(tmp_path: Path) -> None:
    ranks(_process, str(tmp_path))
    one = record_of(search(journal=tmp_path / "alone", budget=BUDGET, batch=2))
    assert (tmp_path / "rank0").read_bytes() == one
    assert (tmp_path / "rank1").read_bytes() == one
    assert (tmp_path / "journal").read_bytes() == (tmp_path / "alone").read_bytes()
