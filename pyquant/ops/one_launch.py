"""Whether a GPU multiplies the rows of several layers of one kind in one launch, and by which kernel, as the plan has
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from pyquant.errors import NativeLibraryError
from pyquant.ops import plan, tuned
from pyquant.ops.layer_time import HALVES, weight_only_problem
from pyquant.ops.spec import LinearSpec

NO_KERNEL: Final = "no kernel serves several experts of this scheme and these sizes in one launch"


@dataclass(frozen=True)
class OneLaunch:
    """kernel: the row of the kernel table that multiplies by all layers, or None. why_not: why a call for each layer is
    made nevertheless, or for want of a kernel; '' where one launch is. refusals: as of plan.Selection."""

    kernel: str | None
    why_not: str = ""
    refusals: tuple[str, ...] = ()


def is_on_gpu(x: Tensor) -> bool:
    """Whether CUDA kernels multiply it."""
    return x.is_cuda


def on_16_bytes(x: Tensor) -> Tensor:
    """Rows as kernels of a GPU copy them, 16 bytes at a time: in new memory if they must be."""
    if not is_on_gpu(x) or (x.stride(1) == 1 and (x.data_ptr() | x.stride(0) * x.element_size()) % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def of_codes(spec: LinearSpec, layers: int, rows: int, dtype: torch.dtype, device: torch.device) -> OneLaunch:
    """Layers that multiply codes: one kernel gives them the bits of one call each.

    layers  how many share the rows.
    rows    how many in all.
    dtype   of the result.
    device  a CUDA device that is there.
    """
    return _of_codes(tuple(spec.to_ints()), layers, _bucket(rows), dtype, device, tuned.edition())


def of_weight_only(
    weights: Sequence[Tensor],
    n: int,
    k: int,
    w_bits: int,
    group_size: int,
    has_zero_point: bool,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    chooses_rows: bool = False,
) -> OneLaunch:
    """Layers of integer weights [n, k] under floats. One launch is taken where it is predicted to be quicker than a
    call for each layer at work, rows spread evenly, after waiting for their numbers.

    weights       the codes of each, as packed.
    group_size    0: one scale a channel.
    dtype         of x and the result.
    chooses_rows  rows of x lie in another order, which some kernels want copied first.
    """
    if dtype not in HALVES:
        return OneLaunch(None, f"no kernel multiplies {str(dtype).removeprefix('torch.')} by integer weights")
    if any(one.data_ptr() % 16 for one in weights):
        return OneLaunch(None, "the weights of an expert do not start on 16 bytes")
    sizes = (n, k, w_bits, group_size, has_zero_point)
    return _of_weight_only(sizes, len(weights), _bucket(rows), dtype, device, chooses_rows, tuned.edition())


def forget() -> None:
    """Ask the plan again."""
    _of_codes.cache_clear()
    _of_weight_only.cache_clear()


def _bucket(rows: int) -> int:
    """The number of rows that the plan is asked for instead, so that few answers serve all numbers."""
    try:
        return int(plan._native().m_bucket(rows))
    except NativeLibraryError:
        return rows


# `edition` is that of the measured choices which the plan follows: others are another answer.


@lru_cache(maxsize=1024)
def _of_codes(
    spec: tuple[int, ...], layers: int, rows: int, dtype: torch.dtype, device: torch.device, edition: int
) -> OneLaunch:
    try:
        found = plan.select(LinearSpec.from_ints(spec), rows, dtype, plan.Device.of(device), experts=layers)
    except NativeLibraryError:
        return OneLaunch(None, NO_KERNEL)
    return OneLaunch(found.kernel, "" if found.kernel else NO_KERNEL, found.refusals)


@lru_cache(maxsize=1024)
def _of_weight_only(
    sizes: tuple[int, int, int, int, bool],
    layers: int,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    chooses_rows: bool,
    edition: int,
) -> OneLaunch:
    try:
        at = plan.Device.of(device)
        problem = weight_only_problem(*sizes, rows, dtype)
        all_rows = problem | {"experts": layers, "chooses_rows": chooses_rows}
        found = plan.routed("float_linear", all_rows, at)
        if found.kernel is None:
            return OneLaunch(None, NO_KERNEL, found.refusals)
        one = problem | {"m": -(-rows // plan.at_work(layers, rows))}
        each, _, _ = plan._native().layer_time("float_linear", one, vars(at))
    except NativeLibraryError:
        return OneLaunch(None, NO_KERNEL)
    # A copy of chosen rows is not in the figure: calls for each layer copy them, too.
    is_quicker = found.predicted_us <= plan.one_by_one_us(each, layers, rows)
    why_not = "" if is_quicker else f"one after the other they are predicted to be quicker, at {rows} rows"
    return OneLaunch(found.kernel, why_not, found.refusals)
