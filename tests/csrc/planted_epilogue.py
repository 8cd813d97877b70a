"""Bugs in the C++ formulas, each one edit of a header, and the exhaustive sweep that must notice it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from csrc.planted_engine import precompiled
from mutants import Plant, register

from csrc import epilogue_harness as harness

_include = harness.ROOT / "csrc"


def edit_header(header: str, old: str, new: str) -> Plant:
    """One edit of a header of csrc/core, in a copy that the sweep is compiled against."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        global _include
        with tempfile.TemporaryDirectory() as folder:
            before, _include = _include, harness.edited_core(Path(folder), header, old, new)
            try:
                yield
            finally:
                _include = before

    return plant


def sweep(seed: int) -> None:
    words = ("-O1", *precompiled((*harness.FLAGS, "-O1")))
    with tempfile.TemporaryDirectory() as folder:
        done = harness.run(harness.build(Path(folder), _include, words), "--stride", str(30_011 + 2 * (seed % 100)))
        assert done.returncode == 0, done.stdout


EDITS = [
    (
        "float v = fround_even(fmul(x, recip));\n  const float low",
        "float v = __builtin_floorf(fmul(x, recip) + 0.5f);\n  const float low",
        "codes round half up",
    ),
    (
        "float v = fround_even(fmul(x, recip));\n  const float low",
        "float v = fround_even(fdiv(x, fdiv(1.f, recip)));\n  const float low",
        "codes divide by the scale",
    ),
    ("v = v > high ? high : v;", "", "codes not clamped above"),
    ("v = v < low ? low : v;", "v = !(v >= low) ? low : v;", "NaN becomes qmin"),
    (
        "static_cast<float>(qmin - zero_point), high",
        "static_cast<float>(qmin), high",
        "lower clamp forgets the zero point",
    ),
    (
        "(v == v ? static_cast<int32_t>(v) : 0) + zero_point",
        "(v == v ? static_cast<int32_t>(v) + zero_point : 0)",
        "NaN becomes code 0",
    ),
    (
        "return amax < kAmaxFloor ? 1.f : fdiv(amax, static_cast<float>(qmax));",
        "return fdiv(amax, static_cast<float>(qmax));",
        "no guard for zero rows",
    ),
    (
        "return amax < kAmaxFloor ? 1.f : fdiv(amax, static_cast<float>(qmax));",
        "return amax < kAmaxFloor ? 1.f : fmul(amax, 1.f / static_cast<float>(qmax));",
        "scale by a reciprocal",
    ),
    ("  if (!(amax < kInfinity)) return kNaN;\n  return amax", "  return amax", "infinite amax passes"),
    (
        "fsub(fdiv(high, steps), fdiv(low, steps))",
        "fdiv(fsub(high, low), steps)",
        "range subtracted before it is divided",
    ),
    (
        "const float v = fround_even(fmul(low, recip));",
        "const float v = __builtin_floorf(fmul(low, recip));",
        "zero point rounded down",
    ),
    ("low = low < 0.f ? low : (low == low ? 0.f : low);", "", "range not widened below"),
    (
        "fmul(static_cast<float>(q - zero_point), scale)",
        "fsub(fmul(static_cast<float>(q), scale), fmul(static_cast<float>(zero_point), scale))",
        "zero point subtracted in float",
    ),
]
ACTIVATION_EDITS = [
    ("return t < 0.f ? 0.f : t;", "return t > 0.f ? t : 0.f;", "relu turns NaN and -0 into 0"),
    ("return t > high ? high : t;", "return t < high ? t : high;", "clamp turns NaN into its limit"),
]

if harness.compiler() is not None:  # without one the sweep itself is skipped, with that reason
    for _header, _edits in (("epilogue_math.h", EDITS), ("activation_math.h", ACTIVATION_EDITS)):
        for _old, _new, _name in _edits:
            register(edit_header(_header, _old, _new), sweep, name=_name, area=f"csrc/core/{_header}")
