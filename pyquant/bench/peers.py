"""Named rivals on a CPU behind one signature: each builds a callable for one GEMM problem, or says why it cannot.

Every peer returns [M, N] for the same x, w and bias, so the harness can check that it computes what it claims.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from pyquant.bench.problem import Inputs
from pyquant.errors import ArgumentError, PyquantError
from pyquant.measure.floors import random_codes

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


def named(texts: Iterable[str], names: Iterable[str], argument: str) -> list[str]:
    """The names that hold one of the texts, upper and lower case alike; an exact name stands for itself.

    Raises ArgumentError naming `argument` for a text that no name holds.
    """
    names, found = list(names), dict[str, None]()
    for text in texts:
        hits = [n for n in names if n == text] or [n for n in names if text.lower() in n.lower()]
        if not hits:
            raise ArgumentError(argument, repr(text), "part of one of: " + ", ".join(names))
        found |= dict.fromkeys(hits)
    return list(found)


def check_shape(y: torch.Tensor, m: int, n: int) -> None:
    """Raises PeerUnavailable when y has another shape: the candidate does not compute this problem."""
    if y.shape != (m, n):
        raise PeerUnavailable(f"returned shape {list(y.shape)}, expected [{m}, {n}]")


@dataclass(frozen=True)
class Peer:
    """A rival.

    w_bits, x_bits   size of its weights and of its input and output in memory; peak: the ceiling that binds it.
    gemm_only        takes ready codes, no quantise, no epilogue: a bound, not an equal.
    """

    name: str
    build: Callable[[Inputs], Candidate]
    w_bits: int
    x_bits: int
    peak: str
    gemm_only: bool = False


def _f_linear(dtype: torch.dtype, case: Inputs) -> Candidate:
    x, w, bias = (t.to(dtype) for t in (case.x, case.weights.w, case.weights.bias))
    return lambda: F.linear(x, w, bias)


def _onednn_prepacked(dtype: torch.dtype, case: Inputs) -> Candidate:
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        raise PeerUnavailable("this torch has no mkldnn._reorder_linear_weight")
    x, w, bias = (t.to(dtype) for t in (case.x, case.weights.w, case.weights.bias))
    packed = torch.ops.mkldnn._reorder_linear_weight(w, case.m)
    op = torch.ops.mkldnn._linear_pointwise.default
    return lambda: op(x, packed, bias, "none", [], "")


def _torch_ao_dynamic(engine: str, case: Inputs) -> Candidate:
    from torch.ao.quantization import quantize_dynamic

    if engine not in torch.backends.quantized.supported_engines:
        raise PeerUnavailable(f"this torch was built without {engine}")
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quantise: Callable[..., torch.nn.Module] = quantize_dynamic
            module = quantise(torch.nn.Sequential(case.weights.linear()), {torch.nn.Linear}, dtype=torch.qint8)
    finally:
        torch.backends.quantized.engine = before
    x = case.x
    layer = module.get_submodule("0")  # without the container: its own call costs a microsecond
    return lambda: layer(x)


def _int_mm_eager(case: Inputs) -> Candidate:
    x, bias, (codes, scale) = case.x, case.weights.bias, case.weights.codes
    wt = codes.t()

    def run() -> torch.Tensor:
        x_scale = x.abs().amax(1, keepdim=True).div(127).clamp_min(1e-8)
        x_q = (x / x_scale).round_().clamp_(-127, 127).to(torch.int8)
        return torch._int_mm(x_q, wt).float().mul_(x_scale).mul_(scale).add_(bias)

    return run


def _int_mm_codes(case: Inputs) -> Candidate:
    x_q, wt = random_codes(case.x.shape, case.x.device), case.weights.codes[0].t()
    return lambda: torch._int_mm(x_q, wt)


def _torch_int4(case: Inputs) -> Candidate:
    """torch's own weight-only op for CPUs: int4 in groups of 128, activations of bfloat16."""
    aten, group = torch.ops.aten, 128
    if not hasattr(aten, "_weight_int4pack_mm_for_cpu") or case.weights.k % group or case.weights.n % 16:
        raise PeerUnavailable("no int4 product of this torch takes the layer")
    w = case.weights.w.float().reshape(case.weights.n, -1, group)
    scale = w.abs().amax(-1).div(7).clamp_min(1e-8)
    codes = (
        w.div(scale[..., None]).round_().clamp_(-8, 7).add_(8).to(torch.int32).reshape(case.weights.n, case.weights.k)
    )
    packed = aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous().bfloat16()
    x, bias = case.x.bfloat16(), case.weights.bias.bfloat16()
    return lambda: aten._weight_int4pack_mm_for_cpu(x, packed, group, scales).add_(bias)


def _torchao(config: str, case: Inputs) -> Candidate:
    try:
        from torchao import quantization
    except ImportError as error:
        raise PeerUnavailable(f"torchao is not installed ({error})") from None
    module = torch.nn.Sequential(case.weights.linear())
    quantization.quantize_(module, getattr(quantization, config)())
    x, layer = case.x, module[0]
    return lambda: layer(x)


FP32 = "F.linear fp32"
BF16 = "F.linear bf16"
FBGEMM = "torch.ao dynamic int8 (fbgemm)"
TORCH_INT4 = "torch int4 weight-only (bf16, groups of 128)"
INT_MM_CODES = "torch._int_mm (codes in, int32 out)"

PEERS: tuple[Peer, ...] = (
    Peer(FP32, partial(_f_linear, torch.float32), 32, 32, "fp32"),
    Peer(BF16, partial(_f_linear, torch.bfloat16), 16, 16, "bf16"),
    Peer("F.linear fp16", partial(_f_linear, torch.float16), 16, 16, "bf16"),
    Peer("oneDNN prepacked fp32", partial(_onednn_prepacked, torch.float32), 32, 32, "fp32"),
    Peer("oneDNN prepacked bf16", partial(_onednn_prepacked, torch.bfloat16), 16, 16, "bf16"),
    Peer(FBGEMM, partial(_torch_ao_dynamic, "fbgemm"), 8, 32, "int8"),
    Peer("torch._int_mm + eager epilogue", _int_mm_eager, 8, 32, "int8"),
    Peer(INT_MM_CODES, _int_mm_codes, 8, 8, "int8", gemm_only=True),
    Peer(TORCH_INT4, _torch_int4, 4, 16, "bf16"),
    Peer("torchao int8 dynamic", partial(_torchao, "Int8DynamicActivationInt8WeightConfig"), 8, 32, "int8"),
)
