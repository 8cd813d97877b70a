"""Residual blocks of ResNets with a quantised identity branch, added in the kernel of the last convolution."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pyquant.errors import ArgumentError
from pyquant.nn.chain import QResidualAdd
from pyquant.nn.fuse_rules import register_fusion

_FORM = "a block like torchvision's, its BatchNorms folded (fold_batch_norm_), with a ReLU after the sum"


class QuantBasicBlock(nn.Module):
    """conv2(relu(conv1(x))) + identity(x), and ReLU: two 3 x 3 convolutions, the sum in the kernel of the second.

    Made of a float block by SelectiveQuantizer (register_quantization_mapping) or directly:
    block  a module with conv1 and conv2 (and, where the shape changes, `downsample` or `shortcut`), as torchvision's
           BasicBlock has them, in floating point, BatchNorms folded. Its parameters are shared. The identity, or what
           the shortcut makes of it, is quantised with a scale of its own (pyquant.Residual inside of QResidualAdd).
    Raises ArgumentError naming what the block lacks, or a BatchNorm that is not folded.
    Source: docs/selective.md; the guide's "quantize residual connections separately by replacing blocks".

    Example:
        >>> import torch
        >>> class BasicBlock(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(4, 4, 3, 1, 1)
        ...         self.relu, self.downsample = nn.ReLU(), None
        >>> QuantBasicBlock(BasicBlock())(torch.ones(1, 4, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        first, last = _convolutions(block, "conv1", "conv2")
        self.conv1, self.relu = first, nn.ReLU()
        self.conv2 = QResidualAdd(last, "relu")
        self.shortcut = _shortcut(block)

    def forward(self, x: Tensor) -> Tensor:
        """x float [B, C, H, W] -> float [B, C', H', W']."""
        y: Tensor = self.conv2(self.relu(self.conv1(x)), self.shortcut(x))
        return y


class QuantBottleneck(nn.Module):
    """conv3(relu(conv2(relu(conv1(x))))) + identity(x), and ReLU: 1 x 1, 3 x 3, 1 x 1, the sum in the last's kernel.

    block  as for QuantBasicBlock, with conv1, conv2 and conv3, as torchvision's Bottleneck has them.
    Raises ArgumentError as QuantBasicBlock does.

    Example:
        >>> import torch
        >>> class Bottleneck(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.conv1, self.conv2 = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 2, 3, 1, 1)
        ...         self.conv3 = nn.Conv2d(2, 8, 1)
        >>> QuantBottleneck(Bottleneck())(torch.ones(1, 8, 5, 5)).shape
        torch.Size([1, 8, 5, 5])
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv2, last = _convolutions(block, "conv1", "conv2", "conv3")
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.conv3 = QResidualAdd(last, "relu")
        self.shortcut = _shortcut(block)

    def forward(self, x: Tensor) -> Tensor:
        """x float [B, C, H, W] -> float [B, C', H', W']."""
        y: Tensor = self.conv3(self.relu2(self.conv2(self.relu1(self.conv1(x)))), self.shortcut(x))
        return y


register_fusion(QuantBasicBlock, "conv1", "relu")
register_fusion(QuantBottleneck, "conv1", "relu1")
register_fusion(QuantBottleneck, "conv2", "relu2")


def _convolutions(block: nn.Module, *names: str) -> list[Any]:
    """The layers of a block by name. Raises ArgumentError where the block is of another form."""
    if not isinstance(block, nn.Module):
        raise ArgumentError("block", type(block).__name__, _FORM)
    kind = type(block).__name__
    missing = [name for name in names if not isinstance(getattr(block, name, None), nn.Module)]
    if missing:
        raise ArgumentError("block", f"a {kind} without {', '.join(missing)}", _FORM)
    if hasattr(block, "conv3") and "conv3" not in names:
        raise ArgumentError("block", f"a {kind} with a third convolution", "QuantBottleneck for it")
    norms = [name for name, module in block.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        raise ArgumentError("block", f"a {kind} with BatchNorm in {', '.join(norms)}", _FORM)
    other = [m for m in block.children() if isinstance(m, (nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Hardswish, nn.ReLU6))]
    if other:
        raise ArgumentError("block", f"a {kind} with {type(other[0]).__name__}", _FORM)
    return [getattr(block, name) for name in names]


def _shortcut(block: nn.Module) -> nn.Module:
    found = (getattr(block, name, None) for name in ("downsample", "shortcut"))
    return next((module for module in found if isinstance(module, nn.Module)), nn.Sequential())  # the identity
