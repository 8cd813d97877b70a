"""Shares of layers on two ranks (gloo): columns, joined columns, heads and sums."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
pytest.importorskip("vllm", reason="vLLM is in an environment of its own: make nightly-vllm")


def test_two_ranks_give_the_bits_of_qlinears_of_their_shares(tmp_path: Path) -> None:
    program = Path(__file__).with_name("ranks.py")
    support = str(Path(__file__).resolve().parents[2] / "support")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([support, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    children = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        words = [sys.executable, str(program), str(rank), str(tmp_path / "meeting"), str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        children.append(subprocess.Popen(words, env=environment, **pipes))
    for rank, child in enumerate(children):
        out, err = child.communicate(timeout=400)
        assert child.returncode == 0, f"rank {rank}\n{err[-3000:]}"
        assert out.endswith("60 layers\n")
