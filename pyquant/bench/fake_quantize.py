"""Fake quantisers side by side: pyquant's, torch's own, the recipes people write, other packages' where installed.

A candidate is a forward and a backward pass over one tensor; `build` returns the function of x. The floor is a clone:
it reads and writes what any fake quantiser has to.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pyquant import ops

FLOOR: Final = "clone"
OURS: Final = "pyquant fake_quantize"
Function = Callable[[Tensor], Tensor]


class Missing(Exception):
    """A candidate that cannot run here, and why."""


@dataclass(frozen=True)
class Candidate:
    """name; granularity it serves; build(x, scale) -> forward. checked: its result must be within a step of x."""

    name: str
    granularity: str
    build: Callable[[Tensor, Tensor], Function]
    checked: bool = True


def _ours(granularity: str) -> Callable[[Tensor, Tensor], Function]:
    return lambda x, scale: lambda v: ops.fake_quantize(v, scale, None, granularity)[0]


def _ours_kept(granularity: str) -> Callable[[Tensor, Tensor], Function]:
    """Buffers that are allocated once, as pyquant keeps them for weights; the gradient is masked in place."""

    def build(x: Tensor, scale: Tensor) -> Function:
        y, mask = torch.empty_like(x), torch.empty((x.numel() + 7) // 8, dtype=torch.uint8)

        class Kept(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, v: Tensor) -> Tensor:
                ops.fake_quantize_out(v, scale, None, granularity, 0, -127, 127, y, mask)
                return y.detach()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return ops.fake_quantize_backward(grads[0], mask)

        return lambda v: Kept.apply(v)  # type: ignore[no-untyped-call, no-any-return]

    return build


def _ours_dynamic(x: Tensor, scale: Tensor) -> Function:
    return lambda v: ops.fake_quantize_dynamic(v)[0]


def _ours_learned(granularity: str) -> Callable[[Tensor, Tensor], Function]:
    def build(x: Tensor, scale: Tensor) -> Function:
        learned = scale.clone().requires_grad_()

        class Learned(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, v: Tensor, s: Tensor) -> Tensor:
                ctx.save_for_backward(v, s)
                return ops.fake_quantize(v, s, None, granularity)[0]

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
                v, s = ctx.saved_tensors
                return ops.fake_quantize_lsq_backward(grads[0], v, s, None, granularity)

        return lambda v: Learned.apply(v, learned)  # type: ignore[no-untyped-call, no-any-return]

    return build


def _torch_tensor(x: Tensor, scale: Tensor) -> Function:
    step = float(scale)
    return lambda v: torch.fake_quantize_per_tensor_affine(v, step, 0, -127, 127)


def _torch_channel(x: Tensor, scale: Tensor) -> Function:
    zero = torch.zeros(len(scale), dtype=torch.int32)
    return lambda v: torch.fake_quantize_per_channel_affine(v, scale, zero, 0, -127, 127)


def _torch_learned_tensor(x: Tensor, scale: Tensor) -> Function:
    learned, zero = scale.clone().requires_grad_(), torch.zeros(1)
    return lambda v: torch._fake_quantize_learnable_per_tensor_affine(v, learned, zero, -127, 127, 1.0)


def _torch_learned_channel(x: Tensor, scale: Tensor) -> Function:
    learned, zero = scale.clone().requires_grad_(), torch.zeros(len(scale))
    return lambda v: torch._fake_quantize_learnable_per_channel_affine(v, learned, zero, 0, -127, 127, 1.0)


def _torch_ao(fused: bool, per_channel: bool) -> Callable[[Tensor, Tensor], Function]:
    def build(x: Tensor, scale: Tensor) -> Function:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ao = importlib.import_module("torch.ao.quantization")
            observer = ao.MovingAveragePerChannelMinMaxObserver if per_channel else ao.MovingAverageMinMaxObserver
            kind = ao.FusedMovingAvgObsFakeQuantize if fused else ao.FakeQuantize
            scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
            module = kind(observer=observer, quant_min=-127, quant_max=127, dtype=torch.qint8, qscheme=scheme)
        return lambda v: module(v)  # type: ignore[no-any-return]

    return build


def _naive(scale: Tensor) -> Function:
    """What tutorials write: the rounding error is added without a gradient."""

    def forward(v: Tensor) -> Tensor:
        limited = torch.clamp(v / scale, -127, 127)
        return (limited + (torch.round(limited) - limited).detach()) * scale

    return forward


def _naive_detach(x: Tensor, scale: Tensor) -> Function:
    return _naive(scale if scale.numel() == 1 else scale.unsqueeze(-1))


def _naive_own_range(x: Tensor, scale: Tensor) -> Function:
    return lambda v: _naive(v.detach().abs().amax(-1, keepdim=True) / 127)(v)


def _compiled(build: Callable[[Tensor, Tensor], Function]) -> Callable[[Tensor, Tensor], Function]:
    return lambda x, scale: torch.compile(build(x, scale))


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # an installed package may fail in any way on another torch
        raise Missing(f"{name} cannot be imported: {error}") from None


def _modelopt(axis: int | None) -> Callable[[Tensor, Tensor], Function]:
    def build(x: Tensor, scale: Tensor) -> Function:
        module = _package("modelopt.torch.quantization.nn")
        config = _package("modelopt.torch.quantization.config").QuantizerAttributeConfig(num_bits=8, axis=axis)
        quantizer = module.TensorQuantizer(config)
        quantizer.amax = scale * 127 if axis is None else (scale * 127).unsqueeze(-1)
        return lambda v: quantizer(v)  # type: ignore[no-any-return]

    return build


def _torchao(x: Tensor, scale: Tensor) -> Function:
    qat = _package("torchao.quantization.qat")
    config = qat.IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
    quantizer = importlib.import_module("torchao.quantization.qat.fake_quantizer").IntxFakeQuantizer(config)
    return lambda v: quantizer(v)  # type: ignore[no-any-return]


def _brevitas(x: Tensor, scale: Tensor) -> Function:
    nn = _package("brevitas.nn")
    quant = importlib.import_module("brevitas.quant").Int8ActPerTensorFloat
    module = nn.QuantIdentity(act_quant=quant, return_quant_tensor=False)
    return lambda v: module(v)  # type: ignore[no-any-return]


CANDIDATES: Final = (
    Candidate(FLOOR, "per_tensor", lambda x, scale: torch.clone, checked=False),
    Candidate(OURS, "per_tensor", _ours("per_tensor")),
    Candidate("pyquant fake_quantize_out, kept buffers", "per_tensor", _ours_kept("per_tensor")),
    Candidate("pyquant learned scale (LSQ)", "per_tensor", _ours_learned("per_tensor")),
    Candidate("torch.fake_quantize_per_tensor_affine", "per_tensor", _torch_tensor),
    Candidate("torch._fake_quantize_learnable (LSQ)", "per_tensor", _torch_learned_tensor),
    Candidate("torch.ao FakeQuantize", "per_tensor", _torch_ao(False, False)),
    Candidate("torch.ao FusedMovingAvgObsFakeQuantize", "per_tensor", _torch_ao(True, False)),
    Candidate("naive detach recipe", "per_tensor", _naive_detach),
    Candidate("torch.compile(naive detach recipe)", "per_tensor", _compiled(_naive_detach)),
    Candidate("modelopt TensorQuantizer", "per_tensor", _modelopt(None)),
    Candidate("brevitas QuantIdentity", "per_tensor", _brevitas, checked=False),
    Candidate(FLOOR, "per_channel", lambda x, scale: torch.clone, checked=False),
    Candidate(OURS, "per_channel", _ours("per_channel")),
    Candidate("pyquant fake_quantize_dynamic", "per_channel", _ours_dynamic),
    Candidate("pyquant learned scale (LSQ)", "per_channel", _ours_learned("per_channel")),
    Candidate("torch.fake_quantize_per_channel_affine", "per_channel", _torch_channel),
    Candidate("torch._fake_quantize_learnable (LSQ)", "per_channel", _torch_learned_channel),
    Candidate("torch.ao FakeQuantize", "per_channel", _torch_ao(False, True)),
    Candidate("torch.ao FusedMovingAvgObsFakeQuantize", "per_channel", _torch_ao(True, True)),
    Candidate("naive detach recipe + amax", "per_channel", _naive_own_range),
    Candidate("torch.compile(naive detach recipe + amax)", "per_channel", _compiled(_naive_own_range)),
    Candidate("modelopt TensorQuantizer axis=0", "per_channel", _modelopt(0)),
    Candidate("torchao IntxFakeQuantizer", "per_channel", _torchao),
)
