"""The code types, each with all its facts; csrc/core/dtype.h is the twin of the table and a test compares the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from pyquant.core import names
from pyquant.errors import ArgumentError


@dataclass(frozen=True)
class CodeType:
    """One integer code type. What depends on the type of codes reads it here and compares no number of bits.

    name         as schemes and files spell it.
    native_name  as kernel names and csrc/core/dtype.h spell it; '': no kernel reads it, it is simulated alone.
    bits         bits of one code.
    qmin, qmax   every code that there is (schemes may use fewer, see qrange).
    storage      torch dtype of the memory that holds codes.
    per_element  codes in one element of that memory.
    """

    name: str
    native_name: str
    bits: int
    qmin: int
    qmax: int
    storage: torch.dtype
    per_element: int = 1

    @property
    def is_packed(self) -> bool:
        """Whether codes share elements of memory, as pyquant.numerics.pack lays them out."""
        return self.per_element > 1

    @property
    def weight_name(self) -> str:
        """Name of weight codes of this type in a state_dict."""
        return "weight_packed" if self.is_packed else "weight"

    @property
    def range(self) -> tuple[int, int]:
        """(qmin, qmax)."""
        return self.qmin, self.qmax

    @property
    def largest(self) -> int:
        """The largest absolute code, which bounds K (docs/numerics.md 3); with a zero point: qmax - qmin."""
        return max(-self.qmin, self.qmax)

    @property
    def preset_calibrator(self) -> str:
        """Where presets have static ranges from: few codes are better close together than far-reaching."""
        return "mse" if self.qmax < 64 else "max"

    def columns(self, k: int) -> int:
        """Elements of memory that a row of k codes takes."""
        return -(-k // self.per_element)

    def holds(self, qmin: int, qmax: int) -> bool:
        """Whether codes from qmin to qmax are all of this type."""
        return self.qmin <= qmin and qmax <= self.qmax


INT4: Final = CodeType("int4", "s4", 4, -8, 7, torch.uint8, 2)
INT8: Final = CodeType("int8", "s8", 8, -128, 127, torch.int8)
UINT8: Final = CodeType("uint8", "u8", 8, 0, 255, torch.uint8)

QDTYPES: Final = {t.name: t for t in (INT4, INT8, UINT8)}
ONE_A_BYTE: Final = {torch.int8: INT8, torch.uint8: UINT8}  # types of codes that nothing but their memory tells

# Ops that multiply activations and weights: the types of both. INT8 activations may come as UINT8 codes too.
PRODUCTS: Final = {
    f"gemm_{x.native_name}{w.native_name}": (x, w) for x, w in ((INT8, INT8), (INT8, INT4), (INT4, INT4))
}
KERNEL_BITS: Final = tuple(sorted({w.bits for _, w in PRODUCTS.values()}))
KERNEL_BITS_TEXT: Final = " or ".join(map(str, KERNEL_BITS))
SIMULATED_BITS: Final = (*range(2, 9), 16)  # of codes that floating-point models can simulate

_SIGNED: Final = {
    b: CodeType(f"int{b}", "", b, -(1 << b - 1), (1 << b - 1) - 1, torch.int8 if b <= 8 else torch.int16)
    for b in SIMULATED_BITS
} | {w.bits: w for _, w in PRODUCTS.values()}

FLOATS_BY_NAME: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in names.FLOAT_DTYPES}
FLOATS: Final = tuple(FLOATS_BY_NAME.values())


def dtype_name(dtype: torch.dtype) -> str:
    """The name without the module: 'float16'."""
    return str(dtype).removeprefix("torch.")


def describe(value: object) -> str:
    """Dtype and shape of a tensor as errors print them: 'float32 [3, 4]'; the type of what is none."""
    return f"{dtype_name(value.dtype)} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


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
    t = code_type(bits)
    return (-t.qmax if symmetric and narrow_range else t.qmin), t.qmax


def code_type(bits: int) -> CodeType:
    """The type of a scheme's codes, which are signed. Raises ArgumentError where there is none."""
    if bits not in _SIGNED:
        raise ArgumentError("bits", bits, "2 to 8, or 16")
    return _SIGNED[bits]
