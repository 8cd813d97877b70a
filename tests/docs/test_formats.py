"""docs/formats.md says what tools/number_formats.py computes, and that is what torch says too."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from pyquant.core.dtypes import qrange

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("number_formats", ROOT / "tools" / "number_formats.py")
formats = importlib.util.module_from_spec(_SPEC)
sys.modules["number_formats"] = formats
_SPEC.loader.exec_module(formats)

TORCH = {
    "float64": torch.float64,
    "float32 (FP32)": torch.float32,
    "float16 (FP16)": torch.float16,
    "bfloat16 (BF16)": torch.bfloat16,
    "float8 e5m2 (FP8)": torch.float8_e5m2,
    "float8 e4m3 (FP8)": torch.float8_e4m3fn,
}


@pytest.mark.parametrize("name", TORCH)
def test_torch_agrees(name: str) -> None:
    (found,) = [f for f in formats.FLOATS if f.name == name]
    info = torch.finfo(TORCH[name])
    assert (found.bits, found.largest, found.smallest_normal) == (info.bits, info.max, info.tiny)
    assert found.step == info.eps
    assert float(found.smallest) == info.smallest_normal * info.eps


def test_formats_that_torch_has_not() -> None:
    tf32, fp24 = (next(f for f in formats.FLOATS if f.name == name) for name in ("TF32", "FP24"))
    assert (tf32.bits, tf32.bits + tf32.padding, fp24.bits) == (19, 32, 24)
    assert tf32.largest < torch.finfo(torch.float32).max
    assert tf32.smallest_normal == torch.finfo(torch.float32).tiny


def test_integers_are_those_of_schemes() -> None:
    for entry in formats.INTEGERS:
        assert (-entry.largest, entry.largest) == qrange(entry.bits)
    assert [entry.codes for entry in formats.INTEGERS if entry.bits in (4, 8)] == [255, 15]


def test_the_page_is_the_tables() -> None:
    page = formats.PAGE.read_text()
    assert formats.tables() in page
    assert formats.page_with(page, "nothing") != page  # the marks are there
    assert formats.page_with(formats.page_with(page, "nothing"), formats.tables()) == page
