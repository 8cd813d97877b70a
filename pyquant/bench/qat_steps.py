"""Whole training steps with fake-quantised Linear layers: SGD with momentum on an MLP and on a small transformer."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pyquant import ops
from pyquant.bench.fake_quantize import _naive

PLAIN: Final = "plain fp32"
_STEP: Final = 0.03  # of the activations' static scale


class _Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int = 384, heads: int = 6, hidden: int = 1536) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1024)
    ), torch.randn(256, 1024, device="cpu")


def _transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(_Block() for _ in range(6))), torch.randn(8, 64, 384, device="cpu")


MODELS: Final[dict[str, Callable[[], tuple[nn.Module, Tensor]]]] = {"mlp": _mlp, "transformer": _transformer}


class _KeptWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, y: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        ops.fake_quantize_dynamic_out(weight, "per_channel", 0, True, -127, 127, y, scale, zero_point)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None


class _FakeLinear(nn.Module):
    """The Linear of a variant: how its input and its weight are fake-quantised."""

    def __init__(self, linear: nn.Linear, x: Callable[[Tensor], Tensor], weight: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.fake_x, self.fake_weight = linear.weight, linear.bias, x, weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.fake_x(x), self.fake_weight(self.weight), self.bias)


@dataclass(frozen=True)
class Variant:
    """prepare(model, x) -> the model that is trained, on batches like x."""

    name: str
    prepare: Callable[[nn.Module, Tensor], nn.Module]


def _swap(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    for name, child in model.named_children():
        if isinstance(child, nn.Linear):
            setattr(model, name, make(child))
        else:
            _swap(child, make)
    return model


def _pyquant_ops(linear: nn.Linear) -> nn.Module:
    scale = torch.tensor([_STEP], device="cpu")
    buffers = (
        torch.empty_like(linear.weight),
        torch.empty(len(linear.weight), device="cpu"),
        torch.empty(len(linear.weight), device="cpu").int(),
    )
    return _FakeLinear(
        linear,
        lambda x: ops.fake_quantize(x, scale)[0],
        lambda w: _KeptWeight.apply(w, *buffers),  # type: ignore[no-untyped-call]
    )


def _torch_static(linear: nn.Linear) -> nn.Module:
    scale = (linear.weight.detach().abs().amax(1) / 127).clone()
    zero = torch.zeros(len(scale), dtype=torch.int32, device="cpu")
    return _FakeLinear(
        linear,
        lambda x: torch.fake_quantize_per_tensor_affine(x, _STEP, 0, -127, 127),
        lambda w: torch.fake_quantize_per_channel_affine(w, scale, zero, 0, -127, 127),
    )


def _naive_linear(linear: nn.Linear) -> nn.Module:
    scale = torch.tensor([_STEP], device="cpu")
    return _FakeLinear(linear, _naive(scale), lambda w: _naive(w.detach().abs().amax(1, keepdim=True) / 127)(w))


def _torch_ao(linear: nn.Linear) -> nn.Module:
    ao = importlib.import_module("torch.ao.quantization")
    config = ao.get_default_qat_qconfig("fbgemm")
    return _FakeLinear(linear, config.activation(), config.weight())


def _prepare_qat(model: nn.Module, x: Tensor) -> nn.Module:
    """pyquant.prepare_qat_ as a user calls it: W8A8, static inputs, after calibration."""
    pyquant = importlib.import_module("pyquant")  # measure does not stand above qat
    model = pyquant.insert_fake_quantize_(nn.Sequential(model), pyquant.W8A8())
    pyquant.QuantizationCalibrator().calibrate_model(model, [x], num_calib_batches=1)
    prepared: nn.Module = pyquant.prepare_qat_(model)
    return prepared


VARIANTS: Final = (
    Variant(PLAIN, lambda model, _: model),
    Variant("pyquant.prepare_qat_", _prepare_qat),
    Variant("pyquant ops, kept weight buffers", lambda model, _: _swap(model, _pyquant_ops)),
    Variant("torch fake_quantize, static scales", lambda model, _: _swap(model, _torch_static)),
    Variant("torch.ao default QAT", lambda model, _: _swap(model, _torch_ao)),
    Variant("naive detach recipe + weight amax", lambda model, _: _swap(model, _naive_linear)),
)


def step_of(model: str, variant: Variant) -> Callable[[], Tensor]:
    """A training step of the model under the variant: every variant starts from the same weights."""
    torch.manual_seed(0)
    plain, x = MODELS[model]()
    target = torch.randn(x.shape, device="cpu")
    trained = variant.prepare(copy.deepcopy(plain), x).train()
    optimizer = torch.optim.SGD(trained.parameters(), lr=1e-5, momentum=0.9)

    def step() -> Tensor:
        loss = F.mse_loss(trained(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
