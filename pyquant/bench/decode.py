"""The engine of `pyquant bench decode`: layers of a language model, prompt and decode apart, rivals in the same run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from pyquant.bench.decode_net import CONFIGS, Decoder, make_decoder
from pyquant.bench.peers import PeerUnavailable, first_line, named
from pyquant.core import arguments
from pyquant.core.presets import scheme_from_name
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.measure.environment import describe_environment
from pyquant.measure.exact import sqnr_db
from pyquant.measure.timing import make_clock, time_interleaved
from pyquant.nn.fuse import fuse_
from pyquant.nn.merge import merge_
from pyquant.nn.qlinear import QLinear
from pyquant.report.records.bench import Unavailable
from pyquant.report.records.environment import Environment

BF16: Final = "bf16"
TORCH_INT4: Final = "torch int4 op, groups of 128"
SCHEMES: Final = ("W8A8Dynamic", "W4A8Dynamic(group_size=128)")
GROUP: Final = 128
LEAST_DB: Final = 8.0  # of 4-bit weights and random numbers there are 15 to 20: less is another computation
Make = Callable[[Decoder], Decoder]


@dataclass(frozen=True)
class DecodeRow:
    """One candidate at one batch size: milliseconds of a call of all layers, tokens a second, times as fast as bf16."""

    phase: str  # 'prompt' or 'decode'
    batch: int
    candidate: str
    ms: float
    tokens_per_second: float
    ratio_to_bf16: float
    sqnr_db: float | None
    weights_mb: float


@dataclass(frozen=True)
class DecodeReport:
    """All rows of one run."""

    environment: Environment
    config: str
    layers: int
    prompt: int
    rows: list[DecodeRow]
    unavailable: list[Unavailable]
    notes: list[str]


@dataclass(frozen=True)
class DecodeBench:
    """config: of CONFIGS. prompt: tokens of a sequence. schemes: of pyquant. candidates: part of a name; None: all."""

    config: str = "llama-3-8b"
    layers: int = 2
    batches: Sequence[int] = (1, 8, 32)
    prompt: int = 128
    schemes: Sequence[str] = SCHEMES
    candidates: Sequence[str] | None = None
    device: str = "cpu"
    clock: str = "wall"
    rounds: int = 5


class Int4Linear(nn.Module):
    """torch's own weight-only product: int4 in groups of 128, activations of bfloat16."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        n, k = linear.weight.shape
        if k % GROUP or n % 16:
            raise PeerUnavailable(f"torch's int4 product does not take K = {k}, N = {n}")
        w = linear.weight.float().reshape(n, -1, GROUP)
        scale = w.abs().amax(-1).div(7).clamp_min(1e-8)
        codes = w.div(scale[..., None]).round_().clamp_(-8, 7).add_(8).reshape(n, k)
        self.scales = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous().bfloat16()
        aten = torch.ops.aten
        if linear.weight.is_cuda:
            pairs = codes.to(torch.uint8)
            self.packed = aten._convert_weight_to_int4pack((pairs[:, ::2] << 4 | pairs[:, 1::2]).contiguous(), 8)
            self.op = aten._weight_int4pack_mm
        else:
            self.packed = aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
            self.op = aten._weight_int4pack_mm_for_cpu

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.op(x.reshape(-1, x.shape[-1]), self.packed, GROUP, self.scales)
        return y.view(*x.shape[:-1], -1)


def candidates_of(schemes: Sequence[str]) -> dict[str, Make]:
    """{name: what makes a copy of the float model that candidate}, bf16 first."""
    own = {f"pyquant {text}, merged": partial(_own, scheme_from_name(text)) for text in schemes}
    theirs = {
        "torchao int8 dynamic": partial(_torchao, "Int8DynamicActivationInt8WeightConfig"),
        "torchao int4 weights": partial(_torchao, "Int4WeightOnlyConfig"),
    }
    return {BF16: lambda model: model, **own, TORCH_INT4: _int4, **theirs}


