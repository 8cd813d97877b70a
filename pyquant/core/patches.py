"""Patches: how a convolution becomes a product of rows, one row for each output pixel (im2col)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

from pyquant.core import arguments
from pyquant.core.image_layout import laid_out
from pyquant.errors import ArgumentError

Pair = tuple[int, int]

WIRE_FIELDS: Final = 11


@dataclass(frozen=True)
class Patches:
    """Kernel, stride, padding, dilation and groups of a 2-D convolution; pairs are (height, width).

    padding  zeros around the image: (top, bottom, left, right).
    groups   of channels, each of which has output channels of its own; as many as channels: a depthwise convolution.

    The order within a row is (kernel row, kernel column, channel): that of an image in channels_last memory. The matrix
    of the weights has the channels of one group in a row.
    """

    kernel_size: Pair
    stride: Pair = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @staticmethod
    def of(conv: nn.Conv2d) -> Patches:
        """The geometry of a float convolution (its padding mode is the caller's business)."""
        return Patches.make(conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)

    @staticmethod
    def make(
        kernel_size: object, stride: object = 1, padding: object = 0, dilation: object = 1, groups: object = 1
    ) -> Patches:
        """From the arguments of nn.Conv2d: numbers or pairs; padding also 'valid', 'same' or four numbers.

        Raises ArgumentError naming the argument.
        """
        kernel, steps = _numbers("kernel_size", kernel_size, 2, 1), _numbers("stride", stride, 2, 1)
        spread = _numbers("dilation", dilation, 2, 1)
        if padding == "valid":
            around: tuple[int, ...] = (0, 0, 0, 0)
        elif padding == "same":
            if steps != (1, 1):
                raise ArgumentError("padding", "'same'", f"numbers with stride {steps}")
            total = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
            around = (total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2)
        elif isinstance(padding, (tuple, list)) and len(padding) == 4:
            around = _numbers("padding", padding, 4, 0)
        else:
            rows, columns = _numbers("padding", padding, 2, 0)
            around = (rows, rows, columns, columns)
        count = arguments.whole("groups", groups, 1, 2**31 - 1)
        return Patches((kernel[0], kernel[1]), (steps[0], steps[1]), around, (spread[0], spread[1]), count)  # type: ignore[arg-type]

    def to_ints(self) -> tuple[int, ...]:
        """The geometry as the int[] argument of qconv2d: kernel, stride, padding, dilation, groups."""
        return (*self.kernel_size, *self.stride, *self.padding, *self.dilation, self.groups)

    @staticmethod
    def from_ints(values: Sequence[int]) -> Patches:
        """The inverse of to_ints(). Raises ArgumentError naming `window`, as the op's argument is called."""
        if len(values) != WIRE_FIELDS:
            raise ArgumentError("window", f"{len(values)} integers", f"{WIRE_FIELDS}, as Patches.to_ints() gives")
        for place, value in enumerate(values):
            if not (0 if 4 <= place < 8 else 1) <= value < 2**31:
                raise ArgumentError("window", value, "integers as Patches.to_ints() gives")
        a, b, c, d, top, bottom, left, right, e, f, groups = values
        return Patches((a, b), (c, d), (top, bottom, left, right), (e, f), groups)

    @property
    def pixels(self) -> int:
        """Pixels of one patch."""
        return self.kernel_size[0] * self.kernel_size[1]

    @property
    def is_pointwise(self) -> bool:
        """Whether every pixel is one patch: a product of matrices."""
        return self == Patches((1, 1))

    def out_size(self, height: int, width: int) -> Pair:
        """Height and width of the result. Raises ArgumentError where the kernel is larger than the padded image."""
        top, bottom, left, right = self.padding
        spans = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel_size, strict=True)]
        room = (height + top + bottom, width + left + right)
        if room[0] < spans[0] or room[1] < spans[1]:
            allowed = f"at least {spans[0]} x {spans[1]} with padding"
            raise ArgumentError("x", f"an image of {height} x {width}", allowed)
        return (room[0] - spans[0]) // self.stride[0] + 1, (room[1] - spans[1]) // self.stride[1] + 1

    def gather(self, image: Tensor, fill: Tensor | None = None) -> Tensor:
        """Rows [B * H' * W', kernel height * kernel width * C] of an image [B, H, W, C] of any type.

        fill  what stands in the padding: [1] or one number an image [B]; None: 0. Never read back from its device.
        """
        batch, height, width, channels = image.shape
        out_height, out_width = self.out_size(height, width)
        rows = (batch * out_height * out_width, self.pixels * channels)
        if replace(self, groups=1) == Patches((1, 1)):  # every pixel is one patch
            return image.reshape(rows)
        if any(self.padding):
            image = self._padded(image, fill)
        if 0 in rows or image.numel() == 0:
            return image.new_zeros(rows)
        for axis in (0, 1):  # a window over height, then over width: new last dimensions, no copy
            span = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
            image = image.unfold(1 + axis, span, self.stride[axis])[..., :: self.dilation[axis]]
        return image.permute(0, 1, 2, 4, 5, 3).reshape(rows)

    def rows_of_groups(self, rows: Tensor) -> Tensor:
        """What each group multiplies of the rows that gather gave: [groups, rows, K]."""
        count, per_pixel = rows.shape[0], rows.shape[1] // self.pixels
        split = rows.reshape(count, self.pixels, self.groups, per_pixel // self.groups)
        return split.permute(2, 0, 1, 3).reshape(self.groups, count, self.pixels * (per_pixel // self.groups))

    def _padded(self, image: Tensor, fill: Tensor | None) -> Tensor:
        top, bottom, left, right = self.padding
        batch, height, width, channels = image.shape
        if fill is None:
            return F.pad(image, (0, 0, left, right, top, bottom))
        frame = fill.to(image.dtype).reshape(-1, 1, 1, 1)
        # a sum, as it has a batch under vmap where either of the two has one: what is written to below must
        padded = frame + image.new_zeros(batch, height + top + bottom, width + left + right, channels)
        padded[:, top : top + height, left : left + width] = image
        return padded

    def matrix(self, weight: Tensor) -> Tensor:
        """Weights [N, C / groups, kernel height, kernel width] as the matrix [N, K] that multiplies the rows."""
        return weight.permute(0, 2, 3, 1).reshape(weight.shape[0], weight.shape[1] * self.pixels)

    def image(self, matrix: Tensor, last: bool = False) -> Tensor:
        """The inverse of matrix: [N, K] -> [N, C / groups, kernel height, kernel width]; last: in channels_last."""
        channels = matrix.shape[1] // self.pixels
        return laid_out(matrix.reshape(matrix.shape[0], *self.kernel_size, channels).permute(0, 3, 1, 2), last)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The float convolution of this geometry: x [B, C, H, W], weight [N, C / groups, kernel height, width]."""
        top, bottom, left, right = self.padding
        padded = F.pad(x, (left, right, top, bottom))
        return F.conv2d(padded, weight, bias, self.stride, 0, self.dilation, self.groups)

    def convolve_backward(self, grad: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
        """The gradient of convolve for x [(B,) C, H, W] of a shape, from that of its result."""
        top, bottom, left, right = self.padding
        height, width = shape[-2:]
        images = grad if grad.dim() == 4 else grad.unsqueeze(0)
        size = (images.shape[0], shape[-3], height + top + bottom, width + left + right)
        padded = conv2d_input(size, weight, images, self.stride, 0, self.dilation, self.groups)
        return padded[..., top : top + height, left : left + width].reshape(shape)

    def float_padding(self) -> Pair | str:
        """The padding as nn.Conv2d spells it. Raises ArgumentError where it cannot."""
        top, bottom, left, right = self.padding
        if top == bottom and left == right:
            return top, left
        if self.stride == (1, 1) and Patches.make(self.kernel_size, 1, "same", self.dilation, self.groups) == self:
            return "same"
        raise ArgumentError("padding", self.padding, "equal on opposite sides, or 'same': nn.Conv2d knows no other")


def _numbers(name: str, value: object, count: int, least: int) -> tuple[int, ...]:
    values: tuple[Any, ...] = tuple(value) if isinstance(value, (tuple, list)) else (value,) * count
    if len(values) != count or any(isinstance(v, bool) or not isinstance(v, int) or v < least for v in values):
        raise ArgumentError(name, repr(value)[:80], f"a whole number >= {least}, or {count} of them")
    return values
