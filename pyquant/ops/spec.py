"""LinearSpec: the integers that describe one quantised Linear to the fused op."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Final

ACTIVATIONS: Final = ("none", "relu", "clamp", "gelu", "gelu_tanh", "silu")
INPUTS: Final = ("dynamic", "static")
LAYOUTS: Final = ("rows", "cpu_blocked")


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
    layout       'rows' (as the CUDA kernels and the Python fallback read it) or 'cpu_blocked'.

    Source: csrc/core/linear.h holds the same list in the same order; tests/ops/test_spec.py compares them.

    Example:
        >>> LinearSpec(n=8, k=16).to_ints()[:4]
        (8, 16, 8, 0)
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

    def to_ints(self) -> tuple[int, ...]:
        """The spec as the int[] argument of pack_linear, unpack_linear and qlinear."""
        return (
            self.n, self.k, self.w_bits, self.group_size, INPUTS.index(self.input), self.x_qmin, self.x_qmax,
            int(self.x_symmetric), ACTIVATIONS.index(self.activation), _float_bits(self.clamp_min),
            _float_bits(self.clamp_max), int(self.has_bias), int(self.codes_out), self.out_qmin, self.out_qmax,
            LAYOUTS.index(self.layout),
        )  # fmt: skip

    @staticmethod
    def from_ints(values: tuple[int, ...] | list[int]) -> LinearSpec:
        """The inverse of to_ints()."""
        v = list(values)
        return LinearSpec(
            v[0], v[1], v[2], v[3], INPUTS[v[4]], v[5], v[6], bool(v[7]), ACTIVATIONS[v[8]], _bits_float(v[9]),
            _bits_float(v[10]), bool(v[11]), bool(v[12]), v[13], v[14], LAYOUTS[v[15]],
        )  # fmt: skip


SPEC_FIELDS: Final = tuple(f.name for f in fields(LinearSpec))


def _float_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _bits_float(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<i", bits))[0])
