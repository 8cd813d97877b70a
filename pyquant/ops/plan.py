"""Which kernel a fused layer would get on a device, from the plan itself and without running it."""

from __future__ import annotations

import functools
import importlib
import math
import re
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final

import torch

from pyquant.core import arguments
from pyquant.core.dtypes import INT4
from pyquant.core.patches import Patches
from pyquant.errors import ArgumentError, NativeLibraryError
from pyquant.ops.rows_layout import BLOCKED, STEP_CODES, sections
from pyquant.ops.spec import LinearSpec


@dataclass(frozen=True)
class Device:
    """What dispatch needs to know of a GPU; values are free, no GPU is queried.

    sm            compute capability times ten (80, 86, 89, 90, 100, 120).
    sm_count      multiprocessors.
    shared_bytes  opt-in shared memory of one block.
    l2_bytes      second-level cache.
    dram_gbps     peak of the memory bus in 1e9 bytes a second; 0: what the generation usually has.
    name          as reported by the driver: selects the measured choices, and tells a GeForce, whose tensor cores add
                  16-bit products into float32 at half their rate; empty: neither.
    clock_mhz     highest clock of the multiprocessors; 0: what the generation usually has.
    """

    sm: int
    sm_count: int
    shared_bytes: int
    l2_bytes: int
    dram_gbps: int = 0
    name: str = ""
    clock_mhz: int = 0

    @staticmethod
    def of(device: torch.device) -> Device:
        """The properties of a CUDA device that is there, as the kernels' own runtime reports them."""
        index = torch.cuda.current_device() if device.index is None else device.index
        return Device(**_native().device_info(index))


@dataclass(frozen=True)
class Kernel:
    """A row of the kernel table, which `gemm(..., kernel=name)` runs.

    x, w, out      types that it takes and gives, such as ("s8",).
    tile           tokens, channels and codes of one block.
    cluster        blocks that share what they load, tokens x channels.
    stages         buffers of the main loop in shared memory; 0: as many as fit.
    schedule       how blocks share the work (docs/kernels.md).
    sm_min, sm_end compute capabilities times ten: it runs where sm_min <= sm < sm_end.
    is_compiled    whether this build holds its machine code.
    """

    name: str
    x: tuple[str, ...]
    w: tuple[str, ...]
    out: tuple[str, ...]
    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    stages: int
    schedule: str
    sm_min: int
    sm_end: int
    is_compiled: bool


def kernels(pattern: str = "") -> tuple[Kernel, ...]:
    """The rows of the kernel table whose names match a regular expression, compiled into this build or not.

    Raises NativeLibraryError when the compiled module is not there.

    Example:
        >>> [(k.name, k.stages) for k in kernels("s4s4_128x256x256")]
        [('gemm_sm80_s4s4_128x256x256', 3)]
    """
    try:
        named = re.compile(pattern) if isinstance(pattern, str) else None
    except (re.error, RecursionError, OverflowError):
        named = None
    if named is None:
        raise ArgumentError("pattern", arguments.shown(pattern), "a regular expression, such as 's8s8'")
    return tuple(
        Kernel(
            str(row["name"]),
            tuple(row["x"]),
            tuple(row["w"]),
            tuple(row["out"]),
            tuple(row["tile"]),
            tuple(row["cluster"]),
            int(row["stages"]),
            str(row["schedule"]),
            int(row["sm_min"]),
            int(row["sm_end"]),
            bool(row["compiled"]),
        )
        for row in _native().kernel_table()
        if named.search(str(row["name"]))
    )


@functools.lru_cache(maxsize=64)
def reads_int4_packed(sm: int) -> int:
    """What a number of int4 codes must be a multiple of, so that a chip's own rows read them two a byte; 0: none does
    (Hopper multiplies int4 codes as bytes). sm: compute capability times ten.
    """
    try:
        rows = _native().kernel_table()
    except NativeLibraryError:
        return 0
    fits = [r for r in rows if r["compiled"] and r["x_packing"] == "nibbles" and r["sm_min"] <= sm < r["sm_end"]]
    return max((int(row["k_multiple"]) for row in fits), default=0)


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


_OUT = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.int8: "s8",
    torch.uint8: "s4",
}
# Of qlinear's activations.
GIVEN: dict[str, dict[str, Any]] = {"floats": {"x": "f16"}, "packed": {"x": "s4", "x_packed": True}}


