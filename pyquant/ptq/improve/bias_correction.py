"""bias_correction_: the mean error that rounding leaves in every output channel moves into the bias."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.errors import ArgumentError
from pyquant.nn.swap import undone_on_error
from pyquant.ptq.improve.replay import BatchToInputs, Replay, simulated_layers
from pyquant.simulate.fake_quantize import floating_point
from pyquant.simulate.linear import FakeQuantLinear


@torch.no_grad()
def bias_correction_(
    model: nn.Module, data: Iterable[Any], num_batches: int, *, batch_to_inputs: BatchToInputs | None = None
) -> dict[str, float]:
    """Correct the biases of all simulating layers, in the order of their calls, in place.

    model    after insert_fake_quantize_ and calibration. A layer is corrected with those before it corrected already,
             so that its error holds what they still pass on.
    data     batches; num_batches of them are used, without labels.
    batch_to_inputs   as in pyquant.calibrate.run_calibration.
    ->       {layer: largest mean error of a channel that was corrected, in units of its outputs' root mean square}.
             After it the mean of every channel over these batches is the float model's. Layers without a bias get one;
             biases are parameters of the layer's own afterwards.
    Raises ArgumentError for wrong arguments and for layers that share one bias, CalibrationError for too few batches;
    on any exception the model is as before.
    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721,
    section 4.2 (the empirical form).

    Example:
        >>> from pyquant import W8A8Dynamic, insert_fake_quantize_
        >>> model = insert_fake_quantize_(nn.Sequential(nn.Linear(8, 4, bias=False)), W8A8Dynamic())
        >>> _ = bias_correction_(model, [torch.randn(16, 8)], num_batches=1)
        >>> model[0].bias.shape
        torch.Size([4])
    """
    layers = simulated_layers(model)
    replay = Replay(model, data, num_batches, batch_to_inputs)
    owners = Counter(id(layer.bias) for layer in layers.values() if layer.bias is not None)
    shared = [name for name, layer in layers.items() if owners[id(layer.bias)] > 1]
    if shared:
        raise ArgumentError("model", f"one bias in the layers {', '.join(shared)}", "a bias of its own in every layer")
    with floating_point(model):
        calls = replay.calls(layers)
        means = {name: _means(replay, layers[name], count) for name, count in calls.items()}
    corrections: dict[str, float] = {}
    with undone_on_error([partial(setattr, layers[name], "bias", layers[name].bias) for name in calls]):
        for name, count in calls.items():
            layer, (mean, size) = layers[name], means[name]
            error = _means(replay, layer, count)[0] - mean
            bias = torch.zeros_like(error) if layer.bias is None else layer.bias.double()
            layer.bias = nn.Parameter((bias - error).to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)
            corrections[name] = float(error.abs().max()) / max(size, 1e-300) if error.numel() else 0.0
    return corrections


def _means(replay: Replay, layer: FakeQuantLinear, calls: int) -> tuple[Tensor, float]:
    """float64 [N]: the mean of each channel, before the output is rounded; and the root mean square of all."""
    total = torch.zeros(layer.out_features, dtype=torch.float64, device=layer.weight.device)
    squares, rows = 0.0, 0
    output_fake_quant, layer.output_fake_quant = layer.output_fake_quant, None

    def see(_: Tensor, y: Tensor) -> None:
        nonlocal squares, rows
        flat = y.reshape(-1, layer.out_features).double()
        total.add_(flat.sum(0))
        squares, rows = squares + float(flat.square().sum()), rows + flat.shape[0]

    try:
        replay.watch(layer, calls, see, 0, len(replay.batches))
    finally:
        layer.output_fake_quant = output_fake_quant
    return total / max(rows, 1), (squares / max(rows * layer.out_features, 1)) ** 0.5
