"""bias_correction_: the mean error that rounding leaves in every output channel moves into the bias."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.ptq.blockwise.drive import Progress, Way, improved
from pyquant.ptq.blockwise.find import AUTO, Blocks
from pyquant.ptq.blockwise.stage import Stage
from pyquant.ptq.improve.matrix import Layer, counted_of, outputs_by_channel, simulated_layers
from pyquant.ptq.improve.replay import BatchToInputs, Replay


@torch.no_grad()
def bias_correction_(
    model: nn.Module,
    data: Iterable[Any],
    num_batches: int,
    *,
    batch_to_inputs: BatchToInputs | None = None,
    blocks: Blocks = AUTO,
    device: torch.device | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    save_to: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Correct the biases of all simulating layers, in the order of their calls, in place.

    model    after insert_fake_quantize_ and calibration. A layer is corrected with those before it corrected already,
             so that its error holds what they still pass on. Linears and Conv2ds.
    data     batches; num_batches of them are used, without labels.
    batch_to_inputs   as in pyquant.calibrate.run_calibration.
    blocks, device, cache, save_to, progress   block by block, docs/reconstruction.md, with the same biases. blocks:
             'auto' finds them; a name or names: these; None: the whole model runs for every layer.
    ->       {layer: largest mean error of a channel that was corrected, in units of its outputs' root mean square}.
             After it the mean of every channel over these batches is the float model's. Layers without a bias get one;
             biases are parameters of the layer's own afterwards.
    Raises ArgumentError for wrong arguments and for layers that share one bias, CalibrationError for too few batches,
    CheckpointError for a save_to of something else; on any exception the model is as before, but for finished blocks
    that are in save_to.
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
    way = Way(blocks, device, cache, save_to, progress)
    replay = Replay(model, data, num_batches, batch_to_inputs)
    check_biases(layers)
    return improved(replay, layers, BiasCorrection(), way)


def check_biases(layers: Mapping[str, Layer]) -> None:
    """Raise ArgumentError for layers that share one bias."""
    owners = Counter(id(layer.bias) for layer in layers.values() if layer.bias is not None)
    shared = [name for name, layer in layers.items() if owners[id(layer.bias)] > 1]
    if shared:
        raise ArgumentError("model", f"one bias in the layers {', '.join(shared)}", "a bias of its own in every layer")


@dataclass(frozen=True)
class _Outputs:
    """What a layer gave out before its output was rounded: float64 [N], the mean of each channel; the root mean square
    of all; how many rows."""

    mean: Tensor
    size: float
    rows: int


class BiasCorrection:
    """The improver."""

    settings: Final = "bias correction"

    def look(self, stage: Stage) -> dict[str, _Outputs]:
        return {name: _means(stage.floats, name, stage.layers[name], calls) for name, calls in stage.calls.items()}

    def improve(self, stage: Stage, seen: dict[str, _Outputs]) -> dict[str, float]:
        corrections: dict[str, float] = {}
        for name, calls in stage.calls.items():
            layer, floats = stage.layers[name], seen[name]
            rounded = _means(stage.rounded, name, layer, calls)
            if not floats.rows or not rounded.rows:  # an expert that one of the models does not reach
                corrections[name] = 0.0
                continue
            error = rounded.mean - floats.mean
            bias = torch.zeros_like(error) if layer.bias is None else layer.bias.double()
            layer.bias = nn.Parameter((bias - error).to(layer.weight.dtype), requires_grad=layer.weight.requires_grad)
            corrections[name] = float(error.abs().max()) / max(floats.size, 1e-300) if error.numel() else 0.0
        return corrections

    def packed(self, result: float) -> float:
        return result

    def unpacked(self, value: float) -> float:
        return float(value)


def _means(replay: Replay, name: str, layer: Layer, calls: int) -> _Outputs:
    channels = layer.weight.shape[0]
    total = torch.zeros(channels, dtype=torch.float64, device=layer.weight.device)
    squares, rows = 0.0, 0
    output_fake_quant, layer.output_fake_quant = layer.output_fake_quant, None

    def see(_: Tensor, y: Tensor) -> None:
        nonlocal squares, rows
        flat = outputs_by_channel(layer, counted_of(layer, y)).double()
        total.add_(flat.sum(0))
        squares, rows = squares + float(flat.square().sum()), rows + flat.shape[0]

    try:
        replay.watch(layer, calls, see, 0, len(replay.batches))
    finally:
        layer.output_fake_quant = output_fake_quant
    if not bool(total.isfinite().all()):
        raise NonFiniteError("data", f"batches under which outputs of {name} are NaN or infinite", "finite ones")
    return _Outputs(total / max(rows, 1), (squares / max(rows * channels, 1)) ** 0.5, rows)
