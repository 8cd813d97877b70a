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
from pyquant.nn.linear_call import needs_derivative
from pyquant.nn.linear_state import traced
from pyquant.nn.qlinear import QLinear
from pyquant.numerics.hadamard import base_of, hadamard_transform, largest_block


class HadamardLinear(nn.Module):
    """y = linear(x T), with T the Hadamard transform of docs/numerics.md 15 in blocks along the channels.

    linear  the layer that multiplies what T gives: nn.Linear, or what it becomes, a QLinear or its simulation.
    block   channels that are mixed: m * 2^k with m one of 1, 12, 20, 28; divides the layer's in_features.

    rotate_ makes it of a Linear with weight W around one with weight W T, which is the same function; quantize_, gptq_,
    training, search and dequantize_ see that inner layer, `name.linear`. T costs some log2(block) sums an element, in
    float32. In front of a QLinear with dynamic inputs one kernel transforms and quantises, and the sums are not rounded
    to the type of x in between; elsewhere T gives the type of x.
    Raises ArgumentError for another layer, or a block that is no such number.

    Example:
        >>> layer = HadamardLinear.from_linear(nn.Linear(8, 4))
        >>> layer.block, layer(torch.ones(2, 8)).shape
        (8, torch.Size([2, 4]))
    """

    def __init__(self, linear: nn.Linear | QLinear, block: int) -> None:
        super().__init__()
        if not isinstance(linear, (nn.Linear, QLinear)):
            raise ArgumentError("linear", arguments.shown(linear), "a torch.nn.Linear or a QLinear")
        check_block(block, linear.in_features)
        self.in_features, self.out_features, self.block = linear.in_features, linear.out_features, block
        self.linear = linear

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
        inner = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        turned = hadamard_transform(linear.weight.double(), block).to(linear.weight.dtype)
        inner.weight, inner.bias = nn.Parameter(turned, linear.weight.requires_grad), linear.bias
        return cls(inner, block).train(linear.training)

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
        inner, has_kernel = self.linear, runs_kernel(x, residual)
        transform = ops.hadamard_transform if has_kernel else hadamard_transform
        inputs = quantised_here(inner, x)
        if inputs is None or not isinstance(inner, QLinear):
            turned = transform(x, self.block)
            return inner(turned) if residual is None else inner(turned, residual)
        if not has_kernel or not inner.takes_tokens or x.dim() == 1:
            return inner(transform(x.float(), self.block), residual).to(x.dtype)
        codes = ops.hadamard_quantize(x, self.block, inputs.symmetric, *inputs.code_range)
        return inner._multiply_tokens(*codes, residual, x.dtype)

    @property
    def weight(self) -> Tensor:
        """The weight [out_features, in_features] that multiplies x itself, computed at each use: W = (W T) T^-1."""
        real = self.linear.to_float() if isinstance(self.linear, QLinear) else self.linear
        columns = hadamard_transform(torch.eye(self.block, dtype=torch.float64, device=real.weight.device), self.block)
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


def check_block(block: object, columns: int) -> None:
    """Raise ArgumentError for what is no block of so many columns."""
    whole = isinstance(block, int) and not isinstance(block, bool)
    if not whole or base_of(block) is None or columns % block:  # type: ignore[arg-type,operator]
        allowed = f"m * 2^k that divides the {columns} inputs, with m one of 1, 12, 20, 28"
        raise ArgumentError("block", arguments.shown(block), allowed)
