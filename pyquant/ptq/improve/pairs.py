"""Producers of activations and the Linears that read them, and what a factor for each channel between them does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.ptq.improve import smooth_rules as rules

_SMALLEST: Final = 1e-5  # a factor; below it a channel counts as unused


@dataclass
class Pair:
    """A producer, the Linears that read it, and the largest magnitude of each channel between them."""

    producer: str
    consumers: tuple[str, ...]
    modules: tuple[nn.Module, list[nn.Linear]]
    amax: Tensor | None = None

    def observe(self, x: Tensor) -> None:
        amax = x.detach().reshape(-1, x.shape[-1]).abs().amax(0).float()
        if not bool(amax.isfinite().all()):
            raise NonFiniteError(f"input of {self.consumers[0]}", "NaN or infinity", "finite values")
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)


def find_pairs(model: nn.Module, given: Iterable[Any] | None) -> list[Pair]:
    modules = dict(model.named_modules())
    pair_names = []
    if given is None:
        for name, parent in modules.items():
            prefix = f"{name}." if name else ""
            for producer, consumers in rules.pairs_of(parent):
                if isinstance(rules.find(parent, producer), nn.Conv2d) or any(
                    isinstance(rules.find(parent, consumer), nn.Conv2d) for consumer in consumers
                ):
                    continue  # registered for equalize_
                pair_names.append((prefix + producer, tuple(prefix + c for c in consumers)))
        if not pair_names:
            got = f"a {type(model).__name__} in which no rule finds a pair"
            raise ArgumentError("model", got, "pairs=..., or register_smoothing")
    else:
        pair_names = list(rules.flatten(given))
    twice = [name for name, count in Counter(c for _, cs in pair_names for c in cs).items() if count > 1]
    if twice:
        raise ArgumentError("pairs", f"several producers for {', '.join(twice)}", "one producer for each Linear")
    return [_pair(modules, *names) for names in pair_names]


def _pair(modules: dict[str, nn.Module], producer: str, consumers: tuple[str, ...]) -> Pair:
    for name in (producer, *consumers):
        if name not in modules:
            raise ArgumentError("pairs", repr(name), "names of modules of the model")
    if not rules.is_producer(modules[producer]):
        got = f"{producer}, a {type(modules[producer]).__name__}"
        raise ArgumentError("pairs", got, "a LayerNorm or RMSNorm with weights, or a Linear")
    linears = [m for name in consumers if type(m := modules[name]) is nn.Linear]
    width = modules[producer].weight.shape[0]  # type: ignore[union-attr,index]
    if not linears or len(linears) < len(consumers) or any(m.in_features != width for m in linears):
        raise ArgumentError("pairs", f"({producer}, {list(consumers)})", f"Linears of {width} inputs, its channels")
    return Pair(producer, consumers, (modules[producer], linears))


def columns_of(pair: Pair) -> Tensor:
    """float32 [K]: the largest weight of each channel in all consumers."""
    return torch.stack([linear.weight.abs().amax(0).float() for linear in pair.modules[1]]).amax(0)


def factor_of(pair: Pair, alpha: float) -> Tensor:
    """SmoothQuant's factors, float32 [K]; 1 for channels that are never used."""
    columns = columns_of(pair)
    seen = pair.amax.to(columns.device)  # type: ignore[union-attr]
    return usable(seen.pow(alpha) / columns.pow(1 - alpha), (seen > 0) & (columns > 0))


def usable(factor: Tensor, used: Tensor) -> Tensor:
    """Factors of channels that are used, kept away from 0; 1 for others."""
    return torch.where(used & factor.isfinite(), factor.clamp_min(_SMALLEST), torch.ones_like(factor))


def scale_by(pair: Pair, factor: Tensor) -> float:
    """Divide what the producer makes by the factors, and multiply the columns of the consumers; -> largest / smallest
    factor."""
    producer, linears = pair.modules
    for parameter in producer.parameters(recurse=False):  # weight [N] or [N, K], and bias [N]
        rows = factor if parameter.dim() == 1 else factor[:, None]
        parameter.copy_(parameter.float() / rows)
    for linear in linears:
        linear.weight.copy_(linear.weight.float() * factor)
    return float(factor.max() / factor.min())
