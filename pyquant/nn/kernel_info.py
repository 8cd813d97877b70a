"""Which kernel would run a layer, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pyquant import ops
from pyquant.core import arguments
from pyquant.ops import layer_time, plan

if TYPE_CHECKING:
    from pyquant.nn.linear_call import LinearCall


@dataclass(frozen=True)
class KernelInfo:
    """The kernel of one layer for one M.

    kernel    its name.
    device    where it runs.
    is_exact  equal bits on every device and batch size (the integer contract), or a float product with a tolerance.
    reason    why this one.
    refusals  one line per kernel that cannot take the problem, with both numbers.
    """

    kernel: str
    device: str
    is_exact: bool
    reason: str
    refusals: tuple[str, ...] = ()


def explain(layer: LinearCall, M: int) -> KernelInfo:
    """The record for M rows; M is a whole number >= 0."""
    arguments.whole("M", M, 0)
    device = layer.storage.device
    if layer.missing:
        return KernelInfo("none", str(device), False, f"{layer.missing} is not calibrated")
    if device.type == "meta":
        return KernelInfo("none", str(device), False, "the meta device computes shapes only")
    if layer.scheme.is_float:
        return KernelInfo("torch matmul", str(device), False, "16-bit weights")
    if device.type == "cpu":
        return _on_cpu(layer, device)
    return _on_cuda(layer, M, device) if layer.scheme.is_integer else _weight_only_on_cuda(layer, M, device)


def _on_cuda(layer: LinearCall, M: int, device: torch.device) -> KernelInfo:
    out_dtype = torch.int8 if layer.scheme.outputs is not None else layer.dtype
    spec, on, patches = ops.LinearSpec.from_ints(layer._spec), plan.Device.of(device), getattr(layer, "patches", None)
    if patches is None or patches.is_pointwise:
        choice = plan.select(spec, M, out_dtype, on)
    elif patches.groups > 1:
        return KernelInfo(
            "grouped_conv", str(device), True, "all convolutions in groups; depthwise ones by a kernel of their own"
        )
    else:
        choice = plan.routed("conv", plan.conv_problem(spec, patches, M, out_dtype), on)
    if choice.kernel is None:
        return KernelInfo("none", str(device), False, "no kernel takes the problem", choice.refusals)
    return KernelInfo(choice.kernel, str(device), True, _why(choice), choice.refusals)


def _weight_only_on_cuda(layer: LinearCall, M: int, device: torch.device) -> KernelInfo:
    """A row of the table for few rows of 16-bit floats, else torch's product of dequantised weights."""
    if layer.dtype in layer_time.HALVES:
        on, shape = plan.Device.of(device), (layer.out_features, layer.in_features)
        entry, problem, _ = layer_time.product_of(layer.scheme, *shape, M, layer.dtype, on)
        choice = plan.routed(entry, problem, on)
        if choice.kernel is not None:
            return KernelInfo(choice.kernel, str(device), False, _why(choice))
    return KernelInfo("torch matmul", str(device), False, "dequantised weights, floating-point activations")


def _why(choice: plan.Selection) -> str:
    source = "measured on this GPU" if choice.is_measured else "by the cost model"
    return f"cheapest of the rows that take it: {choice.predicted_us:.1f} us {source}"


def _on_cpu(layer: LinearCall, device: torch.device) -> KernelInfo:
    exact = layer.scheme.is_integer
    if not ops.native_available():
        return KernelInfo("pyquant.numerics (Python)", str(device), exact, str(ops.why_not_native()))
    report = str(torch.ops.pyquant._cpu_info()).strip()
    used = next((line for line in report.splitlines() if "in use" in line), report)
    refused = tuple(line.strip() for line in report.splitlines() if line != used)
    kernel = "cpu linear" if exact else "cpu weight_only"
    return KernelInfo(f"{kernel}, {used.split(':')[0].split()[0]}", str(device), exact, used.strip(), refused)
