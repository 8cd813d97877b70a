"""One linear layer's numbers, made once for all candidates: weights of one (K, N), and inputs of one M.

Gaussian, rounded to bfloat16 first, so that every candidate starts from the same numbers. Codes are rounded Gaussians
over the whole range: zeros, small integers and constant data make every chip look faster than it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyquant.core.scheme import QScheme
from pyquant.measure.exact import check_rows, sqnr_db
from pyquant.nn.qlinear import QLinear
from pyquant.numerics.quantize import quantize_dynamic

STATIC_AMAX = 4.5  # standard deviations that a static scale covers: what max calibration finds in some 10^5 Gaussians
FP8_MAX = 448.0


def _gaussian(device: torch.device, seed: int, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(torch.bfloat16).to(torch.float32)


@dataclass
class Weights:
    """w float32 [n, k] and bias float32 [n] on `device`; other forms are made on first use."""

    k: int
    n: int
    device: torch.device
    seed: int = 0

    @cached_property
    def w(self) -> Tensor:
        w = _gaussian(self.device, 3 * self.seed + 1, self.n, self.k) / math.sqrt(max(1, self.k))
        return w.to(torch.bfloat16).to(torch.float32)

    @cached_property
    def bias(self) -> Tensor:
        return _gaussian(self.device, 3 * self.seed + 2, self.n)

    @cached_property
    def codes(self) -> tuple[Tensor, Tensor]:
        """int8 codes [n, k] and float32 scales [n], symmetric per channel."""
        codes, scale, _ = quantize_dynamic(self.w, "per_channel")
        return codes, scale

    def linear(self, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
        """The layer as nn.Linear, with memory of its own."""
        layer = torch.nn.Linear(self.k, self.n, device="meta", dtype=dtype)
        layer.weight = torch.nn.Parameter(self.w.to(dtype, copy=True), requires_grad=False)
        layer.bias = torch.nn.Parameter(self.bias.to(dtype, copy=True), requires_grad=False)
        return layer


def inputs_of(m: int, k: int, n: int, device: torch.device | str = "cpu") -> Inputs:
    return Inputs(Weights(k, n, torch.device(device)), m)


@dataclass
class Inputs:
    """x float32 [m, k] on the weights' device, and its other forms."""

    weights: Weights
    m: int

    @cached_property
    def x(self) -> Tensor:
        return _gaussian(self.weights.device, 3 * self.weights.seed + 3 + self.m, self.m, self.weights.k)

    @cached_property
    def bf16(self) -> Tensor:
        return self.x.to(torch.bfloat16)

    @cached_property
    def codes(self) -> tuple[Tensor, Tensor]:
        """int8 codes [m, k] and float32 scales [m], symmetric per token."""
        codes, scale, _ = quantize_dynamic(self.x, "per_token")
        return codes, scale

    @cached_property
    def checked(self) -> tuple[Tensor, Tensor]:
        """Up to 1024 rows of m, on the device, and the float64 product x w' of these rows."""
        rows = check_rows(self.m, 1024).to(self.weights.device)
        return rows, self.x[rows].double() @ self.weights.w.double().t()

    def sqnr_db(self, y: Tensor, *, with_bias: bool) -> float:
        """Signal to noise of y [m, n], on the checked rows, against float64, in dB; -inf for a NaN."""
        rows, exact = self.checked
        return sqnr_db(exact + self.weights.bias.double() if with_bias else exact, y[rows])

    def qlinear(self, scheme: QScheme, dtype: torch.dtype) -> tuple[QLinear, Tensor]:
        """The weights as a QLinear, and x in `dtype`; a static scheme has the scale of its largest absolute value."""
        scale = self.x.abs().amax() / scheme.inputs.code_range[1] if scheme.is_static and scheme.inputs else None
        return QLinear.from_float(self.weights.linear(), scheme, input_scale=scale).to(dtype=dtype), self.x.to(dtype)

    @cached_property
    def fp8(self) -> tuple[Tensor, Tensor]:
        """float8_e4m3fn [m, k] and float32 scales [m, 1]."""
        return to_fp8(self.x)


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn of x [rows, k] and the float32 scales [rows, 1] that undo it."""
    scale = x.abs().amax(1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return (x / scale).to(torch.float8_e4m3fn), scale
