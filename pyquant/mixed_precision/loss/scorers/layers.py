"""What metrics need of single layers: their calls in the float model, and what a format does to weights and inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyquant import ops
from pyquant.errors import UnsupportedError
from pyquant.mixed_precision.choices.switchable import SwitchableModel
from pyquant.mixed_precision.choices.watch import hooked
from pyquant.nn.qconv import QConv2d

# see(layer's name, its input, its output) -> another output, or None
See = Callable[[str, Tensor, Tensor], Tensor | None]


@contextmanager
def watching(switchable: SwitchableModel, see: See, layers: tuple[str, ...] | None = None) -> Iterator[nn.Module]:
    """The float model with see(name, x, y) at every call of its layers (None: those of all groups)."""

    def watch(name: str) -> Callable[..., Tensor | None]:
        return lambda _, args, kwargs, y: see(name, args[0] if args else next(iter(kwargs.values())), y)

    watched = [(switchable.layer(name, 0), watch(name)) for name in layers or switchable.group_of]
    fast = torch.backends.mha.get_fastpath_enabled()
    with switchable.using(switchable.uniform(0)) as model, hooked(watched):
        # torch's encoder layers have an inference path that reads the weights of their layers without calling them
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield model
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def gradients_of(model: nn.Module, tensors: list[nn.Parameter]) -> Iterator[None]:
    """Gradients for these parameters of the model and for no others."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    chosen = {id(t) for t in tensors}
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(id(parameter) in chosen)
        with torch.enable_grad():
            yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def no_gradients(what: str) -> UnsupportedError:
    """The error of a model through which no gradient can flow."""
    return UnsupportedError(
        f"no gradient reaches {what}: the model's forward runs without gradients; use metric 'kl', "
        "'noise' or 'error', which need none"
    )


def weight_change(float_layer: nn.Module, quantised: Any) -> Tensor:
    """Weights as the integer layer means them, minus the float ones: float64, the shape of the weights."""
    means: Tensor = quantised.to_float(torch.float32).weight
    return means.detach().double() - float_layer.weight.detach().double()  # type: ignore[operator,union-attr]


def weight_steps(quantised: Any) -> Tensor:
    """The size of one code step at every weight, float32, the shape of the float weights."""
    scale = quantised.weight_scale_.reshape(quantised.weight_scale_.shape[0], -1)
    matrix: Tensor = scale.repeat_interleave(quantised.in_features // scale.shape[1], 1)
    return quantised.patches.image(matrix) if isinstance(quantised, QConv2d) else matrix


def rounded_input(quantised: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """(the input as the integer layer reads it, its code step, which broadcasts to it); steps of 0: it stays float."""
    scheme = quantised.scheme.inputs
    if scheme is None:
        return x, torch.zeros((), dtype=torch.float32, device=x.device)
    group = scheme.group_size or 0
    if not scheme.dynamic:
        zero = None if scheme.symmetric else quantised.input_zero_point_.reshape(1)
        scale = quantised.input_scale_.reshape(1)
        return ops.fake_quantize(x, scale, zero, "per_tensor", 0, *scheme.code_range)[0], scale
    rows = x
    if isinstance(quantised, QConv2d):  # one range an image
        rows = x.reshape(x.shape[0] if x.dim() == 4 else 1, -1)
    y, scale, _ = ops.fake_quantize_dynamic(
        rows.contiguous(), scheme.granularity, group, scheme.symmetric, *scheme.code_range
    )
    if scheme.granularity == "per_tensor":
        step = scale.reshape(())
    elif group:
        step = scale.repeat_interleave(group, -1)
    else:
        step = scale.reshape(*rows.shape[:-1], 1)
    return y.reshape(x.shape), torch.broadcast_to(step, rows.shape).reshape(x.shape)
