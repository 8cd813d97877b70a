"""The C++ scalar formulas against double precision, over (a dense sample of) every float (docs/numerics.md 2, 5, 6)."""

from __future__ import annotations

import os

import pytest

from csrc import epilogue_harness as harness

pytestmark = pytest.mark.skipif(harness.compiler() is None, reason="no C++ compiler: neither g++ nor c++ is in PATH")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return harness.build(tmp_path_factory.mktemp("epilogue"))


def test_no_float_differs(program):
    """PYQUANT_FULL_SWEEP=1 visits all 2^32 patterns (three minutes on one core)."""
    sweep = ["--full"] if os.environ.get("PYQUANT_FULL_SWEEP") else ["--stride", "251"]
    done = harness.run(program, *sweep, "--threads", "2")
    assert done.returncode == 0, done.stdout
    visited = dict(
        line.removeprefix("visited ").rsplit(" ", 1) for line in done.stdout.splitlines() if "visited" in line
    )
    assert int(visited["floats"]) >= 2**32 // 251
    assert int(visited["16-bit"]) >= 2 * 2**16
    assert int(visited["codes"]) >= 2**16
    assert int(visited["ranges"]) >= 10**6


def test_bad_flags_are_refused(program):
    for flags in (["--stride"], ["--stride", "0"], ["--all"]):
        assert harness.run(program, *flags).returncode == 2
