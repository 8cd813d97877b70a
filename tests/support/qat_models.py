"""What the QAT tests share: schemes, small models, calibration of prepared ones."""

from __future__ import annotations

import warnings

import torch
from problems import BASE_SEED, Draw
from torch import Tensor, nn

from pyquant.core.presets import W4A4, W4A8, W4A16, W8A8, W8A16, W4A4Dynamic, W4A8Dynamic, W8A8Dynamic
from pyquant.core.scheme import QScheme, TensorScheme
from pyquant.qat.guards import QATWarning
from pyquant.qat.prepare import prepare_qat_
from pyquant.simulate.fake_quantize import FakeQuantize


def static_weights(scheme: QScheme, calibrator: str = "mse") -> QScheme:
    """The scheme with weights whose range is calibrated once, so that training can clip."""
    return QScheme(TensorScheme(**scheme.weights.to_dict() | {"calibrator": calibrator}), scheme.inputs, scheme.outputs)


def per_tensor_weights(scheme: QScheme) -> QScheme:
    return QScheme(
        TensorScheme(**scheme.weights.to_dict() | {"granularity": "per_tensor", "group_size": None}), scheme.inputs
    )


SCHEMES = {
    name or str(scheme): scheme
    for scheme, name in (
        (W8A8(), ""),
        (W8A8(symmetric_inputs=False), ""),
        (W8A8Dynamic(), ""),
        (W8A8Dynamic(symmetric_inputs=False), ""),
        (W4A8(16), ""),
        (W4A8(None), ""),
        (W4A8Dynamic(16), ""),
        (W4A4(), ""),
        (W4A4(symmetric_inputs=False), ""),
        (W4A4Dynamic(), ""),
        (W8A16(), ""),
        (W4A16(16), ""),
        (W4A16(16, symmetric=False), ""),
        (static_weights(W4A8(None)), "W4A8 mse weights"),
        (per_tensor_weights(W8A8()), "W8A8 per-tensor weights"),
        (static_weights(per_tensor_weights(W4A8(None))), "W4A8 per-tensor mse weights"),
    )
}
INTEGER = {name: s for name, s in SCHEMES.items() if s.inputs is not None and not s.weights.group_size}


def draw(*path: object) -> Draw:
    return Draw(BASE_SEED, "qat", *path)


def linear(k: int, n: int, *path: object, bias: bool = True) -> nn.Linear:
    """A Linear with drawn weights that look trained."""
    d = draw("linear", k, n, *path)
    layer = nn.Linear(k, n, bias)
    with torch.no_grad():
        layer.weight.copy_(d.normal(n, k) * 0.2)
        if bias:
            layer.bias.copy_(d.normal(n) * 0.1)
    return layer


def mlp(*path: object) -> nn.Sequential:
    return nn.Sequential(linear(32, 48, 0, *path), nn.ReLU(), linear(48, 16, 1, *path))


def calibrate(model: nn.Module, x: Tensor, share: float = 0.8) -> nn.Module:
    """Ranges for every static quantiser: `share` of the largest magnitude that it sees, so that some is clipped."""
    found: dict[FakeQuantize, Tensor] = {}
    fakes = [m for m in model.modules() if isinstance(m, FakeQuantize) and not m.follows and not m.is_calibrated]
    for fake in fakes:
        fake.mode = "off"
    handles = [f.register_forward_pre_hook(lambda f, args: found.__setitem__(f, args[0].detach())) for f in fakes]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    for fake in fakes:
        fake.mode = "quantize"
        seen = found[fake].float()
        qmin, qmax = fake.scheme.code_range
        if fake.scheme.symmetric:
            fake.set_qparams((seen.abs().max() * share / qmax).reshape(1))
        else:
            low, high = seen.min().clamp_max(0) * share, seen.max().clamp_min(0) * share
            scale = (high - low) / (qmax - qmin)
            fake.set_qparams(scale.reshape(1), (qmin - torch.round(low / scale)).to(torch.int32).reshape(1))
    return model


def prepared(model: nn.Module, scheme: object, x: Tensor | None = None, **options: object) -> nn.Module:
    """prepare_qat_ without its warnings, calibrated on x."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QATWarning)
        prepare_qat_(model, scheme, **options)
    return model if x is None else calibrate(model, x)


def train(model: nn.Module, x: Tensor, target: Tensor, steps: int = 3, lr: float = 0.05) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
