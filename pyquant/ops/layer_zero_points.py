"""Where the zero points of a packed layer must lie: the checks of pack_linear and qlinear that look at values.

The compiled ops make them for the CPU (csrc/bind/check.cpp is the twin); these are for the fallback, and for other
devices with set_checks(True).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyquant.core.dtypes import UINT8
from pyquant.ops import rows_layout, shapes, values
from pyquant.ops.spec import LinearSpec


def packed(s: LinearSpec, x_zero_point: Tensor | None, out_zero_point: Tensor | None) -> None:
    """The zero points that pack_linear is given. Raises ArgumentError."""
    # uint8 codes have a zero point in their own terms (docs/numerics.md 3); each call compares it with its codes' type
    values.zero_points("x_zero_point", x_zero_point, 0 if s.x_symmetric else min(s.x_qmin, 0), 255)
    values.zero_points("out_zero_point", out_zero_point, s.out_qmin, s.out_qmax)


def called(s: LinearSpec, x: Tensor, buffer: Tensor, given: Tensor | None) -> None:
    """The zero point that the codes of a call of qlinear have, in the buffer or with them. Raises ArgumentError."""
    if s.input == "static" and s.layout != "cpu_blocked" and buffer.shape == (rows_layout.sections(s).total,):
        low, high = (0, 0) if s.x_symmetric else (s.x_qmin, s.x_qmax)
        if x.dtype == torch.uint8 and not shapes.x_is_packed(s, x):
            low, high = UINT8.range
        values.zero_points("x_zero_point", rows_layout.input_zero_point(s, buffer), low, high)
    values.zero_points("x_zero_point", given, s.x_qmin, s.x_qmax)
