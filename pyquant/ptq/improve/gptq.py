"""gptq_: codes of weights that make up for each other's rounding, from the second moments of a layer's inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyquant.calibrate import weight_qparams
from pyquant.core import arguments
from pyquant.nn.undo import undone_on_error
from pyquant.nn.weights import dequantise_weight
from pyquant.ptq.blockwise.drive import Progress, Way, improved
from pyquant.ptq.blockwise.find import AUTO, Blocks
from pyquant.ptq.blockwise.stage import Improver, LayerState, Stage
from pyquant.ptq.improve.errors import ErrorFunction, error_function, finite, held_out_of, mean_error, relative_mse
from pyquant.ptq.improve.gptq_codes import codes_by
from pyquant.ptq.improve.matrix import Layer, matrix_of, simulated_layers, weight_from
from pyquant.ptq.improve.moments import Moments, bias_shift, moments_of, targets
from pyquant.ptq.improve.replay import BatchToInputs, Replay
from pyquant.ptq.improve.same_input import noting_groups
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.float_model import float_parameters


@dataclass(frozen=True)
class GptqLayer:
    """What became of one layer: the held-out error before and after its new codes, whether they stay, and how they
    were found: by act_order, with corrected targets. The error is that of the layer's block, or of the model."""

    error_before: float
    error_after: float
    accepted: bool
    act_order: bool = False
    corrected: bool = False


@torch.no_grad()
def gptq_(
    model: nn.Module,
    data: Iterable[Any],
    num_batches: int,
    damp: float = 0.01,
    act_order: bool | None = None,
    *,
    correct_targets: bool | None = None,
    error: str | ErrorFunction | None = None,
    num_held_out: int | None = None,
    batch_to_inputs: BatchToInputs | None = None,
    blocks: Blocks = AUTO,
    device: torch.device | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    save_to: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, GptqLayer]:
    """Choose the codes of the weights again, layer by layer in the order of their calls, in place.

    model         after insert_fake_quantize_ and calibration; what each layer sees are the outputs of the layers
                  before it with their codes chosen, inputs rounded as the schemes say. Linears and Conv2ds.
    data          batches; num_batches of them are used, and num_held_out of these (None: a quarter, at least one) only
                  to judge. They need not have labels.
    damp          added to the diagonal of the second moments, as a share of its mean.
    act_order     columns with the largest second moment first: True, False, or None: what is better on held-out data.
    correct_targets   codes for what the layer gives out in the float model, although its inputs are those of the
                  rounded one; a bias it has takes the mean error. True, False, or None: where held-out data is better.
                  Layers outside of blocks, in a model with blocks, have no corrected targets, nor have layers whose
                  inputs have another number of rows in the float model, as experts may.
    error         of held-out outputs against those of the float model: 'mse' (relative mean square, any output),
                  'kl' (in nats, of logits in the last dimension of the first output), 'both' (their geometric mean),
                  or a function (float output, output) -> float. None: 'both' of the model's outputs, 'mse' of a
                  block's. A layer keeps its codes where the error would rise.
    batch_to_inputs   as in pyquant.calibrate.run_calibration.
    blocks, device, cache, save_to, progress   block by block, docs/reconstruction.md. blocks: 'auto' finds them where
                  error is None or 'mse'; a name or names: these; None: the whole model runs for every layer, whose
                  outputs judge. Inside of blocks the error is the 'mse' of the block's outputs.
    ->   {layer: GptqLayer}. Scales and zero points stay those of the scheme (max, MSE, ...), fixed from here on; the
         layer's weights become the real numbers that the codes stand for, in a parameter of its own, so that convert_
         finds exactly these codes. A layer that the data never reaches is not listed and keeps its weights.
    Raises ArgumentError for wrong arguments, CalibrationError for too few batches, CheckpointError for a save_to of
    something else; on any exception the model is as before, but for finished blocks that are in save_to.
    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
    arXiv 2210.17323; corrected targets: Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric
    Calibration", arXiv 2504.02692, its objective, solved by least squares before the codes are chosen.

    Example:
        >>> from pyquant import W4A16, insert_fake_quantize_
        >>> model = insert_fake_quantize_(nn.Sequential(nn.Linear(8, 4)), W4A16(group_size=None))
        >>> list(gptq_(model, [torch.randn(16, 8) for _ in range(4)], num_batches=4))
        ['0']
    """
    layers = simulated_layers(model)
    damp = arguments.number("damp", damp, 0, above=True)
    for name, flag in (("act_order", act_order), ("correct_targets", correct_targets)):
        if flag is not None:
            arguments.flag(name, flag)
    error_function(error)
    if blocks == AUTO and error not in (None, "mse"):
        blocks = None
    way = Way(blocks, device, cache, save_to, progress)
    replay = Replay(model, data, num_batches, batch_to_inputs)
    work = gptq_improver(num_batches, damp, act_order, correct_targets, error, num_held_out)
    return improved(replay, layers, work, way)


