"""A Linear whose rounding has learned bits: the layer of LearnedPrecision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant.simulate.linear import plain_linear

if TYPE_CHECKING:
    from typing_extensions import Self

LEVELS: Final = (4, 8, 16)


class LearnedBits(nn.Module):
    """Rounds to multiples of a learned step d within a learned limit x_max, both in units of the largest magnitude
    of each row (a token, an output channel) or, for static inputs, of all: x_max = 1 and d = 1 / 127 is a per-row
    scheme of 8 bits.

    Both are held as logarithms, which keeps them positive. Source: Uhlich et al. 2020, arXiv:1905.11452, the case U3
    with step and limit as the free pair."""

    def __init__(self, bits: int, per_row: bool, device: torch.device) -> None:
        super().__init__()
        self.per_row = per_row
        codes = 2 ** (bits - 1) - 1
        self.log_limit = nn.Parameter(torch.zeros((), dtype=torch.float32, device=device))
        self.log_step = nn.Parameter(torch.full((), -math.log2(codes), dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """x float [..., K] -> the same shape and type."""
        real = x.float()
        magnitudes = real.detach().abs()
        amax = (magnitudes.amax(-1, keepdim=True) if self.per_row else magnitudes.amax()).clamp_min(1e-30)
        step, limit = amax * self.log_step.exp2(), amax * self.log_limit.exp2()
        ratio = real / step
        inside = step * (ratio + (torch.round(ratio) - ratio).detach())
        return torch.where(real.abs() <= limit, inside, torch.sign(real) * limit).to(x.dtype)

    def real_bits(self) -> Tensor:
        """log2(x_max / d + 1) + 1."""
        return torch.log2((self.log_limit - self.log_step).exp2() + 1) + 1

    def bits(self) -> Tensor:
        """ceil(log2(x_max / d + 1)) + 1, differentiable straight through the ceil."""
        real = self.real_bits()
        # log2(2^k - 1 + 1) must not become k + 1 by a rounding error
        return real + (torch.ceil(real - 1e-4) - real).detach()


class LearnedBitsLinear(nn.Linear):
    """A Linear whose weights, and inputs if wanted, go through LearnedBits; made by LearnedPrecision."""

    weight_bits: LearnedBits
    input_bits: LearnedBits
    learn_inputs: bool

    @classmethod
    def of(cls, linear: nn.Linear, bits: int, learn_inputs: bool, dynamic: bool) -> Self:
        """Around the parameters of a Linear. Inputs that are not learned keep 8 bits."""
        layer: Any = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.weight_bits = LearnedBits(bits, True, linear.weight.device)
        layer.input_bits = LearnedBits(bits if learn_inputs else 8, dynamic, linear.weight.device)
        layer.learn_inputs = learn_inputs
        layer.input_bits.requires_grad_(learn_inputs)
        return layer.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """x float [..., in_features] -> float [..., out_features]."""
        return F.linear(self.input_bits(x), self.weight_bits(self.weight), self.bias)

    def bit_parameters(self) -> list[nn.Parameter]:
        """What is learned about the bits."""
        return [*self.weight_bits.parameters(), *(self.input_bits.parameters() if self.learn_inputs else ())]

    def layer_bits(self) -> Tensor:
        """The bits that the layer costs: of the weights; of the inputs where they are learned and more."""
        bits = self.weight_bits.bits()
        return torch.maximum(bits, self.input_bits.bits()) if self.learn_inputs else bits

    @torch.no_grad()
    def wanted_bits(self) -> float:
        """layer_bits before they are rounded up: distinguishes layers that are rounded up to the same number."""
        bits = [self.weight_bits.real_bits(), *([self.input_bits.real_bits()] if self.learn_inputs else [])]
        return max(float(b) for b in bits)

    @torch.no_grad()
    def bits_now(self) -> tuple[int, int]:
        """(bits of weights, bits of inputs), whole numbers."""
        return round(float(self.weight_bits.bits())), round(float(self.input_bits.bits()))

    def to_float(self) -> nn.Linear:
        """The plain Linear again, around the same parameters."""
        return plain_linear(self)
