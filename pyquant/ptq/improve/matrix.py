"""The layers that improvers change, as matrices: Linears, and convolutions as products of patches."""

from __future__ import annotations

from torch import Tensor, nn

from pyquant.calibrate.padding import counted
from pyquant.core import arguments
from pyquant.errors import ArgumentError
from pyquant.simulate.conv import FakeQuantConv2d
from pyquant.simulate.float_model import check_float_model
from pyquant.simulate.linear import FakeQuantLinear

Layer = FakeQuantLinear | FakeQuantConv2d


def simulated_layers(model: nn.Module) -> dict[str, Layer]:
    """Every simulating layer with weights by its first name. Raises ArgumentError where there is none,
    or where the float model is not known any more."""
    arguments.module("model", model)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Layer)}
    if not layers:
        got = f"a {type(model).__name__} without fake quantisation of Linears or convolutions"
        raise ArgumentError("model", got, "a model after insert_fake_quantize_")
    check_float_model(model)
    return layers


def matrix_of(layer: Layer, weight: Tensor | None = None) -> Tensor:
    """The weights, or others of their shape, as [N, K]."""
    weight = (layer.weight if weight is None else weight).detach()
    return layer.patches.matrix(weight) if isinstance(layer, FakeQuantConv2d) else weight


def weight_from(layer: Layer, matrix: Tensor) -> Tensor:
    """A matrix [N, K] in the shape of the layer's weights."""
    return layer.patches.image(matrix) if isinstance(layer, FakeQuantConv2d) else matrix


def rows_of(layer: Layer, x: Tensor) -> Tensor:
    """What the matrix multiplies for an input: [rows, K]; of a convolution in groups the rows of all groups, so that
    its moments are the mean of the groups'."""
    if not isinstance(layer, FakeQuantConv2d):
        return x.reshape(-1, layer.in_features)
    images = x if x.dim() == 4 else x.unsqueeze(0)
    rows = layer.patches.gather(images.permute(0, 2, 3, 1))
    return rows if layer.groups == 1 else layer.patches.rows_of_groups(rows).flatten(0, 1)


def rounded_input(layer: Layer, x: Tensor) -> Tensor:
    """An input as the layer rounds it."""
    fake = layer.input_fake_quant
    if fake is None:
        return x
    if isinstance(layer, FakeQuantConv2d) and fake.scheme.dynamic:
        images = x.shape[0] if x.dim() == 4 else 1
        return fake(x.reshape(images, -1)).reshape(x.shape)
    return fake(x)


def counted_of(layer: Layer, x: Tensor) -> Tensor:
    """What counts of an input or a result of a layer: all of an image, else what is no padding."""
    return x if isinstance(layer, FakeQuantConv2d) else counted(x)


def outputs_by_channel(layer: Layer, y: Tensor) -> Tensor:
    """The layer's result as [rows, N]."""
    if not isinstance(layer, FakeQuantConv2d):
        return y.reshape(-1, layer.out_features)
    return y.movedim(-3, -1).reshape(-1, layer.out_channels)