def gptq_improver(
    num_batches: int,
    damp: float = 0.01,
    act_order: bool | None = None,
    correct_targets: bool | None = None,
    error: str | ErrorFunction | None = None,
    num_held_out: int | None = None,
) -> Improver:
    """What gptq_ does to the layers of a stage."""
    held_out = held_out_of(num_held_out, num_batches)
    settings = f"gptq {damp!r} {act_order} {correct_targets} {error if error is None or type(error) is str else 'own'}"
    split = num_batches - held_out
    return _Gptq(f"{settings} {held_out}", damp, act_order, correct_targets, error_function(error), split)


@dataclass(frozen=True)
class _Seen:
    """Of the float model: what it gives out for the batches that judge; groups of layers that are given one tensor."""

    outputs: list[Any]
    groups: list[list[str]]

    def from_here(self, name: str) -> list[str]:
        """The layer, and those of its group behind it."""
        group = next((group for group in self.groups if name in group), [name])
        return group[group.index(name) :]


@dataclass(frozen=True)
class _Gptq:
    """The improver. measure: the error of the model's outputs; split: the first batch that is held out."""

    settings: str
    damp: float
    act_order: bool | None
    corrects: bool | None
    measure: ErrorFunction
    split: int

    def look(self, stage: Stage) -> _Seen:
        with noting_groups(stage.layers, stage.calls) as groups:
            outputs = [stage.floats.run(stage.floats.batches[self.split])]
        rest = range(self.split + 1, len(stage.floats.batches))
        return _Seen([*outputs, *(stage.floats.run(stage.floats.batches[i]) for i in rest)], groups)

    def improve(self, stage: Stage, looked: _Seen) -> dict[str, GptqLayer]:
        results: dict[str, GptqLayer] = {}
        seen = looked.outputs
        before = finite(self._error(stage, seen))
        moments, same = None, list[str]()
        for name in stage.calls:
            layer = stage.layers[name]
            old = LayerState.of(layer)
            found: list[tuple[float, LayerState, tuple[bool, bool]]] = []
            with undone_on_error([old.put_back]):
                if moments is None or name not in same:
                    corrects = self.corrects is not False and stage.is_whole
                    moments, same = None, looked.from_here(name)
                    moments, same = moments_of(stage, same, self.split, cross=corrects)
                for how in self._ways(moments, found):
                    _choose_codes(layer, moments, self.damp, *how)
                    found.append((self._error(stage, seen), LayerState.of(layer), how))
                    old.put_back()
            after, new, how = min(found, key=lambda one: one[0])  # the first of equals: the simplest
            results[name] = GptqLayer(before, after, after <= before, *how)
            if after <= before:
                before = after
                new.put_back()
        return results

    def _ways(self, moments: Moments, found: Sequence[tuple[float, LayerState, tuple[bool, bool]]]) -> Any:
        """(act_order, corrected), simplest first; targets are corrected in the better one of two orders."""
        can_correct = moments.cross is not None
        first = self.corrects is True and can_correct
        for order in (False, True) if self.act_order is None else (self.act_order,):
            yield order, first
        if self.corrects is None and can_correct:
            yield min(found, key=lambda one: one[0])[2][0], True

    def _error(self, stage: Stage, seen: list[Any]) -> float:
        return mean_error(stage.rounded, seen, self.split, relative_mse if stage.is_block else self.measure)

    def packed(self, result: GptqLayer) -> dict[str, Any]:
        return asdict(result)

    def unpacked(self, value: dict[str, Any]) -> GptqLayer:
        return GptqLayer(**value)


def _choose_codes(layer: Layer, moments: Moments, damp: float, act_order: bool, corrected: bool) -> None:
    scheme, (weight, bias) = layer.scheme.weights, float_parameters(layer)
    matrix = matrix_of(layer, weight)
    scale, zero_point = layer.weight_fake_quant.qparams(matrix)
    wanted: Tensor = matrix
    if corrected:
        wanted = targets(matrix, moments, damp)
        if scheme.calibrator != "fixed":
            scale, zero_point = weight_qparams(wanted.float(), scheme)
    fixed = FakeQuantize(scheme, tuple(scale.shape), follows=False, device=matrix.device)
    fixed.set_qparams(scale, zero_point)
    scale, zero_point = fixed.qparams()
    if scheme.granularity == "per_tensor":
        scale = scale.expand(matrix.shape[0])
        zero_point = None if zero_point is None else zero_point.expand(matrix.shape[0])
    qmin, qmax = scheme.code_range
    ldl = moments.ldl(damp, act_order=act_order)
    codes = codes_by(wanted, ldl, scale, zero_point, qmin=qmin, qmax=qmax)
    real = dequantise_weight(codes, scale.contiguous(), zero_point, scheme)
    new = weight_from(layer, real.to(layer.weight.dtype))
    layer.weight = nn.Parameter(new, requires_grad=layer.weight.requires_grad)
    layer.weight_fake_quant = fixed.train(layer.training)
    if corrected and layer.bias is not None and bias is not None:
        moved = bias.double() + bias_shift(matrix, real, moments)
        layer.bias = nn.Parameter(moved.to(layer.bias.dtype), requires_grad=layer.bias.requires_grad)
