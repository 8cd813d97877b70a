"""LinearSpec: the integers that describe one quantised Linear to the fused op."""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyquant.core import arguments
from pyquant.core.dtypes import INT8, KERNEL_BITS_TEXT, CodeType, code_type
from pyquant.core.names import ACTIVATIONS
from pyquant.errors import ArgumentError

INPUTS: Final = ("dynamic", "static")
LAYOUTS: Final = ("rows", "cpu_blocked", "rows_blocked128")
WIRE_FIELDS: Final = 5


@dataclass(frozen=True)
class LinearSpec:
    """Everything about a quantised Linear that is not a tensor.

    n, k         out_features, in_features.
    w_bits       8 or 4.
    group_size   codes along k that share a weight scale; 0 for one scale per output channel.
    input        'dynamic': float rows are quantised per token inside the op; 'static': one calibrated scale for
                 all, held in the packed buffer.
    x_qmin/x_qmax, x_symmetric   code limits of the input; affine dynamic rows get a zero point of their own.
    activation   one of ACTIVATIONS; clamp_min and clamp_max matter for 'clamp' only.
    has_bias, codes_out, out_qmin, out_qmax   codes_out: the result is int8 codes of the packed output scale.
    layout       'rows' (as the CUDA kernels and the Python fallback read it), 'cpu_blocked', or 'rows_blocked128'
                 (4-bit codes in the order of tensor cores).
    two_level    4-bit codes whose groups have whole-number steps under one scale a channel (docs/numerics.md 4.1), for
                 the layouts 'rows' and, in groups of whole 64, 'rows_blocked128'. 'cpu_blocked' takes the products of
                 codes and steps, which are 8-bit codes.

    Source: csrc/core/linear.h reads what to_ints writes; tests/ops/test_contract.py compares them.

    Example:
        >>> LinearSpec(n=8, k=16).to_ints()[:3]
        (8, 16, 0)
    """

    n: int
    k: int
    w_bits: int = 8
    group_size: int = 0
    input: str = "dynamic"
    x_qmin: int = -127
    x_qmax: int = 127
    x_symmetric: bool = True
    activation: str = "none"
    clamp_min: float = 0.0
    clamp_max: float = 0.0
    has_bias: bool = False
    codes_out: bool = False
    out_qmin: int = -127
    out_qmax: int = 127
    layout: str = "rows"
    two_level: bool = False

    @property
    def w_type(self) -> CodeType:
        """The type of the weight codes."""
        return code_type(self.w_bits)

    @property
    def largest(self) -> int:
        """The largest magnitude that a product multiplies: of a code, or of a code times its step."""
        return INT8.qmax if self.two_level else self.w_type.largest

    @property
    def steps(self) -> int:
        """Steps of a channel; 0: scales have one level."""
        return self.k // self.group_size if self.two_level else 0

    def to_ints(self) -> tuple[int, int, int, int, int]:
        """The spec as the int[] argument of pack_linear, unpack_linear and qlinear.

        Five integers, because each one costs a call: n, k, group_size, the small fields as bits of one word, the clamp
        limits as the patterns of two floats. Raises ArgumentError for a field that does not fit.
        """
        modes = 0
        for value, at, count in self._fields():
            if not 0 <= value < 1 << count:
                raise ArgumentError("spec", str(self), f"code limits from -128 to 127, w_bits {KERNEL_BITS_TEXT}")
            modes |= value << at
        clamp = struct.unpack("<q", struct.pack("<ff", self.clamp_min, self.clamp_max))[0]
        return (self.n, self.k, self.group_size, modes, clamp)

    def _fields(self) -> tuple[tuple[int, int, int], ...]:
        """(value, first bit, bits) of every small field."""
        return (
            (self.w_bits, 0, 4),
            (ACTIVATIONS.index(self.activation), 4, 4),
            (INPUTS.index(self.input), 8, 1),
            (int(self.x_symmetric), 9, 1),
            (int(self.has_bias), 10, 1),
            (int(self.codes_out), 11, 1),
            (LAYOUTS.index(self.layout), 12, 2),
            (int(self.two_level), 14, 1),
            (self.x_qmin + 128, 16, 8),
            (self.x_qmax + 128, 24, 8),
            (self.out_qmin + 128, 32, 8),
            (self.out_qmax + 128, 40, 8),
        )

    @staticmethod
    def from_ints(values: Sequence[int]) -> LinearSpec:
        """The inverse of to_ints(). Raises ArgumentError for other integers, and where a field has no meaning."""
        allowed = f"{WIRE_FIELDS} integers as LinearSpec.to_ints() gives"
        try:
            n, k, group_size, modes, clamp = (operator.index(value) for value in values)
            low, high = struct.unpack("<ff", struct.pack("<q", clamp))
        except (TypeError, ValueError, RuntimeError, struct.error):
            raise ArgumentError("values", arguments.shown(values), allowed) from None

        def bits(at: int, count: int) -> int:
            return modes >> at & (1 << count) - 1

        try:
            return LinearSpec(
                n,
                k,
                bits(0, 4),
                group_size,
                INPUTS[bits(8, 1)],
                bits(16, 8) - 128,
                bits(24, 8) - 128,
                bool(bits(9, 1)),
                ACTIVATIONS[bits(4, 4)],
                low,
                high,
                bool(bits(10, 1)),
                bool(bits(11, 1)),
                bits(32, 8) - 128,
                bits(40, 8) - 128,
                LAYOUTS[bits(12, 2)],
                bool(bits(14, 1)),
            )
        except IndexError:
            raise ArgumentError("values", arguments.shown(values), allowed) from None
