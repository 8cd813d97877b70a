"""Named rivals behind one signature: each builds a callable for one GEMM problem, or says why it cannot.

Every peer returns [M, N] for the same x, w and bias, so the harness can check that it computes what it claims.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from pyquant.measure.floors import random_codes

Candidate = Callable[[], torch.Tensor]


class PeerUnavailable(Exception):
    """A peer that cannot run here; the message is the reason."""


@dataclass
class GemmCase:
    """One linear problem: x [m, k], w [n, k], bias [n] in float32, Gaussian, on `device`; other forms made once."""

    m: int
    k: int
    n: int
    device: torch.device
    seed: int = 0
    with_bias: bool = True

    def _randn(self, salt: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed * 7919 + salt)
        return torch.randn(*shape, generator=generator, device=self.device)

    @cached_property
    def x(self) -> torch.Tensor:
        return self._randn(1, self.m, self.k)

    @cached_property
    def w(self) -> torch.Tensor:
        return self._randn(2, self.n, self.k) / math.sqrt(max(1, self.k))

    @cached_property
    def bias(self) -> torch.Tensor | None:
        return self._randn(3, self.n) if self.with_bias else None

    @cached_property
    def w_codes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 codes [n, k] and scales [n] of the weights, symmetric per channel."""
        scale = self.w.abs().amax(1).clamp_min(1e-8) / 127
        return (self.w / scale[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale

    def linear(self) -> torch.nn.Linear:
        """The problem as a float32 nn.Linear."""
        layer = torch.nn.Linear(self.k, self.n, bias=self.with_bias, device="meta")
        layer.weight = torch.nn.Parameter(self.w, requires_grad=False)
        if self.bias is not None:
            layer.bias = torch.nn.Parameter(self.bias, requires_grad=False)
        return layer


@dataclass(frozen=True)
class Peer:
    """A rival.

    devices          the device types it is meant for.
    w_bits, x_bits   size of its weights and of its input and output in memory; peak: the ceiling that binds it.
    gemm_only        takes ready codes, no quantise, no epilogue: a bound, not an equal.
    """

    name: str
    devices: tuple[str, ...]
    build: Callable[[GemmCase], Candidate]
    w_bits: int
    x_bits: int
    peak: str
    gemm_only: bool = False


def _f_linear(dtype: torch.dtype) -> Callable[[GemmCase], Candidate]:
    def build(case: GemmCase) -> Candidate:
        x, w = case.x.to(dtype), case.w.to(dtype)
        bias = None if case.bias is None else case.bias.to(dtype)
        return lambda: F.linear(x, w, bias)

    return build


def _mm(dtype: torch.dtype) -> Callable[[GemmCase], Candidate]:
    def build(case: GemmCase) -> Candidate:
        x, wt = case.x.to(dtype), case.w.to(dtype).t()
        return lambda: torch.mm(x, wt)

    return build


def _onednn_prepacked(dtype: torch.dtype) -> Callable[[GemmCase], Candidate]:
    def build(case: GemmCase) -> Candidate:
        if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            raise PeerUnavailable("this torch has no mkldnn._reorder_linear_weight")
        x, bias = case.x.to(dtype), None if case.bias is None else case.bias.to(dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(case.w.to(dtype), case.m)
        op = torch.ops.mkldnn._linear_pointwise.default
        return lambda: op(x, packed, bias, "none", [], "")

    return build


def _torch_ao_dynamic(engine: str) -> Callable[[GemmCase], Candidate]:
    def build(case: GemmCase) -> Candidate:
        from torch.ao.quantization import quantize_dynamic

        if engine not in torch.backends.quantized.supported_engines:
            raise PeerUnavailable(f"this torch was built without {engine}")
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = engine
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                quantise: Callable[..., torch.nn.Module] = quantize_dynamic
                module = quantise(torch.nn.Sequential(case.linear()), {torch.nn.Linear}, dtype=torch.qint8)
        finally:
            torch.backends.quantized.engine = before
        x = case.x
        layer = module.get_submodule("0")  # without the container: its own call costs a microsecond
        return lambda: layer(x)

    return build


def _int_mm_eager(case: GemmCase) -> Candidate:
    x, bias, (codes, scale) = case.x, case.bias, case.w_codes
    wt = codes.t()

    def run() -> torch.Tensor:
        x_scale = x.abs().amax(1, keepdim=True).div(127).clamp_min(1e-8)
        x_q = (x / x_scale).round_().clamp_(-127, 127).to(torch.int8)
        y = torch._int_mm(x_q, wt).float().mul_(x_scale).mul_(scale)
        return y if bias is None else y.add_(bias)

    return run


def _int_mm_codes(case: GemmCase) -> Candidate:
    x_q, wt = random_codes((case.m, case.k), case.device), case.w_codes[0].t()
    return lambda: torch._int_mm(x_q, wt)


def _scaled_mm(case: GemmCase) -> Candidate:
    fp8 = torch.float8_e4m3fn
    x_scale = case.x.abs().amax(1, keepdim=True).clamp_min(1e-8) / 448
    w_scale = case.w.abs().amax(1, keepdim=True).clamp_min(1e-8) / 448
    x_q, wt_q = (case.x / x_scale).to(fp8), (case.w / w_scale).to(fp8).t()
    ws = w_scale.t()
    return lambda: torch._scaled_mm(x_q, wt_q, scale_a=x_scale, scale_b=ws, out_dtype=torch.bfloat16)


def _int4pack_cuda(case: GemmCase) -> Candidate:
    group = 128
    if case.k % group:
        raise PeerUnavailable(f"K = {case.k}, needs a multiple of {group}")
    grouped = case.w.view(case.n, -1, group)
    scale = grouped.abs().amax(2).clamp_min(1e-8) / 7
    codes = ((grouped / scale[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8).view(case.n, case.k)
    packed = torch._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).contiguous(), 8)
    scale_zero = torch.stack([scale.t(), torch.zeros_like(scale.t())], dim=2).to(torch.bfloat16).contiguous()
    x = case.x.to(torch.bfloat16)
    return lambda: torch._weight_int4pack_mm(x, packed, group, scale_zero)


def _torchao(config: str) -> Callable[[GemmCase], Candidate]:
    def build(case: GemmCase) -> Candidate:
        try:
            from torchao import quantization
        except ImportError as error:
            raise PeerUnavailable(f"torchao is not installed ({error})") from None
        module = torch.nn.Sequential(case.linear())
        quantization.quantize_(module, getattr(quantization, config)())
        x, layer = case.x, module[0]
        return lambda: layer(x)

    return build


FP32 = "F.linear fp32"
FBGEMM = "torch.ao dynamic int8 (fbgemm)"
INT_MM_CODES = "torch._int_mm (codes in, int32 out)"
MM_BF16 = "torch.mm bf16"
_CPU, _CUDA, _BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")

PEERS: tuple[Peer, ...] = (
    Peer(FP32, _BOTH, _f_linear(torch.float32), 32, 32, "fp32"),
    Peer("F.linear bf16", _BOTH, _f_linear(torch.bfloat16), 16, 16, "bf16"),
    Peer("F.linear fp16", _BOTH, _f_linear(torch.float16), 16, 16, "bf16"),
    Peer("oneDNN prepacked fp32", _CPU, _onednn_prepacked(torch.float32), 32, 32, "fp32"),
    Peer("oneDNN prepacked bf16", _CPU, _onednn_prepacked(torch.bfloat16), 16, 16, "bf16"),
    Peer(FBGEMM, _CPU, _torch_ao_dynamic("fbgemm"), 8, 32, "int8"),
    Peer("torch._int_mm + eager epilogue", _BOTH, _int_mm_eager, 8, 32, "int8"),
    Peer(INT_MM_CODES, _BOTH, _int_mm_codes, 8, 8, "int8", gemm_only=True),
    Peer("torchao int8 dynamic", _BOTH, _torchao("Int8DynamicActivationInt8WeightConfig"), 8, 32, "int8"),
    Peer(MM_BF16, _CUDA, _mm(torch.bfloat16), 16, 16, "bf16"),
    Peer("torch.mm fp16", _CUDA, _mm(torch.float16), 16, 16, "bf16"),
    Peer("torch._scaled_mm fp8 (codes in)", _CUDA, _scaled_mm, 8, 8, "fp8", gemm_only=True),
    Peer("torch._weight_int4pack_mm g128", _CUDA, _int4pack_cuda, 4, 16, "bf16"),
)


def peers_for(device: str | torch.device) -> tuple[Peer, ...]:
    """The peers meant for a device, in table order."""
    kind = torch.device(device).type
    return tuple(peer for peer in PEERS if kind in peer.devices)
