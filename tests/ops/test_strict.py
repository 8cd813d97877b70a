"""A slower path is announced once or refused, never silent."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest

from pyquant import ops
from pyquant.errors import UnsupportedError
from pyquant.ops import strict

PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    from pyquant import ops
    assert not caught, "importing warned"
    for _ in range(3):
        ops.pack_int4(torch.zeros(2, 2, dtype=torch.int8))
    said = [str(w.message) for w in caught]
assert len(said) == 1 and "PYQUANT_DISABLE_NATIVE" in said[0], said
ops.set_strict(True)
try:
    ops.pack_int4(torch.zeros(2, 2, dtype=torch.int8))
except Exception as error:
    print("refused:", error)
"""


def test_the_fallback_says_so_once_and_is_refused_when_strict() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYQUANT_DISABLE_NATIVE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("refused: integer ops run in plain PyTorch: PYQUANT_DISABLE_NATIVE is set")


def test_each_reason_is_announced_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for reason in ("one of a kind", "one of a kind", "another"):
            strict.slower_path("test", reason)
    assert len(caught) == 2
    ops.set_strict(True)
    try:
        with pytest.raises(UnsupportedError, match="another"):
            strict.slower_path("test", "another")
    finally:
        ops.set_strict(False)
