"""HadamardLinear: a layer whose inputs are spread over blocks of channels at run time, before they are quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from pyquant import ops
from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS
from pyquant.core.scheme import TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn import foreign_saves
from pyquant.nn.linear_call import needs_derivative
from pyquant.nn.linear_state import traced
from pyquant.nn.nested import each_token
from pyquant.nn.qlinear import QLinear
from pyquant.numerics.hadamard import base_of, hadamard_transform, largest_block, power_scale


class HadamardLinear(nn.Module):
    """y = linear(x T), with T the Hadamard transform of docs/numerics.md 15 in blocks along the channels.

    linear  the layer that multiplies what T gives: nn.Linear, or what it becomes, a QLinear or its simulation.
    block   channels that are mixed: m * 2^k with m one of 1, 12, 20, 28; divides the layer's in_features.
    scale   what the sums of T are multiplied by; None: 1 / sqrt(block), with which T is orthogonal.

    rotate_ makes it of a Linear with weight W around one with weight W T^-1 (transposed), which is the same function;
    the scale is then the power of two next to 1 / sqrt(block), which the quantiser takes for nothing. quantize_, gptq_,
    training and search see that inner layer, `name.linear`; dequantize_ makes a plain Linear of both. T costs some
    log2(block) sums an element, in float32. In front of a QLinear with dynamic inputs one kernel transforms and
    quantises, and the sums are not rounded to the type of x in between; elsewhere T gives the type of x.
    Raises ArgumentError for another layer, a block that is no such number, or a scale that is not finite and above 0.

    Example:
        >>> layer = HadamardLinear.from_linear(nn.Linear(8, 4))
        >>> layer.block, layer(torch.ones(2, 8)).shape
        (8, torch.Size([2, 4]))
    """

    def __init__(self, linear: nn.Linear | QLinear, block: int, scale: float | None = None) -> None:
        super().__init__()
        if not isinstance(linear, (nn.Linear, QLinear)):
            raise ArgumentError("linear", arguments.shown(linear), "a torch.nn.Linear or a QLinear")
        check_block(block, linear.in_features)
        check_scale(scale)
        self.in_features, self.out_features, self.block = linear.in_features, linear.out_features, block
        self.scale, self.linear = scale, linear

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, block: int | None = None) -> HadamardLinear:
        """The function of a Linear, whose weight is copied and turned in float64; its bias is shared.

        block  None: the largest that there is for the Linear's inputs. Raises ArgumentError.

        Example:
            >>> linear, x = nn.Linear(24, 4), torch.randn(2, 24)
            >>> torch.allclose(HadamardLinear.from_linear(linear, 12)(x), linear(x), atol=1e-5)
            True
        """
        if not isinstance(linear, nn.Linear):
            raise ArgumentError("linear", arguments.shown(linear), "a torch.nn.Linear")
        block = largest_block(linear.in_features) if block is None else block
        check_block(block, linear.in_features)
        scale = power_scale(block)
        return cls(linear_behind(linear, block, scale), block, scale).train(linear.training)

    def forward(self, x: Tensor | None = None, residual: Tensor | None = None, *, input: Tensor | None = None) -> Any:
        """The layer. x  float [..., in_features]; residual and input as in QLinear. Raises as QLinear does."""
        x = arguments.x_or_input(x, input)
        if isinstance(x, Proxy):
            return traced(self, x)
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0 or x.shape[-1] != self.in_features:
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else arguments.shown(x)
            raise ArgumentError("x", got, f"a float tensor [..., {self.in_features}]")
        if residual is not None and not isinstance(residual, Tensor):
            raise ArgumentError("residual", arguments.shown(residual), "a Tensor or None")
        if x.is_nested:
            return each_token(self, x, residual)
        inner, has_kernel = self.linear, runs_kernel(x, residual)
        transform = ops.hadamard_transform if has_kernel else hadamard_transform
        inputs = quantised_here(inner, x)
        if inputs is None or not isinstance(inner, QLinear):
            turned = transform(x, self.block, self.scale)
            return inner(turned) if residual is None else inner(turned, residual)
        if not has_kernel or not inner.takes_tokens or x.dim() == 1:
            return inner(transform(x.float(), self.block, self.scale), residual).to(x.dtype)
        codes = ops.hadamard_quantize(x, self.block, inputs.symmetric, *inputs.code_range, self.scale)
        return inner._multiply_tokens(*codes, residual, x.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        foreign_saves.refuse(prefix, foreign_saves.TURNED)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    @property
    def weight(self) -> Tensor:
        """The weight [out_features, in_features] that multiplies x itself, computed at each use."""
        real = self.linear.to_float() if isinstance(self.linear, QLinear) else self.linear
        ones = torch.eye(self.block, dtype=torch.float64, device=real.weight.device)
        columns = hadamard_transform(ones, self.block, self.scale)
        blocks = real.weight.detach().double().unflatten(-1, (-1, self.block))
        return (blocks @ columns.mT).flatten(-2).to(real.weight.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer inside."""
        return self.linear.bias

    def extra_repr(self) -> str:
        """The block in one line, as print(model) shows it."""
        return f"block={self.block}"


def quantised_here(layer: nn.Module, x: Tensor) -> TensorScheme | None:
    """The scheme by which a layer quantises such tokens itself, to give numbers: then it may have them in float32.
    Within autocast it would narrow them first."""
    if not isinstance(layer, QLinear) or layer.scheme.outputs is not None or x.dtype not in FLOATS:
        return None
    narrowed = x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)
    inputs = layer.scheme.inputs
    return inputs if inputs is not None and inputs.dynamic and not narrowed else None


def runs_kernel(x: Tensor, residual: Tensor | None) -> bool:
    """Whether the compiled transform takes such rows: not float64, not where someone asks for derivatives, of whatever
    order, nor rows that a GPU's shared memory cannot hold. There the same sums are PyTorch's operations."""
    if x.dtype not in FLOATS or needs_derivative(x, residual):
        return False
    return ops.holds_row(x.device, x.shape[-1])


@torch.no_grad()
def linear_behind(linear: nn.Linear, block: int, scale: float | None) -> nn.Linear:
    """The Linear that multiplies what the transform gives, so that both are the function of `linear`; its bias."""
    inner = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    turned = turned_weight(linear.weight.double(), block, scale).to(linear.weight.dtype)
    inner.weight, inner.bias = nn.Parameter(turned, linear.weight.requires_grad), linear.bias
    return inner


def turned_weight(weight: Tensor, block: int, scale: float | None) -> Tensor:
    """A weight float64 [..., K] times the transposed inverse of the transform of the inputs: the same matrix, scaled so
    that both scales are 1 / block together."""
    return hadamard_transform(weight, block, None if scale is None else 1.0 / (block * scale))


def check_scale(scale: object) -> None:
    """Raise ArgumentError for what is no scale of a transform."""
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if scale is not None and not (number and 2.0**-126 <= scale <= 2.0**126):  # type: ignore[operator]
        raise ArgumentError("scale", arguments.shown(scale), "a number from 2^-126 to 2^126, or None")


def check_block(block: object, columns: int) -> None:
    """Raise ArgumentError for what is no block of so many columns."""
    whole = isinstance(block, int) and not isinstance(block, bool)
    if not whole or base_of(block) is None or columns % block:  # type: ignore[arg-type,operator]
        allowed = f"m * 2^k that divides the {columns} inputs, with m one of 1, 12, 20, 28"
        raise ArgumentError("block", arguments.shown(block), allowed)