def run_decode_bench(bench: DecodeBench, *, on_case: Callable[[str], None] | None = None) -> DecodeReport:
    """Time every candidate that runs here; others are listed with their reason.

    Each candidate is checked before it is timed: its decode step against the float model's.
    Raises ArgumentError for an unknown configuration, candidate or clock, and numbers below 1.
    """
    if bench.config not in CONFIGS:
        raise ArgumentError("config", repr(bench.config), ", ".join(CONFIGS))
    for name, value in (("layers", bench.layers), ("prompt", bench.prompt), ("rounds", bench.rounds)):
        arguments.whole(name, value, 1)
    for batch in bench.batches:
        arguments.whole("batches", batch, 1)
    makers = candidates_of(bench.schemes)
    if bench.candidates is not None:
        makers = {name: makers[name] for name in dict.fromkeys([BF16, *named(bench.candidates, makers, "candidates")])}
    clock, missing = make_clock(bench.clock), list[Unavailable]()
    floats = make_decoder(CONFIGS[bench.config], bench.layers, bench.device)
    models: dict[str, Decoder] = {}
    quality: dict[str, float | None] = {}
    for name, make in makers.items():
        if on_case:
            on_case(f"make {name}")
        try:
            with torch.no_grad():
                made = make(floats if name == BF16 else copy.deepcopy(floats))
                quality[name] = _step(floats, made, bench)
                models[name] = made
        except Exception as error:
            if name == BF16:
                raise
            missing.append(Unavailable(name, first_line(error)))
    rows: list[DecodeRow] = []
    for batch in bench.batches:
        for phase in ("prompt", "decode"):
            if on_case:
                on_case(f"{phase}, batch {batch}")
            calls = {name: _call(model, phase, batch, bench) for name, model in models.items()}
            timings = time_interleaved(calls, clock=clock, rounds=bench.rounds, warm_calls=1)
            tokens = batch * (bench.prompt if phase == "prompt" else 1)
            for name, model in models.items():
                seconds = timings.median_us(name) / 1e6
                ratio, mb = timings.ratio(BF16, name), _size(model)
                rows.append(DecodeRow(phase, batch, name, seconds * 1e3, tokens / seconds, ratio, quality[name], mb))
    notes = [
        f"{bench.layers} layers of {bench.config}, random weights; no embeddings, rotary embedding or output head",
        f"prompt: batch x {bench.prompt} tokens in one call; decode: one token a sequence behind {bench.prompt}",
        "tokens a second of these layers alone; ratio: bf16 time / candidate time, median over rounds of one run",
        "sqnr_db: of one decode step against bf16, before timing",
    ]
    environment = describe_environment(bench.device, clock=bench.clock)
    return DecodeReport(environment, bench.config, bench.layers, bench.prompt, rows, missing, notes)


def _input(model: Decoder, batch: int, count: int) -> Tensor:
    where = model.members()[0].norm1.weight
    rng = torch.Generator(where.device).manual_seed(1)
    return torch.randn(batch, count, model.sizes.hidden, generator=rng, device=where.device).to(where.dtype)


def _call(model: Decoder, phase: str, batch: int, bench: DecodeBench) -> Callable[[], Tensor]:
    count, at = (bench.prompt, 0) if phase == "prompt" else (1, bench.prompt)
    x = _input(model, batch, count)

    def call() -> Tensor:
        # torch.inference_mode, in which the clock calls, does not count writes: merged layers would not know a tensor
        with torch.inference_mode(False), torch.no_grad():
            held = model.members()[0].__dict__.get("cache")
            if held is None or held[0].shape[0] != batch:
                model.make_room(batch, bench.prompt + 1)
            y: Tensor = model(x, at)
            return y

    return call


def _step(floats: Decoder, model: Decoder, bench: DecodeBench) -> float | None:
    """Signal to noise of a decode step; None for the float model. Raises PeerUnavailable where it is none of that."""
    exact, y = (_call(one, "decode", 1, bench)() for one in (floats, model))
    for one in (floats, model):
        for block in one.members():
            block.__dict__.pop("cache", None)
    if floats is model:
        return None
    db = sqnr_db(exact, y)
    if not db >= LEAST_DB:
        raise PeerUnavailable(f"{db:.1f} dB from the float model, at least {LEAST_DB:g} expected")
    return db


def _size(model: nn.Module) -> float:
    """Megabytes of weights, as they are held (pyquant: as they are saved)."""
    tensors = {id(t): t for t in model.state_dict().values()}
    for module in model.modules():
        if isinstance(module, Int4Linear):
            tensors |= {id(t): t for t in (module.packed, module.scales)}
    return sum(t.numel() * t.element_size() for t in tensors.values()) / 1e6


def _own(scheme: QScheme, model: Decoder) -> Decoder:
    merge_(_with(partial(QLinear.from_float, scheme=scheme), model))
    fuse_(model)
    return model


def _int4(model: Decoder) -> Decoder:
    return _with(Int4Linear, model)


def _with(make: Callable[[nn.Linear], nn.Module], model: Decoder) -> Decoder:
    """The model with other layers for its Linears."""
    for name, child in list(model.named_modules()):
        if isinstance(child, nn.Linear):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, make(child))
    return model


def _torchao(config: str, model: Decoder) -> Decoder:
    try:
        from torchao import quantization
    except ImportError as error:
        raise PeerUnavailable(f"torchao is not installed ({error})") from None
    quantization.quantize_(model, getattr(quantization, config)())
    return model
