"""The table of code types; csrc/core/dtype.h is its twin and a test compares the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from pyquant.core import names
from pyquant.errors import ArgumentError


@dataclass(frozen=True)
class QDtype:
    """One integer code type.

    name            as schemes and files spell it.
    native_name     as kernel names and csrc/core/dtype.h spell it.
    bits            bits of one code.
    qmin, qmax      every value the storage can hold (schemes may use fewer, see qrange).
    storage         torch dtype of packed memory.
    codes_per_byte  codes in one byte of that memory.

    Example:
        >>> QDTYPES["int4"].qmin, QDTYPES["int4"].codes_per_byte
        (-8, 2)
    """

    name: str
    native_name: str
    bits: int
    qmin: int
    qmax: int
    storage: torch.dtype
    codes_per_byte: int


INT4: Final = QDtype("int4", "s4", 4, -8, 7, torch.uint8, 2)
INT8: Final = QDtype("int8", "s8", 8, -128, 127, torch.int8, 1)
UINT8: Final = QDtype("uint8", "u8", 8, 0, 255, torch.uint8, 1)

KERNEL_BITS: Final = (4, 8)  # of codes that layers run with
SIMULATED_BITS: Final = (*range(2, 9), 16)  # of codes that floating-point models can simulate

QDTYPES: Final[dict[str, QDtype]] = {t.name: t for t in (INT4, INT8, UINT8)}

FLOATS_BY_NAME: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in names.FLOAT_DTYPES}
FLOATS: Final = tuple(FLOATS_BY_NAME.values())


def dtype_name(dtype: torch.dtype) -> str:
    """The name without the module.

    Example:
        >>> dtype_name(torch.float16)
        'float16'
    """
    return str(dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor) -> str:
    """Dtype and shape of a tensor as errors print them.

    Example:
        >>> describe(torch.zeros(3, 4))
        'float32 [3, 4]'
    """
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def qrange(bits: int, symmetric: bool = True, narrow_range: bool = True) -> tuple[int, int]:
    """Code limits (qmin, qmax) that a scheme uses; signed codes.

    bits          8 or 4, which kernels know; 2 to 7 and 16 in simulation.
    symmetric     with narrow_range: [-127, 127] or [-7, 7], so that no code lacks its negative.
    narrow_range  False: the full range [-128, 127] or [-8, 7]. Affine codes always use the full range.
    Raises ArgumentError for other bits.
    Source: docs/numerics.md 1.

    Example:
        >>> qrange(8), qrange(4, symmetric=False), qrange(4, narrow_range=False)
        ((-127, 127), (-8, 7), (-8, 7))
    """
    if bits not in SIMULATED_BITS:
        raise ArgumentError("bits", bits, "2 to 8, or 16")
    qmax = 2 ** (bits - 1) - 1
    return (-qmax if symmetric and narrow_range else -qmax - 1), qmax
