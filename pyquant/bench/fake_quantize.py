"""Fake quantisers side by side: pyquant's, torch's own, the recipes people write, other packages' where installed.

A candidate is a forward and a backward pass over one tensor; `build` returns the function of x. The floor is a clone:
it reads and writes what any fake quantiser has to.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from pyquant import ops
from pyquant.bench.peers import PeerUnavailable

FLOOR: Final = "clone"
OURS: Final = "pyquant fake_quantize"
Function = Callable[[Tensor], Tensor]
GRANULARITIES: Final = ("per_tensor", "per_channel")
Build = Callable[[Tensor, Tensor, str], Function]


@dataclass(frozen=True)
class Candidate:
    """build(x, scale, granularity) -> forward, for the granularities that it serves.

    checked  its result must be within a step of x.
    """

    name: str
    build: Build
    granularities: Sequence[str] = GRANULARITIES
    checked: bool = True


def _ours(x: Tensor, scale: Tensor, granularity: str) -> Function:
    return lambda v: ops.fake_quantize(v, scale, None, granularity)[0]


def _ours_kept(x: Tensor, scale: Tensor, granularity: str) -> Function:
    """Buffers that are allocated once, as pyquant keeps them for weights; the gradient is masked in place."""
    y, mask = torch.empty_like(x), torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: Tensor) -> Tensor:
            ops.fake_quantize_out(v, scale, None, granularity, 0, -127, 127, y, mask)
            return y.detach()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return ops.fake_quantize_backward(grads[0], mask)

    return lambda v: Kept.apply(v)  # type: ignore[no-untyped-call, no-any-return]


def _ours_dynamic(x: Tensor, scale: Tensor, granularity: str) -> Function:
    return lambda v: ops.fake_quantize_dynamic(v)[0]


def _ours_learned(x: Tensor, scale: Tensor, granularity: str) -> Function:
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


def _torch(x: Tensor, scale: Tensor, granularity: str) -> Function:
    step, zero = float(scale[0]), torch.zeros(len(scale), dtype=torch.int32, device="cpu")
    if granularity == "per_tensor":
        return lambda v: torch.fake_quantize_per_tensor_affine(v, step, 0, -127, 127)
    return lambda v: torch.fake_quantize_per_channel_affine(v, scale, zero, 0, -127, 127)


def _torch_learned(x: Tensor, scale: Tensor, granularity: str) -> Function:
    learned, zero = scale.clone().requires_grad_(), torch.zeros(len(scale), device="cpu")
    if granularity == "per_tensor":
        return lambda v: torch._fake_quantize_learnable_per_tensor_affine(v, learned, zero, -127, 127, 1.0)
    return lambda v: torch._fake_quantize_learnable_per_channel_affine(v, learned, zero, 0, -127, 127, 1.0)


def _torch_ao(kind: str, x: Tensor, scale: Tensor, granularity: str) -> Function:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ao = importlib.import_module("torch.ao.quantization")
        words = {"per_tensor": "", "per_channel": "PerChannel"}
        observer = getattr(ao, f"MovingAverage{words[granularity]}MinMaxObserver")
        scheme = getattr(torch, f"{granularity}_symmetric")
        make = getattr(ao, kind)
        module = make(observer=observer, quant_min=-127, quant_max=127, dtype=torch.qint8, qscheme=scheme)
    return lambda v: module(v)  # type: ignore[no-any-return]


def _naive(scale: Tensor) -> Function:
    """What tutorials write: the rounding error is added without a gradient."""

    def forward(v: Tensor) -> Tensor:
        limited = torch.clamp(v / scale, -127, 127)
        return (limited + (torch.round(limited) - limited).detach()) * scale

    return forward


def _naive_recipe(x: Tensor, scale: Tensor, granularity: str) -> Function:
    """With the range of each channel found anew in every call, as recipes do for weights."""
    if granularity == "per_tensor":
        return _naive(scale)
    return lambda v: _naive(v.detach().abs().amax(-1, keepdim=True) / 127)(v)


def _compiled_recipe(x: Tensor, scale: Tensor, granularity: str) -> Function:
    return torch.compile(_naive_recipe(x, scale, granularity))  # type: ignore[no-any-return]


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # an installed package may fail in any way on another torch
        raise PeerUnavailable(f"{name} cannot be imported: {error}") from None


def _modelopt(x: Tensor, scale: Tensor, granularity: str) -> Function:
    axis = None if granularity == "per_tensor" else 0
    module = _package("modelopt.torch.quantization.nn")
    config = _package("modelopt.torch.quantization.config").QuantizerAttributeConfig(num_bits=8, axis=axis)
    quantizer = module.TensorQuantizer(config)
    quantizer.amax = scale * 127 if axis is None else (scale * 127).unsqueeze(-1)
    return lambda v: quantizer(v)  # type: ignore[no-any-return]


def _torchao(x: Tensor, scale: Tensor, granularity: str) -> Function:
    qat = _package("torchao.quantization.qat")
    config = qat.IntxFakeQuantizeConfig(torch.int8, granularity, is_symmetric=True)
    quantizer = importlib.import_module("torchao.quantization.qat.fake_quantizer").IntxFakeQuantizer(config)
    return lambda v: quantizer(v)  # type: ignore[no-any-return]


def _brevitas(x: Tensor, scale: Tensor, granularity: str) -> Function:
    nn = _package("brevitas.nn")
    quant = importlib.import_module("brevitas.quant").Int8ActPerTensorFloat
    module = nn.QuantIdentity(act_quant=quant, return_quant_tensor=False)
    return lambda v: module(v)  # type: ignore[no-any-return]


_TENSOR, _CHANNEL = GRANULARITIES[:1], GRANULARITIES[1:]
CANDIDATES: Final = (
    Candidate(FLOOR, lambda x, scale, granularity: torch.clone, checked=False),
    Candidate(OURS, _ours),
    Candidate("pyquant fake_quantize_out, kept buffers", _ours_kept, _TENSOR),
    Candidate("pyquant fake_quantize_dynamic", _ours_dynamic, _CHANNEL),
    Candidate("pyquant learned scale (LSQ)", _ours_learned),
    Candidate("torch.fake_quantize_per_tensor_affine", _torch, _TENSOR),
    Candidate("torch.fake_quantize_per_channel_affine", _torch, _CHANNEL),
    Candidate("torch._fake_quantize_learnable (LSQ)", _torch_learned),
    Candidate("torch.ao FakeQuantize", partial(_torch_ao, "FakeQuantize")),
    Candidate("torch.ao FusedMovingAvgObsFakeQuantize", partial(_torch_ao, "FusedMovingAvgObsFakeQuantize")),
    Candidate("naive detach recipe", _naive_recipe, _TENSOR),
    Candidate("naive detach recipe + amax", _naive_recipe, _CHANNEL),
    Candidate("torch.compile(naive detach recipe)", _compiled_recipe, _TENSOR),
    Candidate("torch.compile(naive detach recipe + amax)", _compiled_recipe, _CHANNEL),
    Candidate("modelopt TensorQuantizer", _modelopt, _TENSOR),
    Candidate("modelopt TensorQuantizer axis=0", _modelopt, _CHANNEL),
    Candidate("brevitas QuantIdentity", _brevitas, _TENSOR, checked=False),
    Candidate("torchao IntxFakeQuantizer", _torchao, _CHANNEL),
)
