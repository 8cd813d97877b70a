"""How images [B, C, H, W] lie in memory: channels first or last, by the rule of torch's convolutions."""

from __future__ import annotations

import torch
from torch import Tensor


def lies_last(x: Tensor) -> bool:
    """Whether torch's convolutions take a tensor for channels_last, and then give such results.

    x   an image [B, C, H, W], or the weights [N, C, height, width] of a convolution; False for other numbers of
        dimensions.

    Parts of such an image count, too (channels, a crop): strides decide, from the innermost dimension outwards, and
    those of sizes of 1 take part in it. False inside of torch.func, where the strides are unknown; a trace asks for a
    whole image. Source: c10/core/MemoryFormat.h, is_channels_last_strides_2d.

    Example:
        >>> x = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
        >>> lies_last(x[:, :2]), lies_last(x.contiguous())
        (True, False)
    """
    if x.dim() != 4 or x.layout != torch.strided:
        return False
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    strides = x.stride()
    if strides[1] == 0:
        return False
    least = 0
    for d in (1, 3, 2, 0):
        if x.shape[d] == 0 or strides[d] < least or (d == 0 and least == strides[1]):
            return False
        least = strides[d] * x.shape[d]
    return True


def laid_out(x: Tensor, last: bool) -> Tensor:
    """An image in whole rows, channels last or first, with the strides that torch gives to a new one.

    contiguous() leaves the strides of sizes of 1 as they are, which torch reads as one or the other.
    """
    if last:
        lying = x.permute(0, 2, 3, 1)
        return lying.contiguous().reshape(-1).view(lying.shape).permute(0, 3, 1, 2)
    return x.contiguous().reshape(-1).view(x.shape)