def select(
    spec: LinearSpec,
    m: int,
    out_dtype: torch.dtype,
    device: Device,
    *,
    has_residual: bool = False,
    only_compiled: bool = True,
    given: str = "floats",
    experts: int = 0,
) -> Selection:
    """The row of the kernel table that qlinear takes for m rows on a device, or every row's refusal.

    spec           layer, in any layout (CUDA buffers are padded rows).
    m              rows, >= 0.
    out_dtype      float16, bfloat16, float32, int8 for codes, or uint8 for codes two a byte.
    only_compiled  rows with machine code in this build; False considers the whole table.
    given          'floats', which the layer quantises into the form that its row reads; 'packed': int4 codes two a
                   byte, read as they come where a tensor-core row does, else laid out first.
    experts        layers of the spec that share the m rows, in one launch; 0: one layer.
    Raises NativeLibraryError when the compiled module is not there, ArgumentError for an unknown `given`.

    Example:
        >>> h200 = Device(sm=90, sm_count=132, shared_bytes=232448, l2_bytes=62914560)
        >>> select(LinearSpec(4096, 4096), 4096, torch.float16, h200, only_compiled=False).kernel[:9]
        'gemm_sm90'
    """
    if given not in GIVEN:
        raise ArgumentError("given", repr(given), " or ".join(map(repr, GIVEN)))
    problem = problem_of(spec, m, out_dtype) | GIVEN[given] | {"k": spec.k, "ldx": spec.k, "experts": experts}
    if given == "packed":
        problem["x_align"] = _alignment((spec.k + 1) // 2)
    int4_range = INT4.holds(spec.x_qmin, spec.x_qmax)
    return routed(
        "linear", problem, device, has_residual=has_residual, int4_range=int4_range, only_compiled=only_compiled
    )


def routed(
    entry: str,
    problem: dict[str, Any],
    device: Device,
    *,
    has_residual: bool = False,
    int4_range: bool = False,
    only_compiled: bool = True,
) -> Selection:
    """Where the plan sends a problem; a kernel of None without refusals: the framework multiplies.

    entry, problem, int4_range  as layer_time.product_of gives them.
    """
    _, kernel, us, refused, is_measured = _native().route(
        entry, problem, vars(device), has_residual, int4_range, only_compiled
    )
    return Selection(kernel, us, tuple(f"{name}: {why}" for name, why in refused.items()), is_measured)


def image_rows(patches: Patches, height: int, width: int, channels: int) -> dict[str, Any]:
    """`image` of a problem: where the window of a Patches finds the codes of padded images [height, width, channels].

    The window fits into the image; its padding is part of that. Of several groups the first one's.
    """
    size = replace(patches, padding=(0, 0, 0, 0)).out_size(height, width)
    steps = (width * channels, channels)
    return {
        "channels": channels // patches.groups,
        "taps": patches.kernel_size[1],
        "out_height": size[0],
        "out_width": size[1],
        "image_step": height * width * channels,
        "window_step": [stride * step for stride, step in zip(patches.stride, steps, strict=True)],
        "tap_step": [dilation * step for dilation, step in zip(patches.dilation, steps, strict=True)],
    }


def conv_problem(spec: LinearSpec, patches: Patches, pixels: int, out_dtype: torch.dtype) -> dict[str, Any]:
    """The product that qconv2d runs for so many pixels of a result, taken as one line of an image."""
    channels = spec.k // patches.pixels
    spans = [d * (size - 1) + 1 for d, size in zip(patches.dilation, patches.kernel_size, strict=True)]
    width = max(pixels - 1, 0) * patches.stride[1] + spans[1]
    problem = problem_of(spec, pixels, out_dtype) | {"k": spec.k, "x": "s8", "ldx": channels}
    return problem | {"x_align": _alignment(channels), "image": image_rows(patches, spans[0], width, channels)}


def _alignment(row_bytes: int) -> int:
    """Bytes, up to 16, that every row starts on in memory that starts on 16."""
    return min(16, row_bytes & -row_bytes) or 16


def problem_of(spec: LinearSpec, m: int, out_dtype: torch.dtype) -> dict[str, Any]:
    """The GEMM that qlinear runs on quantised floats of m rows, as pyquant._native takes it."""
    at, dynamic = sections(spec), spec.input == "dynamic"
    row_bytes = (spec.n + 1) // 2 if out_dtype == torch.uint8 else spec.n * out_dtype.itemsize
    ldo = 2 * row_bytes if out_dtype == torch.uint8 else spec.n
    return {
        "m": m,
        "n": spec.n,
        "k": spec.k if spec.group_size else at.k_pad,
        "w": spec.w_type.native_name,
        "w_layout": "blocked128" if spec.layout == BLOCKED else "natural",
        "out": _OUT[out_dtype],
        "ldx": at.k_pad,
        "ldw": at.k_pad,
        "ldo": ldo,
        "out_align": _alignment(row_bytes),
        **({"step_size": spec.group_size} if spec.two_level else {"group_size": spec.group_size}),
        "per_token_scale": dynamic,
        "per_token_zero_point": dynamic,
        "has_zero_point": not dynamic or not spec.x_symmetric,
    }


MANY_ROWS: Final = (1, 16, 64, 256, 4096)


@functools.lru_cache(maxsize=4096)
def weight_layout(spec: LinearSpec, device: Device) -> str:
    """The layout in which a layer's weights are packed for a GPU: decided once, for any number of rows to come.

    'rows_blocked128' where kernels that read it take the layer at every number of rows tried (1 to 4096) and are
    predicted to be faster over them (geometric mean); else 'rows'. The layout in the spec is not looked at.
    """
    if spec.w_type is not INT4 or (spec.two_level and spec.group_size % STEP_CODES):
        return "rows"
    try:
        _native()
    except NativeLibraryError:
        return "rows"
    out = torch.int8 if spec.codes_out else torch.float16
    ratio = 1.0
    for m in MANY_ROWS:
        plain, blocked = (select(replace(spec, layout=layout), m, out, device) for layout in ("rows", BLOCKED))
        if blocked.kernel is None:
            return "rows"
        ratio *= blocked.predicted_us / plain.predicted_us if plain.kernel is not None else 1.0
    return BLOCKED if ratio < 1.0 else "rows"


# Microseconds that the host takes for a layer's call, whatever the device does meanwhile (`python -m bench.call_cost`,
# docs/figures.md), and, by assumption, until it knows how many rows each of several layers has: no call can be made
# before.
CALL_US, WAIT_US = 6.7, 10.0
BANK_ROWS: Final = (8, 64, 512, 4096)


def one_by_one_us(each_us: float, layers: int, rows: int) -> float:
    """Of layers that share so many rows, spread evenly, in a call each, of so many microseconds on the device, once the
    host knows whose rows are whose."""
    return max(each_us, CALL_US) * at_work(layers, rows) + WAIT_US


def at_work(layers: int, rows: int) -> int:
    """Of several layers those that have rows, where these are spread evenly."""
    return max(1, min(rows, layers))


@functools.lru_cache(maxsize=1024)
def bank_layout(spec: LinearSpec, device: Device, experts: int) -> str:
    """weight_layout of layers that share rows, as the experts of a bank do.

    experts  how many layers share them. The layout is that in which they are predicted to be quicker (geometric mean of
             8 to 4096 rows in all, spread evenly): in one launch where a kernel serves them all, else in a call each,
             which has to be half as quick again: it waits for the device, and no CUDA graph can hold it.
    """
    blocked = weight_layout(spec, device)
    if experts < 2 or blocked == "rows":
        return blocked
    ratio = 1.0
    for rows in BANK_ROWS:
        ratio *= _bank_us(replace(spec, layout=blocked), rows, device, experts)
        ratio /= _bank_us(replace(spec, layout="rows"), rows, device, experts)
    return blocked if ratio < 1.0 else "rows"


def _bank_us(spec: LinearSpec, rows: int, device: Device, experts: int) -> float:
    """What bank_layout compares."""
    together = select(spec, rows, torch.float16, device, experts=experts)
    if together.kernel is not None:
        return together.predicted_us
    each = select(spec, -(-rows // at_work(experts, rows)), torch.float16, device)
    return 1.5 * one_by_one_us(each.predicted_us if each.kernel is not None else math.inf, experts, rows)


def packed(spec: LinearSpec, device: Device) -> LinearSpec:
    """The spec with the layout that a layer's weights have on the GPU."""
    return replace(spec, layout=weight_layout(spec, device))
