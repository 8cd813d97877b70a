"""Which kernel a fused layer would get on a device, asked without running it: the plan's own answer."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch

from pyquant.errors import NativeLibraryError
from pyquant.ops.rows_layout import sections
from pyquant.ops.spec import LinearSpec


@dataclass(frozen=True)
class Device:
    """What dispatch needs to know of a GPU; made up freely, no GPU is asked.

    sm            compute capability times ten (80, 86, 89, 90).
    sm_count      multiprocessors.
    shared_bytes  opt-in shared memory of one block.
    l2_bytes      second-level cache.
    """

    sm: int
    sm_count: int
    shared_bytes: int
    l2_bytes: int

    @staticmethod
    def of(device: torch.device) -> Device:
        """The properties of a CUDA device that is there, as the kernels' own runtime reports them."""
        index = torch.cuda.current_device() if device.index is None else device.index
        return Device(**_native().device_info(index))


@dataclass(frozen=True)
class Selection:
    """kernel: name of the cheapest row that takes the problem, or None; predicted_us: the model's time, in
    microseconds; refusals: one line per row that cannot, with both numbers."""

    kernel: str | None
    predicted_us: float
    refusals: tuple[str, ...]


def _native() -> ModuleType:
    try:
        return importlib.import_module("pyquant._native")
    except ImportError as error:
        raise NativeLibraryError(f"pyquant._native, the kernel table, cannot be imported: {error}") from None


_OUT = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.int8: "s8"}


def select(
    spec: LinearSpec, m: int, out_dtype: torch.dtype, device: Device, *, has_residual: bool = False,
    only_compiled: bool = True,
) -> Selection:  # fmt: skip
    """The row of the kernel table that qlinear takes for m rows on a device, or every row's refusal.

    spec           layer, in any layout (CUDA buffers are padded rows).
    m              rows, >= 0.
    out_dtype      float16, bfloat16, float32, or int8 for codes.
    only_compiled  rows with machine code in this build; False asks the whole table.
    Raises NativeLibraryError when the compiled module is not there.

    Example:
        >>> h200 = Device(sm=90, sm_count=132, shared_bytes=232448, l2_bytes=62914560)
        >>> select(LinearSpec(4096, 4096), 512, torch.float16, h200, only_compiled=False).kernel[:9]
        'gemm_sm90'
    """
    at, dynamic = sections(spec), spec.input == "dynamic"
    k = spec.k if spec.group_size else at.k_pad
    problem = {
        "m": m, "n": at.n_pad, "k": k, "w": "s4" if spec.w_bits == 4 else "s8", "out": _OUT[out_dtype],
        "ldx": at.k_pad, "ldw": at.k_pad, "group_size": spec.group_size, "per_token_scale": dynamic,
        "per_token_zero_point": dynamic, "has_zero_point": not dynamic or not spec.x_symmetric,
    }  # fmt: skip
    kernel, predicted_us, refused = _native().select(problem, vars(device), has_residual, only_compiled)
    return Selection(kernel, predicted_us, tuple(f"{name}: {why}" for name, why in refused.items()))
