"""QConv2d: a convolution in integers: quantise an image once, multiply what lies under each window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.dtypes import FLOATS, describe, dtype_name
from pyquant.core.image_layout import laid_out, lies_last
from pyquant.core.patches import Pair, Patches
from pyquant.core.presets import W8A8Dynamic
from pyquant.core.qtensor import QTensor
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.errors import ArgumentError
from pyquant.nn import state, straight_through, weights
from pyquant.nn.linear_call import LinearCall, needs_derivative, signed, unpacked
from pyquant.nn.linear_codes import check_matrix
from pyquant.nn.patches import unsupported
from pyquant.ops.rows_layout import BLOCKED
from pyquant.ops.spec import LinearSpec
from pyquant.ops.transforms import autocast

_qconv2d = torch.ops.pyquant.qconv2d.default


class QConv2d(LinearCall):
    """y = activation(conv2d(x, W) + bias) + residual, with W quantised as `scheme` says; zero padding.

    in_channels, out_channels, kernel_size, stride, padding, dilation, bias, device   as in torch.nn.Conv2d; padding
                also as (top, bottom, left, right).
    scheme      QScheme. Weight scales are per output channel over K = kernel height * kernel width * in_channels /
                groups, or per group along K in that order. Static inputs have one scale; dynamic inputs one scale for
                each image.
    activation, clamp, dtype   as in QLinear.
    groups      as in torch.nn.Conv2d; in_channels for a depthwise convolution.

    The state is that of a QLinear with in_features = K: `weight` int8 [out_channels, K] (4 bits: `weight_packed`),
    `weight_scale`, `bias`, `input_scale`, ... Raises SchemeError, ArgumentError. Source: docs/numerics.md 11.

    Example:
        >>> layer = QConv2d.from_float(nn.Conv2d(3, 8, 3, padding=1), W8A8Dynamic())
        >>> layer(torch.zeros(2, 3, 6, 6)).shape
        torch.Size([2, 8, 6, 6])
    """

    in_channels: int
    out_channels: int
    patches: Patches

    _weight_lies_last = False  # the float layer's did: torch then gives channels_last results, whatever the image
    _packs_results = False  # neighbours in memory are pixels or channels, as the layout says

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, int] = 1,
        bias: bool = True,
        scheme: QScheme | None = None,
        activation: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        clamp: tuple[float, float] | None = None,
        groups: int = 1,
    ) -> None:
        super().__init__()
        patches = Patches.make(kernel_size, stride, padding, dilation, groups)
        arguments.whole("in_channels", in_channels, 0, 2**31 - 1)
        arguments.whole("out_channels", out_channels, 0, 2**31 - 1)
        if in_channels % groups or out_channels % groups:
            what = f"{groups}, for {in_channels} and {out_channels} channels"
            raise ArgumentError("groups", what, "a divisor of in_channels and of out_channels")
        features = in_channels // groups * patches.pixels
        scheme = W8A8Dynamic() if scheme is None else scheme
        self.in_channels, self.out_channels, self.patches = in_channels, out_channels, patches
        self._describe(features, out_channels, arguments.flag("bias", bias), scheme, activation, clamp, dtype)
        self._fill(state.fresh(self.state_slots, state.device_of(device)))

    @classmethod
    def from_float(
        cls,
        conv: nn.Conv2d,
        scheme: QScheme,
        *,
        input_scale: float | Tensor | None = None,
        input_zero_point: int | Tensor | None = None,
        output_scale: float | Tensor | None = None,
        output_zero_point: int | Tensor | None = None,
        activation: str | None = None,
        clamp: tuple[float, float] | None = None,
    ) -> QConv2d:
        """A QConv2d with the weights of a float Conv2d, their ranges by the scheme's calibrator.

        conv   nn.Conv2d, padding mode 'zeros', finite; not changed.   Others as in QLinear.from_float.
        Raises SchemeError for a group size that does not divide K, ArgumentError naming what is wrong.

        Example:
            >>> layer = QConv2d.from_float(nn.Conv2d(4, 2, 1), W8A8Dynamic())
            >>> layer.weight.shape, layer.codes.shape
            (torch.Size([2, 4, 1, 1]), torch.Size([2, 4]))
        """
        if not isinstance(conv, nn.Conv2d):
            raise ArgumentError("conv", type(conv).__name__, "a torch.nn.Conv2d")
        why_not = unsupported(conv)
        if why_not is not None:
            raise ArgumentError("conv", why_not, "padding_mode 'zeros'")
        layout = Patches.of(conv)
        layer = cls._from_matrix(
            layout.matrix(conv.weight.detach()),
            conv,
            scheme,
            patches=layout,
            input_scale=input_scale,
            input_zero_point=input_zero_point,
            output_scale=output_scale,
            output_zero_point=output_zero_point,
            activation=activation,
            clamp=clamp,
        )
        layer._weight_lies_last = lies_last(conv.weight)
        return layer

    def _lay_out(self, codes: Tensor, patches: Patches | None = None) -> None:  # type: ignore[override]
        if not isinstance(patches, Patches):
            raise ArgumentError("patches", arguments.shown(patches), "a Patches, such as Patches.of(conv)")
        check_matrix(codes, f"a tensor [out_channels, {patches.pixels} * in_channels / groups]", patches.pixels)
        if codes.shape[0] % patches.groups:
            raise ArgumentError("patches", f"{patches.groups} groups", f"a divisor of {codes.shape[0]} output channels")
        self.in_channels = codes.shape[1] // patches.pixels * patches.groups
        self.out_channels = codes.shape[0]
        self.patches = patches

    def _layout_on(self, device: torch.device, spec: LinearSpec) -> str:
        layout = super()._layout_on(device, spec)
        return "rows" if self.patches.groups > 1 and layout == BLOCKED else layout  # as kernels for groups read them

    def to_float(self, dtype: torch.dtype | None = None) -> nn.Conv2d:
        """A torch.nn.Conv2d with the dequantised weights and the bias; the activation is not part of it."""
        p = self.patches
        conv = nn.Conv2d(
            self.in_channels,
            self.out_channels,
            p.kernel_size,
            p.stride,
            p.float_padding(),
            p.dilation,
            p.groups,
            bias=self.bias_ is not None,
            device="meta",
        )
        filled = self._filled(conv, weights.float_type(dtype, self.dtype))
        if self._weight_lies_last:
            filled.weight.data = laid_out(filled.weight.data, True)
        return filled

    # ---- running

    def forward(
        self,
        x: Tensor | QTensor | None = None,
        residual: Tensor | None = None,
        *,
        input: Tensor | QTensor | None = None,
    ) -> Any:
        """The convolution.

        x         float32, float16 or bfloat16 [B, in_channels, H, W] (or without B), or a QTensor of codes: of its own
                  input scale for a static layer, with one scale or one an image for a dynamic layer.
        residual  float [B, out_channels, H', W'], added after the activation; or None.
        input     x by the name that it has in torch's layer.
        ->        [B, out_channels, H', W'] in x's type (`dtype` for codes), or a QTensor where the scheme has outputs;
                  channels_last where x is, which spares two transpositions, or where the float layer's weights were
                  when it was quantised, as torch has it.
        Gradients flow to float x and residual as in QLinear. Raises ArgumentError, UnsupportedError.
        """
        x = arguments.x_or_input(x, input)
        return self._forward_general(autocast(x) if isinstance(x, Tensor) else x, residual)

    def _run(self, x: Tensor | QTensor, residual: Tensor | None, storage: Tensor) -> Tensor:
        if isinstance(x, QTensor):
            x = unpacked(x)
            if not self.scheme.is_integer:
                raise ArgumentError("x", "a QTensor", f"a float tensor: scheme {self.scheme} does not take codes")
            self._check_parts(x)
            data = x.data
            self._check_image(data, (torch.int8, torch.uint8))
        else:
            data = x
            self._check_image(data, FLOATS)
        is_batch = data.dim() == 4
        images = data if is_batch else data.unsqueeze(0)
        last = self._weight_lies_last or lies_last(images)
        if last:
            images = images.contiguous(memory_format=torch.channels_last)
        size = (images.shape[0], *self.patches.out_size(images.shape[2], images.shape[3]))
        self._check_residual(residual, size, is_batch)
        if residual is not None and not is_batch:
            residual = residual.unsqueeze(0)
        if self.scheme.is_integer:
            y = self._integer(x, images, size, residual, storage)
        elif self.patches.groups > 1 or (needs_derivative(images, residual) and straight_through.is_transformed()):
            y = straight_through.smooth(self, images, residual)  # torch's own convolution, of images
        else:
            y = self._as_image(self._forward_float(*self._rows(images, None, residual, size)), size)
        if lies_last(y) != last:  # else nothing: in a graph, what follows is right behind the product
            y = laid_out(y, last)
        return y if is_batch else y.squeeze(0)

    def _integer(
        self, x: Tensor | QTensor, images: Tensor, size: tuple[int, int, int], residual: Tensor | None, storage: Tensor
    ) -> Tensor:
        fixed = (storage, residual, self._spec, self._window)
        if isinstance(x, Tensor):
            return cast(Tensor, _qconv2d(images, *fixed))
        codes, zero_point = signed(QTensor(images, x.scale, x.zero_point))
        dtype = None if self._gives_codes else self.dtype
        if self.scheme.is_static:
            self._check_linked(x, zero_point)
            return cast(Tensor, _qconv2d(codes, *fixed, dtype))
        if x.scale.numel() not in (1, images.shape[0]):
            raise ArgumentError("x.scale", list(x.scale.shape), f"one number, or one an image: [{images.shape[0]}]")
        if zero_point is None or not cast(TensorScheme, self.scheme.inputs).symmetric:
            of_images = None if zero_point is None else _each(zero_point, size[0])
            return cast(Tensor, _qconv2d(codes, *fixed, dtype, _each(x.scale, size[0]), of_images))
        # The packed weights multiply what their own quantiser could have made: these codes have a zero point beyond it.
        if self.patches.groups > 1:
            affine = replace(LinearSpec.from_ints(self._spec), x_symmetric=False, x_qmin=-128, x_qmax=127)
            fixed = (storage, residual, affine.to_ints(), self._window)
            return cast(Tensor, _qconv2d(codes, *fixed, dtype, _each(x.scale, size[0]), _each(zero_point, size[0])))
        rows, added = self._rows(codes, zero_point, residual, size)
        scales, zeros = (_each(v, size[0]).repeat_interleave(size[1] * size[2]) for v in (x.scale, zero_point))
        return self._as_image(self._product(rows, scales, zeros, added, self.dtype, storage), size)

    # nn.Conv2d's own names, which models read: those that pad images themselves (MobileNet), for one
    @property
    def kernel_size(self) -> Pair:
        """(height, width)."""
        return self.patches.kernel_size

    @property
    def stride(self) -> Pair:
        """(height, width)."""
        return self.patches.stride

    @property
    def dilation(self) -> Pair:
        """(height, width)."""
        return self.patches.dilation

    @property
    def groups(self) -> int:
        """Of channels."""
        return self.patches.groups

    @property
    def padding(self) -> tuple[int, ...]:
        """(height, width) where opposite sides have the same, otherwise (top, bottom, left, right)."""
        top, bottom, left, right = self.patches.padding
        return (top, left) if (top, left) == (bottom, right) else self.patches.padding

    @property
    def padding_mode(self) -> str:
        """'zeros', the only one."""
        return "zeros"

    @property
    def _window(self) -> tuple[int, ...]:
        return self.patches.to_ints()

    def _rows(
        self, images: Tensor, fill: Tensor | None, residual: Tensor | None, size: tuple[int, int, int]
    ) -> tuple[Tensor, Tensor | None]:
        """Patches of the images, and the rows of the residual that belong to them."""
        rows = self.patches.gather(images.permute(0, 2, 3, 1), fill)
        if residual is None:
            return rows, None
        return rows, residual.permute(0, 2, 3, 1).reshape(size[0] * size[1] * size[2], self.out_channels)

    def _as_image(self, y: Tensor, size: tuple[int, int, int]) -> Tensor:
        return y.reshape(*size, self.out_channels).permute(0, 3, 1, 2)

    def _check_image(self, x: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        is_image = x.dim() in (3, 4) and x.shape[-3] == self.in_channels
        if not is_image or x.dtype not in dtypes or x.layout != torch.strided:
            names = " or ".join(dtype_name(dtype) for dtype in dtypes)
            raise ArgumentError("x", describe(x), f"{names} [B, {self.in_channels}, H, W], dense")
        self._check_device(x)

    def _check_call(self, x: object, residual: object) -> None:
        self._check_ready(x, residual)
        if isinstance(x, QTensor):
            x = unpacked(x)
            self._check_parts(x)
        data = x.data if isinstance(x, QTensor) else cast(Tensor, x)
        self._check_image(data, (torch.int8, torch.uint8) if isinstance(x, QTensor) else FLOATS)
        batch = (data.shape[0] if data.dim() == 4 else 1, *self.patches.out_size(data.shape[-2], data.shape[-1]))
        self._check_residual(cast("Tensor | None", residual), batch, data.dim() == 4)

    def _check_residual(self, residual: Tensor | None, size: tuple[int, int, int], is_batch: bool) -> None:
        if residual is None:
            return
        shape = [size[0], self.out_channels, *size[1:]][0 if is_batch else 1 :]
        if list(residual.shape) != shape:
            raise ArgumentError("residual", describe(residual), f"float {shape}")

    def _sizes(self) -> list[str]:
        p = self.patches
        words = [f"{self.in_channels}, {self.out_channels}, kernel_size={p.kernel_size}, stride={p.stride}"]
        words += [f"padding={p.padding}"] if any(p.padding) else []
        words += [f"dilation={p.dilation}"] if p.dilation != (1, 1) else []
        return words + ([f"groups={p.groups}"] if p.groups != 1 else [])


def _each(qparam: Tensor, images: int) -> Tensor:
    """One number an image (or one for all) as one an image."""
    return qparam.reshape(-1).expand(images)
