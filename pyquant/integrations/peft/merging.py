"""Adapters that become part of a layer's codes, and what the rounding to codes costs.

Nothing here imports peft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pyquant import ops
from pyquant.core import arguments
from pyquant.core.names import GIVEN_CALIBRATOR
from pyquant.core.scheme import TensorScheme
from pyquant.nn import weights
from pyquant.nn.linear_codes import float_weights
from pyquant.nn.linear_state import LinearState
from pyquant.nn.qlinear import QLinear

_KEY = "merge_error"


@dataclass(frozen=True)
class MergeError:
    """What rounding to codes cost a layer that adapters were merged into, in its weights.

    adapters    names of the merged adapters.
    relative    ||Q - M|| / ||M||, with M the real weights of the layer plus the adapters' changes, and Q the weights
                that its codes stand for now. Frobenius norms.
    sqnr_db     the same as a ratio of signal to noise in dB: -20 log10(relative).
    of_adapter  ||Q - M|| / ||M - W||, with W the weights before: which part of the adapters' change the rounding takes
                away. At 1 nothing of it is left: a change of less than half a step rounds to the codes that were there.

    Example:
        >>> MergeError(("default",), 0.01, 40.0, 0.5).sqnr_db
        40.0
    """

    adapters: tuple[str, ...]
    relative: float
    sqnr_db: float
    of_adapter: float


def merge_errors(model: nn.Module) -> dict[str, MergeError]:
    """{name of a quantised layer: MergeError} of every layer that adapters are merged into, also after
    merge_and_unload; without those that were unmerged.

    model  nn.Module. Raises ArgumentError for another object.

    Example:
        >>> merge_errors(nn.Linear(2, 2))
        {}
    """
    arguments.module("model", model)
    return {name: module.__dict__[_KEY] for name, module in model.named_modules() if _KEY in module.__dict__}


def remember(layer: nn.Module, error: MergeError | None) -> None:
    """Lets a layer keep what merge_errors tells; None: nothing."""
    layer.__dict__.pop(_KEY, None)
    if error is not None:
        layer.__dict__[_KEY] = error


def error_of(adapters: Sequence[str], before: Tensor, wanted: Tensor, after: Tensor) -> MergeError:
    """MergeError of real weights [N, K], which were `before`, should be `wanted` and are `after`."""
    noise, signal, change = (
        float(torch.linalg.vector_norm(t.double())) for t in (after - wanted, wanted, wanted - before)
    )
    relative = _ratio(noise, signal)
    sqnr = math.inf if relative == 0 else -20 * math.log10(relative)
    return MergeError(tuple(adapters), relative, sqnr, _ratio(noise, change))


def requantised(layer: QLinear, own: dict[str, Tensor], real: Tensor) -> dict[str, Tensor]:
    """The tensors of a layer's state that hold other weights, in its own scheme.

    own   the layer's state with the weights that it had.
    real  float32 [N, K], finite.
    ->    codes as state_dict spells them, with scales and zero points where the scheme has them.
    Every row gets the scales that the scheme's calibrator finds, or keeps its own where these are as good: weights that
    did not change keep their codes to the bit, whatever made their scales. (A scale per tensor is one choice for all.)
    """
    scheme = layer.scheme
    if scheme.is_float:
        return {"weight": float_weights(real, scheme)[0]}
    ours = scheme.weights
    if ours.calibrator == GIVEN_CALIBRATOR:  # the scales came with the codes, by no rule that could be used again
        ours = replace(ours, calibrator="max")
    codes, scale, zero_point = weights.quantise_weight(real, ours)
    held = own["weight_scale"], own.get("weight_zero_point")
    grouped = ("per_group", ours.group_size) if ours.group_size is not None else ("per_channel", 0)
    kept = ops.quantize(real, *held, *grouped, *ours.code_range)
    keeps = _loss(real, kept, *held, ours) <= _loss(real, codes, scale, zero_point, ours)

    def chosen(own: Tensor, new: Tensor) -> Tensor:
        return torch.where(keeps if new.dim() == 1 else keeps[:, None], own, new)

    state = {
        layer._weight_name: weights.stored(chosen(kept, codes), ours.code_type),
        "weight_scale": chosen(held[0], scale),
    }
    if zero_point is not None and held[1] is not None:
        state["weight_zero_point"] = chosen(held[1], zero_point)
    return state


def real_of(layer: QLinear, state: dict[str, Tensor]) -> Tensor:
    """float32 [N, K]: the weights that a layer's state, or the result of requantised, stands for."""
    if layer.scheme.is_float:
        return state["weight"].to(torch.float32)
    ours = layer.scheme.weights
    codes = weights.codes_of(state[layer._weight_name], layer.in_features, ours.code_type)
    return weights.dequantise_weight(codes, state["weight_scale"], state.get("weight_zero_point"), ours)


def state_of(layer: LinearState) -> dict[str, Tensor]:
    """A copy of everything that a layer holds: what _fill takes to restore it."""
    return {name: tensor.detach().clone() for name, tensor in layer._state().items()}


def _loss(real: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: TensorScheme) -> Tensor:
    """[N] squared error of each row; where all rows share one scale, [N] times that of all."""
    rows = (weights.dequantise_weight(codes, scale, zero_point, scheme) - real).double().square().sum(1)
    return rows.sum().expand_as(rows) if scheme.granularity == "per_tensor" else rows


def _ratio(noise: float, signal: float) -> float:
    if signal == 0:
        return 0.0 if noise == 0 else math.inf
    return noise / signal
