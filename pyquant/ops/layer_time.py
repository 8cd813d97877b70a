"""What a whole layer takes on a GPU, its quantiser and every launch counted, and torch's own 16-bit product beside it.

Times of whole layers that `pyquant tune` measured come first, then measured kernels, then the cost model
(csrc/plan/layer.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from pyquant.core.dtypes import INT4, code_type
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.ops import plan, tuned
from pyquant.ops.spec import LinearSpec

HALVES: Final = {torch.float16: "f16", torch.bfloat16: "bf16"}
BY_MODEL: Final = "by the cost model"


@dataclass(frozen=True)
class LayerTime:
    """us: microseconds of one call, infinite where nothing runs it. source: how they are known."""

    us: float
    source: str = BY_MODEL


def framework_time(n: int, k: int, m: int, dtype: torch.dtype, device: plan.Device) -> LayerTime:
    """torch's Linear of [n, k] 16-bit weights for m rows.

    dtype   float16 or bfloat16: what the plan knows of (ArgumentError for others).
    Raises NativeLibraryError without the compiled module.

    Example:
        >>> h200 = plan.Device(sm=90, sm_count=132, shared_bytes=232448, l2_bytes=62914560, dram_gbps=4800)
        >>> framework_time(8192, 8192, 1, torch.bfloat16, h200).us > 8192 * 8192 * 2 / 4.8e6  # bytes / bandwidth
        True
    """
    us, is_measured, _ = plan._native().framework_time(m, n, k, _half(dtype), vars(device))
    return LayerTime(us, f"measured on {device.name}" if is_measured else BY_MODEL)


def layer_time(
    scheme: QScheme,
    n: int,
    k: int,
    m: int,
    dtype: torch.dtype,
    device: plan.Device,
    *,
    has_residual: bool = False,
    only_compiled: bool = True,
) -> LayerTime:
    """A layer of [n, k] weights in a scheme that takes m rows of 16-bit floats and gives such.

    dtype          float16 or bfloat16.
    only_compiled  with kernels that have machine code in this build; False considers the whole table.
    Raises ArgumentError for another type, NativeLibraryError without the compiled module.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> h200 = plan.Device(sm=90, sm_count=132, shared_bytes=232448, l2_bytes=62914560, dram_gbps=4800)
        >>> ours = layer_time(W8A8Dynamic(), 8192, 8192, 4096, torch.bfloat16, h200, only_compiled=False)
        >>> ours.us < framework_time(8192, 8192, 4096, torch.bfloat16, h200).us
        True
    """
    short = _half(dtype)
    whole = tuned.layer_time(device.name, layer_key(scheme, short, n, k, plan._native().m_bucket(m)))
    if whole is not None:
        return LayerTime(whole.us, f"measured on {device.name}")
    if scheme.is_float:
        return framework_time(n, k, m, dtype, device)
    entry, problem, int4_range = product_of(scheme, n, k, m, dtype, device)
    us, is_measured, _ = plan._native().layer_time(
        entry, problem, vars(device), has_residual, int4_range, only_compiled
    )
    return LayerTime(us, f"its product measured on {device.name}" if is_measured else BY_MODEL)


def beside(
    scheme: QScheme, n: int, k: int, m: int, dtype: torch.dtype, device: plan.Device, **options: Any
) -> tuple[LayerTime, LayerTime]:
    """(layer_time, framework_time) of one layer, from one measurement where there is one."""
    whole = tuned.layer_time(device.name, layer_key(scheme, _half(dtype), n, k, plan._native().m_bucket(m)))
    if whole is None:
        return layer_time(scheme, n, k, m, dtype, device, **options), framework_time(n, k, m, dtype, device)
    source = f"measured on {device.name}"
    return LayerTime(whole.us, source), LayerTime(whole.float_us, source)


def buckets() -> tuple[int, ...]:
    """The largest M of every bucket of the plan up to 65 536 rows, ascending."""
    native = plan._native()
    return tuple(sorted({int(native.m_bucket(m)) for power in range(17) for m in (1 << power, 3 << power >> 1)}))


def layer_key(scheme: QScheme, short: str, n: int, k: int, bucket: int) -> tuple[object, ...]:
    """What a measured time of a whole layer holds for (tuned.LayerChoice.key). short: 'f16' or 'bf16'."""
    inputs = scheme.inputs
    if inputs is None:
        kind = short if scheme.is_float else "weight only"
    else:
        kind = f"{inputs.code_type.native_name} {'dynamic' if inputs.dynamic else 'static'}"
    weights = short if scheme.is_float else scheme.weights.code_type.native_name
    if scheme.weights.two_level:
        weights += tuned.TWO_LEVEL
    zero_point = inputs is not None and not inputs.symmetric
    return (weights, kind, zero_point, 0 if scheme.is_float else scheme.weights.group_size or 0, short, n, k, bucket)


def product_of(
    scheme: QScheme, n: int, k: int, m: int, dtype: torch.dtype, device: plan.Device
) -> tuple[str, dict[str, Any], bool]:
    """(entry, problem, int4_range) of the plan's route for an integer or weight-only layer that takes floats."""
    if scheme.inputs is None:
        w = scheme.weights
        return "float_linear", weight_only_problem(n, k, w.bits, w.group_size or 0, not w.symmetric, m, dtype), False
    spec = spec_of(scheme, n, k, device)
    problem = plan.problem_of(spec, m, dtype) | {"x": _half(dtype), "k": k, "ldx": k}
    return "linear", problem, INT4.holds(spec.x_qmin, spec.x_qmax)


def weight_only_problem(
    n: int, k: int, w_bits: int, group_size: int, has_zero_point: bool, m: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The product of a layer of integer weights under floats. group_size: 0 for one scale a channel."""
    short, code = _half(dtype), code_type(w_bits)
    problem = {"m": m, "n": n, "k": k, "x": short, "w": code.native_name, "out": short, "group_size": group_size}
    ldw = code.columns(k) * (2 if code.native_name == "s4" else 1)
    return problem | {"ldx": k, "ldw": ldw, "ldo": n, "has_w_zero_point": has_zero_point}


def spec_of(scheme: QScheme, n: int, k: int, device: plan.Device | None) -> LinearSpec:
    """The spec of an integer layer without activation, its weights in the layout that the GPU's layers have (None:
    rows)."""
    if scheme.inputs is None:
        raise ArgumentError("scheme", scheme, "a scheme of integer products")
    x_qmin, x_qmax = scheme.inputs.code_range
    spec = LinearSpec(
        n,
        k,
        w_bits=scheme.weights.bits,
        group_size=scheme.weights.group_size or 0,
        input="dynamic" if scheme.inputs.dynamic else "static",
        x_qmin=x_qmin,
        x_qmax=x_qmax,
        x_symmetric=scheme.inputs.symmetric,
        two_level=scheme.weights.two_level,
    )
    return spec if device is None else plan.packed(spec, device)


def _half(dtype: torch.dtype) -> str:
    if dtype not in HALVES:
        raise ArgumentError("dtype", dtype, "torch.float16 or torch.bfloat16")
    return HALVES[dtype]
