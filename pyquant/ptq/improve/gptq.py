"""gptq_: codes of weights that make up for each other's rounding, from the second moments of a layer's inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant.core import arguments
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.nn.swap import Undo, undone_on_error
from pyquant.nn.weights import dequantise_weight
from pyquant.numerics.qparams import scale_recip
from pyquant.numerics.quantize import code_from_real
from pyquant.ptq.improve.replay import BatchToInputs, Replay, simulated_layers, tensors_of
from pyquant.simulate.fake_quantize import FakeQuantize, floating_point
from pyquant.simulate.linear import FakeQuantLinear

ErrorFunction = Callable[[Any, Any], float]
_BLOCK: Final = 128  # columns whose updates are gathered before the rest of the matrix sees them (the paper's B)


@dataclass(frozen=True)
class GptqLayer:
    """What became of one layer: the model's held-out error before and after its new codes, and whether they stay."""

    error_before: float
    error_after: float
    accepted: bool


@torch.no_grad()
def gptq_(
    model: nn.Module,
    data: Iterable[Any],
    num_batches: int,
    damp: float = 0.01,
    act_order: bool = False,
    *,
    error: str | ErrorFunction = "mse",
    num_held_out: int | None = None,
    batch_to_inputs: BatchToInputs | None = None,
) -> dict[str, GptqLayer]:
    """Choose the codes of the weights again, layer by layer in the order of their calls, in place.

    model         after insert_fake_quantize_ and calibration; what each layer sees are the outputs of the layers
                  before it with their codes chosen, inputs rounded as the schemes say.
    data          batches; num_batches of them are used, and num_held_out of these (None: a quarter, at least one) only
                  to judge. They need not have labels.
    damp          added to the diagonal of the second moments, as a share of its mean.
    act_order     columns with the largest second moment first.
    error         of the model's held-out outputs against those of the float model: 'mse' (relative mean square, any
                  output), 'kl' (in nats, of logits in the last dimension of the first output), or a function
                  (float output, output) -> float. A layer keeps its codes where the error would rise.
    batch_to_inputs   as in pyquant.calibrate.run_calibration.
    ->   {layer: GptqLayer}. Scales and zero points stay those of the scheme (max, MSE, ...), fixed from here on; the
         layer's weights become the real numbers that the codes stand for, in a parameter of its own, so that convert_
         finds exactly these codes. A layer that the data never reaches is not listed and keeps its weights.
    Raises ArgumentError for wrong arguments, CalibrationError for too few batches; on any exception the model is as
    before.
    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
    arXiv 2210.17323.

    Example:
        >>> from pyquant import W4A16, insert_fake_quantize_
        >>> model = insert_fake_quantize_(nn.Sequential(nn.Linear(8, 4)), W4A16(group_size=None))
        >>> list(gptq_(model, [torch.randn(16, 8) for _ in range(4)], num_batches=4))
        ['0']
    """
    layers = simulated_layers(model)
    damp = arguments.number("damp", damp, 0, above=True)
    arguments.flag("act_order", act_order)
    also = " or a function (float output, output) -> float"
    measure = error if callable(error) else _ERRORS[arguments.one_of("error", error, _ERRORS, also)]
    replay = Replay(model, data, num_batches, batch_to_inputs)
    held_out = max(1, num_batches // 4) if num_held_out is None else num_held_out
    if type(held_out) is not int or not 1 <= held_out < num_batches:
        raise ArgumentError("num_held_out", repr(held_out), f"1 to {num_batches - 1}: num_batches is {num_batches}")
    split = num_batches - held_out
    with floating_point(model):
        calls = replay.calls(layers)
        targets = [replay.run(batch) for batch in replay.batches[split:]]

    def held_out_error() -> float:
        pairs = zip(targets, replay.batches[split:], strict=True)
        losses = [_one_number(measure(floats, replay.run(batch))) for floats, batch in pairs]
        return sum(losses) / held_out

    results: dict[str, GptqLayer] = {}
    put_back: dict[str, Undo] = {
        name: partial(_put_codes, layers[name], layers[name].weight, layers[name].weight_fake_quant) for name in calls
    }
    with undone_on_error(list(put_back.values())):
        before = held_out_error()
        for name, count in calls.items():
            layer = layers[name]
            _choose_codes(layer, _second_moments(replay, layer, count, split), damp, act_order)
            after = held_out_error()
            results[name] = GptqLayer(before, after, after <= before)
            if after <= before:
                before = after
            else:
                put_back[name]()
    return results


@torch.no_grad()
def gptq_codes(
    weight: Tensor,
    moments: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    *,
    qmin: int,
    qmax: int,
    damp: float = 0.01,
    act_order: bool = False,
) -> Tensor:
    """Codes of one weight matrix: column by column, each column's error made up for by those that follow.

    weight      float [N, K].     moments   float [K, K]: X^T X of the layer's inputs X [M, K], any factor.
    scale       float32 [N] or [N, K / group_size], > 0.     zero_point   int32, shape of scale, or None for 0.
    ->          int8 [N, K] in [qmin, qmax]. Inputs that are always zero leave their column to plain rounding.
    Computed in float64. Raises ArgumentError for shapes that do not fit, NonFiniteError for moments with NaN.
    Source: Frantar et al., arXiv 2210.17323, algorithm 1.

    Example:
        >>> gptq_codes(torch.tensor([[0.6, 0.6]]), torch.ones(2, 2), torch.ones(1), qmin=-7, qmax=7).tolist()
        [[1, 0]]
    """
    n, k = weight.shape
    groups = 1 if scale.dim() == 1 else scale.shape[1]
    if moments.shape != (k, k) or scale.shape[0] != n or k % groups != 0:
        got = f"moments {list(moments.shape)}, scale {list(scale.shape)}"
        raise ArgumentError("moments", got, f"[{k}, {k}], and [{n}] or [{n}, groups]: weight is [{n}, {k}]")
    if not bool(moments.isfinite().all()):
        raise NonFiniteError("moments", "NaN or infinity", "finite numbers")
    hessian = moments.double()
    order = hessian.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(k)
    order = order.to(weight.device)
    upper = _inverse_factor(hessian[order][:, order], damp)
    left = weight.double()[:, order].clone()
    codes = torch.empty(n, k, dtype=torch.int8, device=weight.device)
    recip = scale_recip(scale)
    group_of = (order // (k // groups)).tolist()
    for start in range(0, k, _BLOCK):
        stop = min(start + _BLOCK, k)
        errors = torch.empty(n, stop - start, dtype=torch.float64, device=weight.device)
        for j in range(start, stop):
            at = (slice(None),) if scale.dim() == 1 else (slice(None), group_of[j])
            zero = None if zero_point is None else zero_point[at]
            code = code_from_real(left[:, j].float(), recip[at], zero, qmin, qmax)
            steps = code.to(torch.int32) if zero is None else code.to(torch.int32) - zero
            error = (left[:, j] - steps.double() * scale[at].double()) / upper[j, j]
            left[:, j + 1 : stop] -= error[:, None] * upper[j, j + 1 : stop]
            codes[:, j], errors[:, j - start] = code, error
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return codes[:, order.argsort()].contiguous()


def _inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """Upper U with U^T U = (H + damping)^-1; its row j holds what column j's error costs the columns after it."""
    diagonal = hessian.diagonal()
    unseen = diagonal <= 0
    hessian = hessian + torch.diag(unseen.double())  # an input that is always zero: nothing to make up for
    mean = float(diagonal.mean())
    for factor in (1, 10, 100, 1000):  # inputs that depend on each other need more damping than asked for
        damped = hessian + torch.eye(len(hessian), dtype=torch.float64, device=hessian.device) * (damp * factor * mean)
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            upper, info = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if int(info) == 0:
                return upper
    raise ArgumentError("damp", damp, "a larger share: the second moments are singular")


def _second_moments(replay: Replay, layer: FakeQuantLinear, calls: int, batches: int) -> Tensor:
    """float64 [K, K]: the sum of x x^T over all rows that the layer multiplies with its weights."""
    total = torch.zeros(layer.in_features, layer.in_features, dtype=torch.float64, device=layer.weight.device)

    def see(x: Tensor, _: Tensor) -> None:
        if layer.input_fake_quant is not None:
            x = layer.input_fake_quant(x)
        rows = x.reshape(-1, layer.in_features).float()
        total.add_(rows.t() @ rows)

    replay.watch(layer, calls, see, 0, batches)
    return total


def _choose_codes(layer: FakeQuantLinear, moments: Tensor, damp: float, act_order: bool) -> None:
    scheme, weight = layer.scheme.weights, layer.weight
    scale, zero_point = layer.weight_fake_quant.qparams(weight)
    fixed = FakeQuantize(scheme, tuple(scale.shape), follows=False, device=weight.device)
    fixed.set_qparams(scale, zero_point)
    if scheme.granularity == "per_tensor":
        scale = scale.expand(layer.out_features)
        zero_point = None if zero_point is None else zero_point.expand(layer.out_features)
    qmin, qmax = scheme.code_range
    codes = gptq_codes(weight, moments, scale, zero_point, qmin=qmin, qmax=qmax, damp=damp, act_order=act_order)
    real = dequantise_weight(codes, scale.contiguous(), zero_point, scheme)
    new = nn.Parameter(real.to(weight.dtype), requires_grad=weight.requires_grad)
    _put_codes(layer, new, fixed.train(layer.training))


def _put_codes(layer: FakeQuantLinear, weight: nn.Parameter, fake: FakeQuantize) -> None:
    layer.weight, layer.weight_fake_quant = weight, fake


def _one_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError("error", f"a function that returned {arguments.shown(value)}", "one number") from None


def _relative_mse(floats: Any, output: Any) -> float:
    pairs = list(zip(tensors_of(floats), tensors_of(output), strict=True))
    if not pairs:
        raise ArgumentError("error", "'mse'", "a function: the model's output holds no floating-point tensor")
    noise = sum(float((b.double() - a.double()).square().sum()) for a, b in pairs)
    return noise / max(sum(float(a.double().square().sum()) for a, _ in pairs), 1e-300)


def _kl(floats: Any, output: Any) -> float:
    """Mean KL(float || quantised) in nats over all rows of the first output."""
    if not tensors_of(floats):
        raise ArgumentError("error", "'kl'", "a function: the model's output holds no floating-point tensor")
    p, q = (F.log_softmax(tensors_of(o)[0].double(), -1).flatten(0, -2) for o in (floats, output))
    return float(F.kl_div(q, p, log_target=True, reduction="batchmean"))


_ERRORS: Final[dict[str, ErrorFunction]] = {"mse": _relative_mse, "kl": _kl}
