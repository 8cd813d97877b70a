"""Which kernel a fused layer would get on a device, asked without running it: the plan's own answer."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from pyquant.errors import NativeLibraryError
from pyquant.ops.rows_layout import BLOCKED, sections
from pyquant.ops.spec import LinearSpec


@dataclass(frozen=True)
class Device:
    """What dispatch needs to know of a GPU; made up freely, no GPU is asked.

    sm            compute capability times ten (80, 86, 89, 90).
    sm_count      multiprocessors.
    shared_bytes  opt-in shared memory of one block.
    l2_bytes      second-level cache.
    dram_gbps     peak of the memory bus in 1e9 bytes a second; 0: what the generation usually has.
    name          as the driver tells it: which measured choices hold; empty: none.
    """

    sm: int
    sm_count: int
    shared_bytes: int
    l2_bytes: int
    dram_gbps: int = 0
    name: str = ""

    @staticmethod
    def of(device: torch.device) -> Device:
        """The properties of a CUDA device that is there, as the kernels' own runtime reports them."""
        index = torch.cuda.current_device() if device.index is None else device.index
        return Device(**_native().device_info(index))


@dataclass(frozen=True)
class Selection:
    """kernel: name of the row for the problem, or None; predicted_us: its time in microseconds, by the model or as
    `pyquant tune` measured it (is_measured); refusals: one line per row that cannot, with both numbers."""

    kernel: str | None
    predicted_us: float
    refusals: tuple[str, ...]
    is_measured: bool = False


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
        >>> select(LinearSpec(4096, 4096), 4096, torch.float16, h200, only_compiled=False).kernel[:9]
        'gemm_sm90'
    """
    problem = problem_of(spec, m, out_dtype)
    kernel, predicted_us, refused = _native().select(problem, vars(device), has_residual, only_compiled)
    measured = _native().tuned(problem, vars(device))
    refusals = tuple(f"{name}: {why}" for name, why in refused.items())
    return Selection(kernel, predicted_us, refusals, measured is not None and measured[0] == kernel)


def problem_of(spec: LinearSpec, m: int, out_dtype: torch.dtype) -> dict[str, Any]:
    """The GEMM that qlinear asks of the plan for m rows, as pyquant._native takes it."""
    at, dynamic = sections(spec), spec.input == "dynamic"
    row_bytes = spec.n * out_dtype.itemsize
    return {
        "m": m, "n": spec.n, "k": spec.k if spec.group_size else at.k_pad, "w": "s4" if spec.w_bits == 4 else "s8",
        "w_layout": "blocked128" if spec.layout == BLOCKED else "natural", "out": _OUT[out_dtype],
        "ldx": at.k_pad, "ldw": at.k_pad, "ldo": spec.n, "out_align": min(16, row_bytes & -row_bytes) or 16,
        "group_size": spec.group_size, "per_token_scale": dynamic, "per_token_zero_point": dynamic,
        "has_zero_point": not dynamic or not spec.x_symmetric,
    }  # fmt: skip


_MANY_ROWS = (1, 16, 64, 256, 4096)


@functools.lru_cache(maxsize=4096)
def weight_layout(spec: LinearSpec, device: Device) -> str:
    """The layout in which a layer's weights are packed for a GPU: decided once, for any number of rows to come.

    spec    the layer; its own layout is not looked at.
    ->      'rows_blocked128' where kernels that read it take the layer at every number of rows tried (1 to 4096) and
            are predicted to be faster over them (geometric mean); else 'rows'.

    Example:
        >>> weight_layout(LinearSpec(64, 64, w_bits=8), Device(sm=90, sm_count=132, shared_bytes=0, l2_bytes=0))
        'rows'
    """
    if spec.w_bits != 4:
        return "rows"
    try:
        _native()
    except NativeLibraryError:
        return "rows"
    out = torch.int8 if spec.codes_out else torch.float16
    ratio = 1.0
    for m in _MANY_ROWS:
        plain, blocked = (select(replace(spec, layout=layout), m, out, device) for layout in ("rows", BLOCKED))
        if blocked.kernel is None:
            return "rows"
        ratio *= blocked.predicted_us / plain.predicted_us if plain.kernel is not None else 1.0
    return BLOCKED if ratio < 1.0 else "rows"
