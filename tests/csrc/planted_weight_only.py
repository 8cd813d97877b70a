"""Bugs in the products of float rows with integer weights on CPUs: ends of K, zero points, groups, the panel."""

from __future__ import annotations

from mutants import register

from csrc import cpu_engine as engine
from csrc import planted_engine, test_cpu_engine


def check(seed: int) -> None:
    """Random layers of every form against float64, on every instruction set of the machine."""
    library = engine.load(planted_engine.whole())
    for index in range(60_000, 60_040):
        test_cpu_engine.check_weight_only(library, index)


def check_in_a_child(seed: int) -> None:
    """check(), in a process of its own: a group that no kernel takes may divide by zero, on some instruction sets."""
    planted_engine.in_a_child(check, seed)


# An edit of the kernels is compiled with the portable instruction set.
_ISA = ("isa_scalar.cpp", "// The portable kernels:", "// Portable kernels:")
EDITS = [
    (
        (("weight_rows.h", "std::memcpy(padded, codes + at * kPieceBytes<T>,", "std::memcpy(padded, codes,"), _ISA),
        "a channel that ends within a piece is read from its beginning",
    ),
    (
        (
            (
                "weight_rows.h",
                "channels[c].take_scale(group);",
                "channels[c].take_scale(0);",
            ),
            _ISA,
        ),
        "every group has the scale of the first",
    ),
    (
        (
            (
                "weight_rows.h",
                "if constexpr (kZero) code = V::sub(code, zero);\n      return V::mul(code, scale);",
                "return V::mul(code, scale);",
            ),
            _ISA,
        ),
        "zero points of weights are left out",
    ),
    (
        (("isa_scalar.cpp", "<< (28 - 4 * at)) >> 28", "<< (28 - 4 * at)) >> 28 & 15"),),
        "int4 codes lose their sign",
    ),
    (
        (("weight_only.cpp", "? x[p + l * 8 + i] : 0.f", "? x[p + l * 8 + i] : 1.f"),),
        "rows are padded with ones",
    ),
    (
        (("weight_only.cpp", "panel_, columns, sum_, begin > 0)", "panel_, columns, sum_, false)"),),
        "only the last part of K counts",
    ),
    (
        (("weight_only.cpp", "<const T*>(x_.x) + row * x_.ld;", "<const T*>(x_.x);"),),
        "every block of rows reads the first rows",
    ),
    (
        (("weight_only.cpp", "if (w.group_size == 0) return true;", "return true;"),),
        "groups that the kernels do not take are given to them",
    ),
]

if engine.compiler() is not None:
    for _edits, _name in EDITS:
        register(planted_engine.edit_engine(*_edits), check_in_a_child, name=_name, area="csrc/cpu/weight_only.cpp")
