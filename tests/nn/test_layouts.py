"""A convolution's result lies in memory as the float layer's does: models read it with view, and speed hangs on it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyquant
from pyquant.simulate.calibrate import calibrate_

# Batch, channels, height and width of the image; output channels, kernel size, stride, groups.
SHAPES = [
    (2, 3, 8, 8, 4, 1, 1, 1),
    (1, 4, 8, 8, 8, 1, 2, 1),
    (2, 8, 8, 8, 8, 3, 1, 8),
    (2, 8, 8, 8, 8, 1, 1, 8),
    (2, 6, 8, 8, 4, 3, 2, 2),
    (2, 4, 8, 8, 8, 3, 1, 1),
    (2, 1, 8, 8, 4, 3, 1, 1),
    (2, 4, 8, 8, 1, 3, 1, 1),
    (1, 1, 8, 8, 1, 1, 1, 1),
    (2, 4, 1, 1, 8, 1, 1, 1),
    (2, 4, 1, 1, 1, 1, 1, 1),
    (2, 4, 3, 3, 8, 3, 1, 1),
    (2, 4, 8, 1, 8, 1, 1, 1),
]


def _calibrated(model: nn.Module, x: Tensor) -> None:
    pyquant.insert_fake_quantize_(model, "W8A8")
    calibrate_(model, [x], 1)


def _float_again(model: nn.Module, _: Tensor) -> None:
    pyquant.quantize_(model, "W8A8Dynamic", check_speed=False)
    pyquant.dequantize_(model)


WAYS: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "dynamic": lambda model, _: pyquant.quantize_(model, "W8A8Dynamic", check_speed=False),
    "static": lambda model, x: pyquant.quantize_(model, "W8A8", data=[x], check_speed=False),
    "weight-only": lambda model, _: pyquant.quantize_(model, "W8A16", check_speed=False),
    "simulated, dynamic": lambda model, _: pyquant.prepare_qat_(model, "W8A8Dynamic"),
    "simulated, static": _calibrated,
    "float again": _float_again,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("last", [False, True], ids=["channels-first", "channels-last"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("way", WAYS)
def test_results_lie_as_those_of_the_float_layer(
    way: str, shape: tuple[int, ...], last: bool, dtype: torch.dtype
) -> None:
    batch, channels, height, width, outputs, kernel, stride, groups = shape
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, outputs, kernel, stride=stride, groups=groups).to(dtype).eval()
    x = torch.randn(batch, channels, height, width).to(dtype)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    model = nn.Sequential(copy.deepcopy(conv))
    WAYS[way](model, x)
    expected, y = conv(x), model(x)
    assert y.shape == expected.shape
    assert y.stride() == expected.stride()


# Images as models cut them out of others.
PARTS: dict[str, Callable[[], Tensor]] = {
    "channels": lambda: torch.randn(2, 48, 8, 8).to(memory_format=torch.channels_last)[:, :24],
    "crop": lambda: torch.randn(2, 24, 10, 10).to(memory_format=torch.channels_last)[:, :, 1:9, 1:9],
    "every second": lambda: torch.randn(2, 24, 16, 16).to(memory_format=torch.channels_last)[:, :, ::2, ::2],
    "every second image": lambda: torch.randn(4, 24, 8, 8).to(memory_format=torch.channels_last)[::2],
    "crop, channels first": lambda: torch.randn(2, 24, 10, 10)[:, :, 1:9, 1:9],
    "permuted": lambda: torch.randn(2, 8, 8, 24).permute(0, 3, 1, 2),
    "rows and columns exchanged": lambda: torch.randn(2, 24, 8, 8).transpose(2, 3),
    "batch outside": lambda: torch.randn(8, 2, 8, 24).permute(1, 3, 0, 2),
    "one image, odd stride": lambda: torch.randn(4704).as_strided((1, 24, 14, 14), (24, 1, 336, 24)),
    "one pixel": lambda: torch.randn(2, 24, 1, 1).to(memory_format=torch.channels_last),
    "pooled": lambda: torch.randn(2, 24, 8, 8).to(memory_format=torch.channels_last).mean((2, 3), keepdim=True),
    "one row": lambda: torch.randn(2, 24, 1, 8).to(memory_format=torch.channels_last),
    "one column": lambda: torch.randn(2, 24, 8, 1).to(memory_format=torch.channels_last),
    "copies": lambda: torch.randn(1, 24, 8, 8).expand(2, -1, -1, -1),
    "one number": lambda: torch.randn(2, 24, 1, 1).expand(2, 24, 8, 8),
    "no batch": lambda: torch.randn(24, 8, 8),
    "no batch, permuted": lambda: torch.randn(8, 8, 24).permute(2, 0, 1),
}


@pytest.mark.parametrize("weights_last", [False, True], ids=["", "weights-last"])
@pytest.mark.parametrize(("kernel", "groups"), [(1, 1), (3, 1), (3, 24)])
@pytest.mark.parametrize("way", WAYS)
def test_results_for_parts_of_images(way: str, kernel: int, groups: int, weights_last: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(24, 24, kernel, padding=kernel // 2, groups=groups).eval()
    if weights_last:
        conv = conv.to(memory_format=torch.channels_last)
    model = nn.Sequential(copy.deepcopy(conv))
    WAYS[way](model, torch.randn(2, 24, 8, 8))
    for name, make in PARTS.items():
        x = make()
        assert model(x).stride() == conv(x).stride(), name


@pytest.mark.parametrize("scheme", ["W8A8Dynamic", "W8A16", "FP16"])
def test_compiled_results_lie_as_those_of_eager_mode(scheme: str) -> None:
    conv = nn.Conv2d(24, 8, 3, padding=1).eval()
    model = pyquant.quantize_(nn.Sequential(copy.deepcopy(conv)), scheme, check_speed=False)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for name in ("channels", "crop", "crop, channels first", "permuted", "one pixel", "no batch, permuted"):
        x = PARTS[name]()
        with torch.no_grad():
            assert compiled(x).stride() == conv(x).stride(), name


@pytest.mark.parametrize(("kernel", "groups"), [(1, 1), (3, 24), (3, 1)])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_lie_as_their_parameters(kernel: int, groups: int, last: bool) -> None:
    conv = nn.Conv2d(24, 24, kernel, padding=kernel // 2, groups=groups)
    if last:
        conv = conv.to(memory_format=torch.channels_last)
    model = pyquant.prepare_qat_(nn.Sequential(copy.deepcopy(conv)), "W8A8Dynamic")
    x = torch.randn(2, 24, 8, 8)
    for layer in (conv, model):
        layer(x).square().mean().backward()
    assert model[0].weight.grad.stride() == conv.weight.grad.stride()


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_rounded_weights_have_the_strides_of_the_parameter(kernel: int, channels: int) -> None:
    """torch 2.13's backward pass writes beyond its memory where those of a 1 x 1 kernel read as channels_last."""
    conv = nn.Conv2d(channels, 48, kernel, stride=2, bias=False)
    (layer,) = pyquant.prepare_qat_(nn.Sequential(copy.deepcopy(conv)), "W8A8Dynamic")
    assert layer._rounded_weight().stride() == conv.weight.stride()
    again = layer.to_quantized().to_float(torch.float32).weight
    assert again.stride() == conv.weight.stride()


class Attention(nn.Module):
    """Positions of an image that attend to each other, by views of what 1 x 1 convolutions give (SAGAN's way)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k = self.q(x).view(b, -1, h * w), self.k(x).view(b, -1, h * w)
        return self.v(x).view(b, c, h * w) @ (q.transpose(1, 2) @ k).softmax(-1).transpose(1, 2)


@pytest.mark.parametrize("way", WAYS)
def test_models_that_read_results_by_view(way: str) -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 16, 8, 8)
    expected = model(x)
    WAYS[way](model, x)
    assert torch.nn.functional.mse_loss(model(x), expected) < 1e-2 * expected.square().mean()


def test_the_backward_pass_of_a_strided_1x1_convolution() -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 48, 1, stride=2, bias=False)
    model = pyquant.prepare_qat_(nn.Sequential(copy.deepcopy(conv)), "W8A8Dynamic")
    x = torch.randn(1, 3, 256, 256)
    for _ in range(4):
        model(x).square().mean().backward()
        conv(x).square().mean().backward()
    got, expected = model[0].weight.grad, conv.weight.grad
    assert (got - expected).norm() < 0.05 * expected.norm()
