"""FakeQuantConv2d: a float convolution that rounds weights and inputs as its integer twin will."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pyquant.core.image_layout import laid_out, lies_last
from pyquant.core.patches import Patches
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn.patches import unsupported
from pyquant.nn.qconv import QConv2d
from pyquant.simulate import torch_operators
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.layer import SimulatedLayer

if TYPE_CHECKING:
    from typing_extensions import Self

_SHAPE = (
    "in_channels",
    "out_channels",
    "kernel_size",
    "stride",
    "padding",
    "dilation",
    "transposed",
    "output_padding",
    "groups",
    "padding_mode",
    "_reversed_padding_repeated_twice",
)


class FakeQuantConv2d(SimulatedLayer, nn.Conv2d):
    """y = conv2d(fake_quantize(x), fake_quantize(W)) + bias, in floating point, around the float layer's own
    parameters.

    Weight scales are per output channel over K = kernel height * kernel width * in_channels / groups (or per group
    along K in that order); a dynamic input has one range an image.

    Example:
        >>> from pyquant.core.presets import W8A8Dynamic
        >>> layer = FakeQuantConv2d.from_float(nn.Conv2d(3, 4, 3), W8A8Dynamic())
        >>> layer.to_quantized().scheme == layer.scheme
        True
    """

    patches: Patches

    @classmethod
    def from_float(cls, conv: nn.Conv2d, scheme: QScheme) -> Self:
        """A simulating layer around the parameters of a Conv2d (shared, not copied): padding mode 'zeros',
        finite weights; not of a 16-bit scheme, which has nothing to simulate (ArgumentError)."""
        why_not = unsupported(conv)
        if why_not is not None:
            raise ArgumentError("conv", why_not, "padding_mode 'zeros'")
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.__dict__.update((name, getattr(conv, name)) for name in _SHAPE)
        layer.weight, layer.bias, layer.patches = conv.weight, conv.bias, Patches.of(conv)
        layer._simulate(scheme, layer.patches.matrix(layer.weight.detach()))
        for fake in layer.fake_quantizers().values():
            fake.has_rows = False
        return layer.train(conv.training)

    def forward(self, input: Tensor) -> Tensor:
        """input float [B, in_channels, H, W] (or without B) -> float [B, out_channels, H', W']."""
        x = _rounded(self.input_fake_quant, input)
        return _rounded(self.output_fake_quant, self._conv_forward(x, self._rounded_weight(), self.bias))

    def _rounded_weight(self) -> Tensor:
        """The weights [N, C, kh, kw] as their codes mean them, which are codes of the matrix [N, K]."""
        fake = self.weight_fake_quant
        if torch_operators.are_chosen() and fake.scheme.granularity != "per_group":
            rounded: Tensor = fake(self.weight)  # exporters look for the operator right at the weights
            return rounded
        if lies_last(self.weight):
            return self.patches.image(fake(self.patches.matrix(self.weight)), last=True)
        if 1 in (self.patches.pixels, self.in_channels // self.groups):  # the order of both: gradients lie alike, too
            return fake(self.weight.flatten(1)).view(self.weight.shape)
        return self.patches.image(fake(self.patches.matrix(self.weight)))

    @torch.no_grad()
    def to_quantized(self) -> QConv2d:
        """The integer layer, with the codes of the weights that forward rounds to. ArgumentError: not calibrated."""
        layer = QConv2d.from_codes(**self.codes_of(self.patches.matrix(self.weight)), patches=self.patches)
        layer._weight_lies_last = lies_last(self.weight)
        return layer.train(self.training)

    def to_float(self) -> nn.Conv2d:
        """The plain Conv2d again, around the same parameters."""
        conv = nn.Conv2d.__new__(nn.Conv2d)
        nn.Module.__init__(conv)
        conv.__dict__.update((name, getattr(self, name)) for name in _SHAPE)
        conv.weight, conv.bias = self.weight, self.bias
        return conv.train(self.training)


def _rounded(fake: FakeQuantize | None, x: Tensor) -> Tensor:
    """Images as their codes mean them, stored as they were: a range knows no order."""
    if fake is None:
        return x
    last = lies_last(x)
    lying = x.permute(0, 2, 3, 1) if last else x
    if fake.scheme.dynamic:
        rows = x.shape[0] if x.dim() == 4 else 1
        rounded = fake(lying.reshape(rows, x.shape[-3:].numel())).reshape(lying.shape)
    else:
        rounded = fake(lying)
    rounded = rounded.permute(0, 3, 1, 2) if last else rounded
    # a graph for exporters has the rounding right before the convolution
    return rounded if x.dim() != 4 or torch_operators.are_chosen() else laid_out(rounded, last)
