"""Fresh processes at one, two, seven and the machine's own number of threads give the same bytes (issue of the packer
that wrote beyond its layer: the first thing that a user did, with default threads)."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from threads import program

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def output(threads: str) -> list[str]:
    """Lines of the program in a process of its own. Waiting threads sleep: seven on two cores would spin."""
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    environment |= {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, program.__file__, threads], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (
        f"{threads} threads: exit {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("threads", ["default", "2", "7"])
def test_every_number_of_threads_gives_the_same_bytes(threads: str) -> None:
    alone = output("1")
    assert len(alone) >= 55
    assert output("default" if is_default(threads) else threads) == alone


def is_default(threads: str) -> bool:
    """Whether a machine's own number is this one: the same process need not run twice."""
    return "OMP_NUM_THREADS" not in os.environ and threads == str(torch.get_num_threads())


def test_the_work_is_above_every_grain_of_the_source() -> None:
    """A grain that grows beyond the program's work would leave its loop serial, and this test blind."""
    grains = {}
    for path in sorted((ROOT / "csrc/cpu").glob("*.cpp")):
        for name, shift in re.findall(r"constexpr int64_t (k\w*Grain) = 1 << (\d+);", path.read_text()):
            grains[f"{path.name}: {name}"] = 1 << int(shift)
    assert len(grains) >= 6, "the grains are written otherwise now: read them here as well"
    assert grains.pop("linear.cpp: kPackGrain") * 7 < program.N * program.K
    assert {name: g for name, g in grains.items() if g * 2 > program.ROWS * program.COLS} == {}


def test_nothing_but_the_pool_asks_for_the_number_of_threads() -> None:
    """Only what cuts work may ask, before it starts: threads.cpp, a layer's grid, a group's cut, the rulers."""
    asked = {
        path.name: text.count("thread_count()")
        for path in sorted((ROOT / "csrc/cpu").iterdir())
        if "thread_count()" in (text := re.sub(r"//.*", "", path.read_text()))
    }
    assert asked == {"threads.h": 1, "threads.cpp": 2, "layer.cpp": 1, "cut.h": 1, "ceilings.cpp": 1}


def test_the_suite_runs_with_the_machines_threads() -> None:
    """Only tests/numerics, plain torch on small tensors, asks for one."""
    assert torch.get_num_threads() > 1 or (os.cpu_count() or 1) == 1 or os.environ.get("OMP_NUM_THREADS") == "1"
    asking = {p.parent.name for p in (ROOT / "tests").rglob("conftest.py") if "set_num_threads(1)" in p.read_text()}
    assert asking <= {"numerics"}
