"""learn_rotation_: the matrix that turns the residual stream, learned from what rounding costs with it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pyquant.calibrate.padding import left_out
from pyquant.core import arguments
from pyquant.core.modes import evaluating
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.nn.sites import Config
from pyquant.ptq.improve.errors import ErrorFunction, error_function, held_out_of, mean_error
from pyquant.ptq.improve.replay import BatchToInputs, Replay, counted_of_output
from pyquant.ptq.improve.rotate import Turned, rotate_reversibly
from pyquant.ptq.improve.rotate_rules import RotationSpec
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.insert import insert_fake_quantize_
from pyquant.simulate.layer import SimulatedLayer, fake_quantize_of_weight

_MOMENTUM: Final = 0.9
_LOOKS: Final = 4  # in the second half of learning


@dataclass(frozen=True)
class LearnedRotation:
    """What became of a model: the held-out errors of the rounded model with the Hadamard matrices and with what was
    learned from them, which of the two it has (accepted: the second), and what rotate_ returns."""

    error_before: float
    error_after: float
    accepted: bool
    spread: dict[str, int]


@torch.no_grad()
def learn_rotation_(
    model: nn.Module,
    config: Config,
    data: Iterable[Any],
    num_batches: int,
    spec: RotationSpec | None = None,
    *,
    steps: int = 100,
    learning_rate: float = 0.002,
    seed: int = 0,
    online: bool = False,
    error: str | ErrorFunction | None = None,
    num_held_out: int | None = None,
    batch_to_inputs: BatchToInputs | None = None,
) -> LearnedRotation:
    """rotate_ with a matrix for the residual stream that is learned on data, in place, before quantisation.

    Learning begins with rotate_'s random Hadamard matrix. Each step runs the simulated quantised model on one batch,
    with gradients through all roundings (straight-through), and turns the matrix along them by a Cayley transform, so
    that it stays orthogonal. The loss is the divergence of the model's output from the float one's; labels play no
    part. Ranges of weights and inputs are their maxima meanwhile. In the end the model with what was learned and the
    one with the Hadamard matrix are quantised in simulation as the config says, and the one with the less error on
    held-out batches stays.
    model, config   a float nn.Module, and what quantize_ will be given: a scheme, its name, or a mapping.
    data          batches; num_batches of them are used, and num_held_out of these (None: a quarter, at least one) only
                  to judge. Each step takes one batch, in an order from `seed`.
    spec, seed, online   as in rotate_.
    steps         at least 1.
    learning_rate   above 0: the angle, in radians, by which the first step turns channels in the root mean square; it
                  falls to 0 along a line.
    error         as in gptq_: None is 'both'.
    ->            LearnedRotation. The same seed and data give the same model on one device.
    Needs the model three times. Values of attention and transforms at run time have the matrices of rotate_.
    Raises as rotate_ and insert_fake_quantize_ do, and NonFiniteError where a loss is not finite; on any exception the
    model is as before.
    Source: Liu et al., "SpinQuant: LLM quantization with learned rotations", arXiv 2405.16406, section 3; the step: Li
    et al., "Efficient Riemannian Optimization on the Stiefel Manifold via the Cayley Transform", arXiv 2002.01113.

    Example:
        >>> from pyquant import RotationSpec, W4A4Dynamic
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 2))
        >>> spec = RotationSpec(writers=["0"], readers={"1": ["2"]})
        >>> data = [torch.randn(16, 4) for _ in range(4)]
        >>> learn_rotation_(model, W4A4Dynamic(), data, 4, spec, steps=5).spread
        {'2': 8}
    """
    arguments.whole("steps", steps, 1)
    rate = arguments.number("learning_rate", learning_rate, 0, above=True)
    arguments.whole("seed", seed, 0, 2**63 - 1)
    measure = error_function(error)
    replay = Replay(model, data, num_batches, batch_to_inputs)
    split = num_batches - held_out_of(num_held_out, num_batches)
    args, keywords, _ = replay.inputs(replay.batches[0])
    example = keywords or tuple(args)
    targets = [replay.run(batch) for batch in replay.batches]

    def turned(more: Sequence[Tensor]) -> tuple[nn.Module, list[Turned]]:
        other = copy.deepcopy(model)
        streams: list[Turned] = []
        rotate_reversibly(other, example, spec, seed, online, [], more, streams)
        return other, streams

    def held_out_error(more: Sequence[Tensor]) -> float:
        return mean_error(_rounded(turned(more)[0], config, replay, split), targets, split, measure)

    other, streams = turned(())
    if not streams:
        raise ArgumentError("spec", "no residual stream", "writers and readers: their matrix is what is learned")
    rounded = _rounded(other, config, replay, split)
    for layer in other.modules():
        if isinstance(layer, SimulatedLayer):  # ranges that follow what turns
            scheme = replace(layer.scheme.weights, calibrator="max", two_level=False)
            layer.weight_fake_quant = fake_quantize_of_weight(layer.weight.flatten(1), scheme)
            fake = layer.input_fake_quant
            if fake is not None and not fake.follows:
                layer.input_fake_quant = FakeQuantize(fake.scheme, follows=True, device=layer.weight.device)
    found = _learn(rounded, streams, targets[:split], steps, float(rate), seed)
    before, after = held_out_error(()), held_out_error(found)
    accepted = after < before
    spread = rotate_reversibly(model, example, spec, seed, online, [], found if accepted else ())
    return LearnedRotation(before, after, accepted, spread)


def _rounded(model: nn.Module, config: Config, replay: Replay, split: int) -> Replay:
    """The model in simulation, calibrated, with the batches of a replay."""
    insert_fake_quantize_(model, config)
    calibrate_(model, replay.batches[:split], split, batch_to_inputs=replay.batch_to_inputs)
    return Replay(model, replay.batches, len(replay.batches), replay.batch_to_inputs)


def _learn(
    rounded: Replay, streams: list[Turned], targets: list[Any], steps: int, rate: float, seed: int
) -> list[Tensor]:
    """An orthogonal matrix for each stream, float64 [width, width], which follows the one that is there."""
    model = rounded.module
    names = {id(p): name for name, p in model.named_parameters()}
    found = [torch.eye(s.width, dtype=torch.float64, device=s.parameters[0][0].device) for s in streams]
    velocity = [torch.zeros_like(m) for m in found]
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    looks = {steps - 1 - i * steps // (2 * _LOOKS) for i in range(_LOOKS)}
    best, least = [m.clone() for m in found], float("inf")

    def loss_of(matrices: list[Tensor], i: int) -> Tensor:
        turned = {
            names[id(p)]: _turn(p.detach(), m, dim)
            for stream, m in zip(streams, matrices, strict=True)
            for p, dim in stream.parameters
        }
        args, keywords, padding = rounded.inputs(rounded.batches[i])
        with evaluating(model), left_out(padding):
            return _divergence(targets[i], functional_call(model, turned, args, keywords))

    for step in range(steps):
        order = order or torch.randperm(len(targets), generator=generator, device="cpu").tolist()
        with torch.enable_grad():
            leaves = [m.float().requires_grad_() for m in found]
            loss = loss_of(leaves, order.pop())
        if not bool(loss.detach().isfinite()):
            raise NonFiniteError("output of the model", "NaN or infinity", "finite values")
        gradients = torch.autograd.grad(loss, leaves)
        angle = rate * (1 - step / steps)
        for k, (stream, gradient) in enumerate(zip(streams, gradients, strict=True)):
            velocity[k] = _MOMENTUM * velocity[k] + gradient.double()
            found[k] = cayley_step(found[k], velocity[k], angle, stream.keeps_ones)
        if step in looks:
            now = sum(float(loss_of([m.float() for m in found], i)) for i in range(len(targets)))
            if now < least:
                least, best = now, [m.clone() for m in found]
    return best


def cayley_step(matrix: Tensor, gradient: Tensor, angle: float, keeps_ones: bool) -> Tensor:
    """An orthogonal matrix [d, d] (float64) one step down a gradient, orthogonal to rounding: it turns channels by
    `angle` radians in the root mean square. keeps_ones: a matrix that maps the ones to themselves still does."""
    skew = gradient @ matrix.mT - matrix @ gradient.mT
    if keeps_ones:  # no part of the turning plane may contain the ones
        mean = skew.mean(0, keepdim=True)
        skew = skew - mean - skew.mean(1, keepdim=True) + skew.mean()
    size = float(skew.norm()) / len(skew) ** 0.5
    if size == 0:
        return matrix
    half = skew * (angle / size / 2)
    eye = torch.eye(len(skew), dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(eye + half, (eye - half) @ matrix)


def _turn(parameter: Tensor, matrix: Tensor, dim: int) -> Tensor:
    return (parameter.movedim(dim, -1).to(matrix.dtype) @ matrix).movedim(-1, dim).to(parameter.dtype)


def _divergence(floats: Any, output: Any) -> Tensor:
    """Mean KL(float || rounded) over the rows of the first output; where it has no rows of classes, the squared
    difference of all tensors as a share of the float ones."""
    first, second = counted_of_output(floats), counted_of_output(output)
    if not first:
        raise ArgumentError("model", "an output without a floating-point tensor", "one that can be compared")
    if first[0].dim() >= 2 and first[0].shape[-1] >= 2:
        p, q = (F.log_softmax(t.float(), -1).flatten(0, -2) for t in (first[0], second[0]))
        return F.kl_div(q, p, log_target=True, reduction="batchmean")
    noise = [(b.float() - a.float()).square().sum() for a, b in zip(first, second, strict=True)]
    return torch.stack(noise).sum() / max(sum(float(a.double().square().sum()) for a in first), 1e-300)
