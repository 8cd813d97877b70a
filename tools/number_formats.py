"""The table of docs/formats.md: ranges and steps of number formats, computed from their bits.

python tools/number_formats.py            # prints the table
python tools/number_formats.py --write    # puts it into docs/formats.md
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "formats.md"


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: 1 sign bit, `exponent` bits, `mantissa` stored bits after an implicit 1.

    exponent_codes_lost  codes at the top of the exponent that hold no numbers: 1 as IEEE 754 has it (infinity, NaN),
                         0 where only one code of the mantissa is lost (float8_e4m3fn).
    mantissa_codes_lost  codes at the top of the largest exponent's mantissa that hold no numbers.
    """

    name: str
    exponent: int
    mantissa: int
    remark: str = ""
    exponent_codes_lost: int = 1
    mantissa_codes_lost: int = 0
    padding: int = 0  # bits of memory that hold nothing

    @property
    def bits(self) -> int:
        """Bits that mean something."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """What is taken from the exponent's code."""
        return 2 ** (self.exponent - 1) - 1

    @property
    def largest(self) -> Fraction:
        """The largest number."""
        top = 2**self.exponent - 1 - self.exponent_codes_lost - self.bias
        return (2 - Fraction(1 + self.mantissa_codes_lost, 2**self.mantissa)) * Fraction(2) ** top

    @property
    def smallest_normal(self) -> Fraction:
        """The smallest number with all its mantissa bits."""
        return Fraction(2) ** (1 - self.bias)

    @property
    def smallest(self) -> Fraction:
        """The smallest number above zero, a subnormal one."""
        return self.smallest_normal / 2**self.mantissa

    @property
    def step(self) -> Fraction:
        """From 1 to the next number: twice the largest relative error of rounding."""
        return Fraction(1, 2**self.mantissa)


@dataclass(frozen=True)
class IntFormat:
    """Codes of `bits` bits, symmetric as pyquant's weights: real = scale * code, |code| <= 2^(bits - 1) - 1."""

    name: str
    bits: int
    remark: str = ""

    @property
    def largest(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - 1) - 1

    @property
    def codes(self) -> int:
        """How many codes there are."""
        return 2 * self.largest + 1

    @property
    def step(self) -> Fraction:
        """The step as a share of the range's end: the same everywhere in the range."""
        return Fraction(1, self.largest)


FLOATS = (
    FloatFormat("float64", 11, 52, "refused by pyquant: nothing here gains by it"),
    FloatFormat("float32 (FP32)", 8, 23, "scales, sums, bias; training"),
    FloatFormat("TF32", 8, 10, "how tensor cores read float32; 32 bits of memory", padding=13),
    FloatFormat("FP24", 7, 16, "GPUs of 2002 (ATI R300); kept as 32 bits of memory today", padding=8),
    FloatFormat("float16 (FP16)", 5, 10, "layers, inputs and outputs"),
    FloatFormat("bfloat16 (BF16)", 8, 7, "layers, inputs and outputs"),
    FloatFormat("float8 e5m2 (FP8)", 5, 2, "not in pyquant yet"),
    FloatFormat("float8 e4m3 (FP8)", 4, 3, "not in pyquant yet; no infinity", 0, 1),
)
INTEGERS = (
    IntFormat("int16", 16, "inputs, in simulation"),
    IntFormat("int8", 8, "weights, inputs, outputs"),
    IntFormat("int4", 4, "weights, inputs, outputs; two a byte"),
    IntFormat("int2", 2, "as int3, int5, int6 and int7: in simulation"),
)


def tables() -> str:
    """Both tables as Markdown."""
    heads = [
        "format",
        "bits",
        "sign + exponent + mantissa",
        "largest",
        "smallest normal",
        "smallest",
        "step at 1",
        "decades",
        "here",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for f in FLOATS:
        decades = _log10(f.largest / f.smallest)
        lines.append(
            f"| {f.name} | {f.bits} | 1 + {f.exponent} + {f.mantissa} | {_text(f.largest)} "
            f"| {_text(f.smallest_normal)} | {_text(f.smallest)} | 2^-{f.mantissa} = {_text(f.step)} | {decades:.1f} "
            f"| {f.remark} |"
        )
    lines += [
        "",
        "| format | bits | codes | largest code | step as a share of the range's end | decades | here |",
        "|---|---|---|---|---|---|---|",
    ]
    for i in INTEGERS:
        lines.append(
            f"| {i.name} | {i.bits} | {i.codes} | {i.largest} | 1/{i.largest} = {_text(i.step)} "
            f"| {_log10(Fraction(i.largest)):.1f} | {i.remark} |"
        )
    return "\n".join(lines)


def _log10(value: Fraction) -> float:
    import math

    return math.log10(value.numerator) - math.log10(value.denominator)


def _text(value: Fraction) -> str:
    number = float(value)
    return str(int(value)) if value.denominator == 1 and value < 10**6 else f"{number:.4g}"


def page_with(page: str, content: str) -> str:
    """A page with the tables between its marks."""
    marks = r"(<!-- tables -->\n\n).*?(\n\n<!-- end of tables -->)"
    return re.sub(marks, lambda m: m[1] + content + m[2], page, flags=re.DOTALL)


if __name__ == "__main__":
    print(tables())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page_with(PAGE.read_text(), tables()))
