"""learn_rounding_: whether each weight rounds up or down, learned by gradients from what a block gives out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.calibrate.padding import left_out
from pyquant.core import arguments
from pyquant.errors import NonFiniteError
from pyquant.nn.undo import undone_on_error
from pyquant.ptq.blockwise.drive import Progress, Way, improved
from pyquant.ptq.blockwise.find import AUTO, Blocks
from pyquant.ptq.blockwise.stage import Improver, LayerState, Stage
from pyquant.ptq.improve.errors import ErrorFunction, error_function, finite, held_out_of, mean_error, relative_mse
from pyquant.ptq.improve.matrix import Layer, matrix_of, simulated_layers, weight_from
from pyquant.ptq.improve.replay import BatchToInputs, Replay, counted_of_output
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.float_model import float_parameters

_HALF: Final = 0.5  # the furthest that a weight may move before it is rounded, in steps
_LOOKS: Final = 8  # in the second half of learning


@dataclass(frozen=True)
class LearnedRounding:
    """What became of one layer: the held-out error of its block (or of the model) before and after all layers of it
    were learned together, whether these codes stay, and the share of its codes that are not the nearest ones."""

    error_before: float
    error_after: float
    accepted: bool
    moved: float = 0.0


@torch.no_grad()
def learn_rounding_(
    model: nn.Module,
    data: Iterable[Any],
    num_batches: int,
    *,
    steps: int = 200,
    learning_rate: float | None = None,
    error: str | ErrorFunction | None = None,
    num_held_out: int | None = None,
    seed: int = 0,
    batch_to_inputs: BatchToInputs | None = None,
    blocks: Blocks = AUTO,
    device: torch.device | str | None = None,
    cache: str | os.PathLike[str] | None = None,
    save_to: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> dict[str, LearnedRounding]:
    """Learn for every weight whether it rounds up or down, all layers of a block together, in place.

    Before it is rounded every weight moves by at most half a step, so that its code is the nearest one or a neighbour.
    The moves are learned by steps of the gradient's sign, through the rounding, on the squared difference of what
    the block gives out (rounded inputs, blocks before it learned) and what it gives out in the float model.
    model         after insert_fake_quantize_ and calibration. Linears and Conv2ds, every symmetric or affine scheme, by
                  groups and of two levels too. After gptq_, the float weights are the ones of before it, and its codes
                  stay where they are better.
    data          batches; num_batches of them are used, and num_held_out of these (None: a quarter, at least one) only
                  to judge. They need not have labels. Each step takes one batch, in an order from `seed`.
    steps         at least 1.
    learning_rate   of the first step, above 0, as a share of a weight's step; it falls to 0 along a line. None: 1 /
                  steps, with which a weight can just reach its limit.
    error         as in gptq_: what judges models without blocks, on held-out batches. What is minimised is 'mse'.
    batch_to_inputs   as in pyquant.calibrate.run_calibration.
    blocks, device, cache, save_to, progress   as in gptq_; without blocks all layers are learned together.
    ->   {layer: LearnedRounding}. All layers of a block keep their codes where its error would rise. Scales and zero
         points stay those of the scheme, fixed from here on; the weights become the real numbers that the codes stand
         for. A layer that the data never reaches is not listed.
    Raises as gptq_, and NonFiniteError where a block's outputs are not finite; on any exception the model is as before,
    but for finished blocks that are in save_to. The same seed and data give the same codes on one device.
    Source: Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", arXiv
    2309.05516 (AutoRound), equations 3 and 5, without its learned ranges; Nagel et al., "Up or Down? Adaptive Rounding
    for Post-Training Quantization", arXiv 2004.10568.

    Example:
        >>> from pyquant import W4A16, insert_fake_quantize_
        >>> model = insert_fake_quantize_(nn.Sequential(nn.Linear(8, 4)), W4A16(group_size=None))
        >>> list(learn_rounding_(model, [torch.randn(16, 8) for _ in range(4)], num_batches=4, steps=10))
        ['0']
    """
    layers = simulated_layers(model)
    arguments.whole("steps", steps, 1)
    arguments.whole("seed", seed, 0, 2**63 - 1)
    if learning_rate is not None:
        arguments.number("learning_rate", learning_rate, 0, above=True)
    error_function(error)
    if blocks == AUTO and error not in (None, "mse"):
        blocks = None
    way = Way(blocks, device, cache, save_to, progress)
    replay = Replay(model, data, num_batches, batch_to_inputs)
    work = rounding_improver(num_batches, steps, learning_rate, seed, error, num_held_out)
    return improved(replay, layers, work, way)


def rounding_improver(
    num_batches: int,
    steps: int = 200,
    learning_rate: float | None = None,
    seed: int = 0,
    error: str | ErrorFunction | None = None,
    num_held_out: int | None = None,
) -> Improver:
    """What learn_rounding_ does to the layers of a stage."""
    rate = 1 / steps if learning_rate is None else float(learning_rate)
    split = num_batches - held_out_of(num_held_out, num_batches)
    judge = error if error is None or type(error) is str else "own"
    settings = f"learned rounding {steps} {rate!r} {seed} {judge} {split}"
    return _LearnedRounding(settings, steps, rate, seed, error_function(error), split)


@dataclass(frozen=True)
class _LearnedRounding:
    """The improver. measure: the error of the model's outputs; split: the first batch that is held out."""

    settings: str
    steps: int
    rate: float
    seed: int
    measure: ErrorFunction
    split: int

    def look(self, stage: Stage) -> list[Any]:
        return [stage.floats.run(batch) for batch in stage.floats.batches]

    def improve(self, stage: Stage, seen: list[Any]) -> dict[str, LearnedRounding]:
        measure = relative_mse if stage.is_block else self.measure
        before = finite(mean_error(stage.rounded, seen, self.split, measure))
        old = [LayerState.of(layer) for layer in stage.layers.values()]
        with undone_on_error([state.put_back for state in old]):
            moves = {name: _Moves(layer, float_parameters(layer)[0]) for name, layer in stage.layers.items()}
            self._learn(stage, moves, seen)
            moved = {name: moves[name].settle() for name in stage.layers}
            after = mean_error(stage.rounded, seen, self.split, measure)
        if not after <= before:
            for state in old:
                state.put_back()
        return {name: LearnedRounding(before, after, after <= before, share) for name, share in moved.items()}

    def _learn(self, stage: Stage, moves: dict[str, _Moves], seen: list[Any]) -> None:
        """Take the steps, each on one batch; of the moves at some looks the ones with the least error on all batches
        stay, as a single batch is a noisy judge."""
        generator = torch.Generator().manual_seed(self.seed)
        squares = 0.0
        for i, out in enumerate(seen[: self.split]):
            with left_out(stage.rounded.inputs(stage.rounded.batches[i]).padding):
                squares += sum(float(t.double().square().sum()) for t in counted_of_output(out))
        scale = max(squares, 1e-300)
        order: list[int] = []
        for module in moves.values():
            module.layer.weight_fake_quant = module
        values = [module.value for module in moves.values()]
        looks = {self.steps - 1 - i * self.steps // (2 * _LOOKS) for i in range(_LOOKS)}
        best, least = [value.detach().clone() for value in values], float("inf")
        for step in range(self.steps):
            order = order or torch.randperm(self.split, generator=generator, device="cpu").tolist()
            i = order.pop()
            with torch.enable_grad():
                pairs = stage.rounded.compared(seen[i], stage.rounded.batches[i])
                loss = (
                    sum(
                        ((b.float() - a.float()).square().sum() for a, b in pairs),
                        torch.zeros((), dtype=torch.float32, device="cpu"),
                    )
                    / scale
                )
            if not bool(loss.detach().isfinite()):
                raise NonFiniteError(f"output of {stage.name or 'the model'}", "NaN or infinity", "finite values")
            if not loss.requires_grad:
                return  # nothing of what is given out depends on these weights
            gradients = torch.autograd.grad(loss, values, allow_unused=True)
            rate = self.rate * (1 - step / self.steps)
            for value, gradient in zip(values, gradients, strict=True):
                if gradient is not None:
                    value.sub_(rate * gradient.sign()).clamp_(-_HALF, _HALF)
            if step in looks:
                rounded = stage.rounded
                now = sum(rounded.error(relative_mse, seen[b], rounded.batches[b]) for b in range(self.split))
                if now < least:
                    least, best = now, [value.detach().clone() for value in values]
        for value, found in zip(values, best, strict=True):
            value.copy_(found)

    def packed(self, result: LearnedRounding) -> dict[str, Any]:
        return asdict(result)

    def unpacked(self, value: dict[str, Any]) -> LearnedRounding:
        return LearnedRounding(**value)


class _Moves(FakeQuantize):
    """In the place of a layer's fake quantiser of weights while they are learned: rounds the float weights, moved by
    `value` steps each (float32 [N, K], in [-1/2, 1/2]); gradients reach `value` where a code is not at its limit."""

    layer: Layer

    def __init__(self, layer: Layer, weight: Tensor) -> None:
        scheme, matrix = layer.scheme.weights, matrix_of(layer, weight)
        scale, zero_point = layer.weight_fake_quant.qparams(matrix)
        super().__init__(scheme, tuple(scale.shape), follows=False, device=matrix.device)
        self.set_qparams(scale, zero_point)
        object.__setattr__(self, "layer", layer)  # not a child of its own child
        n, k = matrix.shape
        self._step = _spread(scale, n, k)
        self._zero = (
            torch.zeros((), dtype=torch.float32, device=matrix.device)
            if self.zero_point is None
            else _spread(self.zero_point, n, k).float()
        )
        self._real = matrix.float() / self._step + self._zero
        # codes that an improver has chosen are where it begins
        chosen = (matrix_of(layer).float() / self._step + self._zero).round()
        start = torch.where(chosen == self._nearest(), 0.0, (chosen - self._real).clamp(-_HALF, _HALF))
        self.value = start.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        """The weights of the float model, not x, as their codes mean them."""
        if self.mode != "quantize":
            return x
        qmin, qmax = self.scheme.code_range
        moved = self._real + self.value
        codes = (moved + (moved.round() - moved).detach()).clamp(qmin, qmax)
        return ((codes - self._zero) * self._step).to(x.dtype)

    def settle(self) -> float:
        """Give the layer the weights and the fixed fake quantiser that these codes mean; -> share of codes that are not
        the nearest ones."""
        layer, (qmin, qmax) = self.layer, self.scheme.code_range
        codes = (self._real + self.value.detach()).round().clamp(qmin, qmax)
        fixed = FakeQuantize(self.scheme, tuple(self.scale.shape), follows=False, device=self.scale.device)
        fixed.set_qparams(self.scale, self.zero_point)
        real = weight_from(layer, ((codes - self._zero) * self._step).to(layer.weight.dtype))
        layer.weight = nn.Parameter(real, requires_grad=layer.weight.requires_grad)
        layer.weight_fake_quant = fixed.train(layer.training)
        return float((codes != self._nearest()).float().mean()) if codes.numel() else 0.0

    def _nearest(self) -> Tensor:
        return self._real.round().clamp(*self.scheme.code_range)


def _spread(per: Tensor, n: int, k: int) -> Tensor:
    """Scales [1], [N] or [N, groups] for every weight: [N, K]."""
    if per.numel() == 1:
        return per.reshape(1, 1).expand(n, k)
    return per.reshape(n, -1).repeat_interleave(k // per.reshape(n, -1).shape[1], 1)
