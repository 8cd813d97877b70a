"""How a bank of experts would multiply its rows, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pyquant import ops
from pyquant.nn.expert_kinds import by_kind
from pyquant.nn.expert_rows import GROUPED, one_launch_of
from pyquant.nn.kernel_info import KernelInfo
from pyquant.nn.linear_call import LinearCall


def explain(layers: Sequence[nn.Module], rows: int, chooses_rows: bool = False) -> KernelInfo:
    """The same layer of all experts, for so many rows, spread evenly: the kernels of its kinds, and in `reason` how
    many calls multiply by all of them, and why. chooses_rows: rows of its input lie in another order."""
    kinds = by_kind(layers)
    each = max(1, -(-rows // max(len(layers), 1)))
    infos = [_of_one(layers[places[0]], each) for places in kinds.values()]
    first: Any = layers[next(iter(kinds.values()))[0]]
    device = next(first.buffers(), next(first.parameters(), torch.empty(0, dtype=torch.float32, device="cpu"))).device
    experts = f"{len(layers)} experts"
    if device.type == "cuda":
        if not isinstance(first, LinearCall):
            return _joined(infos, f"a call for each of {experts}: they are floats")
        found = one_launch_of(layers, rows, first.dtype, device, chooses_rows)
        if found.kernel is None or found.why_not:
            return _joined(infos, f"a call for each of {experts}: {found.why_not}")
        return replace(infos[0], kernel=found.kernel, reason=f"one launch for {experts}", refusals=found.refusals)
    if not ops.native_available():
        return _joined(infos, f"a call for each of {experts}")
    together = sum(1 for kind in kinds if isinstance(kind, tuple) and kind[0] in GROUPED)
    alone = [len(p) for kind, p in kinds.items() if not (isinstance(kind, tuple) and kind[0] in GROUPED)]
    if together == len(kinds) == 1:
        return _joined(infos, f"one call for {experts}")
    parts = [f"{together} calls, one for the experts of each of {together} schemes"] if together else []
    if alone:
        parts.append(f"{sum(alone)} experts by themselves, as they are floats or their calls are watched")
    return _joined(infos, "; ".join(parts))


def _of_one(layer: nn.Module, rows: int) -> KernelInfo:
    if isinstance(layer, LinearCall):
        return layer.kernel_info(rows)
    device = next(layer.parameters(), torch.empty(0, dtype=torch.float32, device="cpu")).device
    return KernelInfo("torch matmul", str(device), False, "a floating-point layer")


def _joined(infos: Sequence[KernelInfo], how: str) -> KernelInfo:
    """The record for all kinds of layers."""
    kernels = ", ".join(dict.fromkeys(info.kernel for info in infos))
    reasons = "; ".join(dict.fromkeys(info.reason for info in infos))
    refusals = tuple(dict.fromkeys(line for info in infos for line in info.refusals))
    exact = all(info.is_exact for info in infos)
    return KernelInfo(kernels, infos[0].device, exact, f"{how}; {reasons}", refusals)
