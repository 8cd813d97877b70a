"""Named rivals on a CPU behind one signature: each builds a callable for one GEMM problem, or says why it cannot.

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

from pyquant.core.scheme import QScheme
from pyquant.errors import PyquantError
from pyquant.measure.exact import check_rows, sqnr_db
from pyquant.measure.floors import random_codes
from pyquant.nn.qlinear import QLinear

Candidate = Callable[[], torch.Tensor]


class PeerUnavailable(Exception):
    """A peer that cannot run here; the message is the reason."""


def first_line(error: BaseException) -> str:
    """What an error says, cut to one line of at most 200 characters."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    named = isinstance(error, (PyquantError, PeerUnavailable))
    return (text if named else f"{type(error).__name__}: {text}")[:200]


def at(shape: tuple[int, int, int]) -> str:
    """'M=1 K=2 N=3'."""
    return "M={} K={} N={}".format(*shape)


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

    def qlinear(self, scheme: QScheme, dtype: torch.dtype) -> tuple[QLinear, torch.Tensor]:
        """The problem as a QLinear on its device, and its input in `dtype`.

        A static scheme is calibrated on that input: one per-tensor scale of its largest absolute value.
        """
        scale = self.x.abs().amax() / scheme.inputs.code_range[1] if scheme.is_static and scheme.inputs else None
        return QLinear.from_float(self.linear(), scheme, input_scale=scale).to(dtype=dtype), self.x.to(dtype)

    def sqnr_db(self, y: torch.Tensor) -> float:
        """Signal to noise of y against the float64 product, on checked rows, in dB.

        Raises PeerUnavailable when y has another shape: the candidate does not compute this problem.
        """
        if y.shape != (self.m, self.n):
            raise PeerUnavailable(f"returned shape {list(y.shape)}, expected [{self.m}, {self.n}]")
        rows = check_rows(self.m)
        exact = self.x[rows].double() @ self.w.double().t()
        return sqnr_db(exact if self.bias is None else exact + self.bias.double(), y[rows])


@dataclass(frozen=True)
class Peer:
    """A rival.

    w_bits, x_bits   size of its weights and of its input and output in memory; peak: the ceiling that binds it.
    gemm_only        takes ready codes, no quantise, no epilogue: a bound, not an equal.
    """

    name: str
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

PEERS: tuple[Peer, ...] = (
    Peer(FP32, _f_linear(torch.float32), 32, 32, "fp32"),
    Peer("F.linear bf16", _f_linear(torch.bfloat16), 16, 16, "bf16"),
    Peer("F.linear fp16", _f_linear(torch.float16), 16, 16, "bf16"),
    Peer("oneDNN prepacked fp32", _onednn_prepacked(torch.float32), 32, 32, "fp32"),
    Peer("oneDNN prepacked bf16", _onednn_prepacked(torch.bfloat16), 16, 16, "bf16"),
    Peer(FBGEMM, _torch_ao_dynamic("fbgemm"), 8, 32, "int8"),
    Peer("torch._int_mm + eager epilogue", _int_mm_eager, 8, 32, "int8"),
    Peer(INT_MM_CODES, _int_mm_codes, 8, 8, "int8", gemm_only=True),
    Peer("torchao int8 dynamic", _torchao("Int8DynamicActivationInt8WeightConfig"), 8, 32, "int8"),
)
