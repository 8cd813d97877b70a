"""Fake quantisation by torch's own operators, which exporters and other projects' tools know; the switch to them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyquant.core.dtypes import qrange
from pyquant.numerics import quantize_dynamic

if TYPE_CHECKING:
    from pyquant.simulate.fake_quantize import FakeQuantize

_chosen = False


def are_chosen() -> bool:
    """Whether fake quantisers compute with torch's operators now."""
    return _chosen


def choose(enabled: bool) -> None:
    """From here on (in every thread) fake quantisers compute with torch's operators, or no longer."""
    global _chosen
    _chosen = bool(enabled)


@contextmanager
def torch_fake_quantize() -> Iterator[None]:
    """Within the block, simulating models compute with torch's own fake-quantise operators: for tracing and exporting.

    What is traced or exported there contains aten::fake_quantize_per_tensor_affine and _per_channel_affine with scales
    as constants, and no operator of pyquant: TorchScript elsewhere runs it, and ONNX exporters make QuantizeLinear and
    DequantizeLinear of it. The switch is one of the process, as TensorQuantizer.use_fb_fake_quant, which is the same.

    The numbers are those of the simulation but for two things: torch's codes go down to -128 (-8 with 4 bits), as
    those of ONNX do, where pyquant's symmetric codes stop at -127 (-7), which differs for clipped numbers alone; and a
    quotient within an ulp of a half may round to the neighbouring code. Ranges of dynamic inputs stay computations in
    the graph.
    Source: docs/from-the-tutorials.md 4.5.

    Example:
        >>> from pyquant import W8A8Dynamic, insert_fake_quantize_
        >>> model = insert_fake_quantize_(torch.nn.Sequential(torch.nn.Linear(4, 2)), W8A8Dynamic())
        >>> with torch_fake_quantize():
        ...     traced = torch.jit.trace(model, torch.randn(3, 4))
        >>> graph = str(traced.inlined_graph)
        >>> "aten::fake_quantize_per_channel_affine" in graph, "pyquant::" in graph
        (True, False)
    """
    before = _chosen
    choose(True)
    try:
        yield
    finally:
        choose(before)


def fake_quantize(fake: FakeQuantize, x: Tensor, limits: tuple[int, int] | None = None) -> Tensor:
    """What `fake` makes of x float [..., K] (weights: [N, ...]), by torch's operators. Same shape and type. limits:
    smallest and largest code; None: the full range of the bits, which exporters take."""
    s = fake.scheme
    rows = _rows(x, s.granularity, s.group_size or 0)
    with warnings.catch_warnings():  # of constants, which are what is wanted
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
        scale, zero_point = _qparams(fake, x, rows)
    limits = limits or qrange(s.bits, s.symmetric, False)
    if s.granularity == "per_tensor":
        return torch.fake_quantize_per_tensor_affine(x, scale.reshape(()), zero_point.reshape(()), *limits)
    y = torch.fake_quantize_per_channel_affine(rows, scale.reshape(-1), zero_point.reshape(-1), 0, *limits)
    return y if rows is x else y.reshape(x.shape)


def _rows(x: Tensor, granularity: str, group_size: int) -> Tensor:
    """x with the numbers that share a scale in one row: its first dimension counts scales."""
    if granularity == "per_token":
        return x.reshape(-1, x.shape[-1])
    return x.reshape(-1, group_size) if granularity == "per_group" else x


def _qparams(fake: FakeQuantize, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 scales and int32 zero points. Of inputs that follow their data they are part of the graph."""
    s = fake.scheme
    if fake.follows:
        flat = rows.detach().reshape(rows.shape[0], -1) if s.granularity != "per_tensor" else rows.detach()
        how = "per_tensor" if s.granularity == "per_tensor" else "per_channel"
        _, scale, zero = quantize_dynamic(flat, how, 0, s.symmetric, *s.code_range)
        qparams: tuple[Tensor, Tensor | None] = (scale, zero)
    else:
        qparams = fake.qparams()
    scale, zero_point = qparams
    if zero_point is None:
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    if torch.jit.is_tracing() and not s.dynamic:  # type: ignore[attr-defined]
        return _constant(scale), _constant(zero_point)
    return scale, zero_point


def _constant(values: Tensor) -> Tensor:
    """The same numbers as a constant of the graph that is being traced, wherever they came from."""
    return torch.tensor(values.tolist(), dtype=values.dtype, device=values.device)
