"""Producers of activations and the Linears that read them, and what a factor for each channel between them does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.calibrate.padding import counted
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.nn.expert_rules import rule_of
from pyquant.nn.experts import QExperts
from pyquant.ptq.improve import smooth_rules as rules

_SMALLEST: Final = 1e-5  # a factor; below it a channel counts as unused


@dataclass
class Pair:
    """A producer, the Linears that read it (or routers, banks of experts), and the largest magnitude of each channel
    between them.

    exact   whether factors are powers of two, so that products keep every bit: in a model with experts, where a router
            would otherwise send a token elsewhere by a rounding.
    """

    producer: str
    consumers: tuple[str, ...]
    modules: tuple[nn.Module, list[nn.Module]]
    exact: bool = False
    amax: Tensor | None = None

    def observe(self, x: Tensor) -> None:
        rows = counted(x.detach()).reshape(-1, x.shape[-1])
        if not len(rows):
            return
        amax = rows.abs().amax(0).float()
        if not bool(amax.isfinite().all()):
            raise NonFiniteError(f"input of {self.consumers[0]}", "NaN or infinity", "finite values")
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)

    def matrices(self) -> list[Tensor]:
        """Those of the consumers: [.., N, K]."""
        return [matrix for consumer in self.modules[1] for matrix in rules.matrices_of(consumer)]

    def tensors(self) -> list[Tensor]:
        """All that factors change."""
        return [*self.modules[0].parameters(recurse=False), *self.matrices()]

    def usable(self, factor: Tensor, used: Tensor) -> Tensor:
        """Factors of channels that are used, kept away from 0; of others what leaves the scales to the used ones.

        Factors are no ratios to 1: beside channels that are divided by 5 one that is not is an outlier. A channel whose
        weights are 0 is divided by as much as the others in the mean, and until it is no larger than the largest of
        them; one that was always 0 is multiplied likewise in the consumers.
        """
        used = used & factor.isfinite()
        if not bool(used.any()):
            return torch.ones_like(factor)
        factor = factor.clamp_min(_SMALLEST)
        columns, seen = columns_of(self), self.amax.to(factor.device)  # type: ignore[union-attr]
        typical = factor[used].double().log().mean().exp().float()
        largest, widest = (seen / factor)[used].max(), (columns * factor)[used].max()
        unread = torch.maximum(typical, seen / largest) if largest > 0 else typical
        unseen = torch.minimum(typical, widest / columns).clamp_min(_SMALLEST) if widest > 0 else typical
        factor = torch.where(used, factor, torch.where(columns > 0, unseen, unread))
        return _power_of_two(factor) if self.exact else factor


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
    exact = any(isinstance(m, QExperts) or rule_of(m) is not None for m in modules.values())
    return [_pair(modules, *names, exact) for names in pair_names]


def _pair(modules: dict[str, nn.Module], producer: str, consumers: tuple[str, ...], exact: bool) -> Pair:
    for name in (producer, *consumers):
        if name not in modules:
            raise ArgumentError("pairs", repr(name), "names of modules of the model")
    if not rules.is_producer(modules[producer]):
        got = f"{producer}, a {type(modules[producer]).__name__}"
        raise ArgumentError("pairs", got, "a LayerNorm or RMSNorm with weights, or a Linear")
    readers = [modules[name] for name in consumers]
    width = modules[producer].weight.shape[0]  # type: ignore[union-attr,index]
    matrices = [rules.matrices_of(reader) for reader in readers]
    if not readers or not all(held and all(m.shape[-1] == width for m in held) for held in matrices):
        raise ArgumentError("pairs", f"({producer}, {list(consumers)})", f"Linears of {width} inputs, its channels")
    return Pair(producer, consumers, (modules[producer], readers), exact)


def columns_of(pair: Pair) -> Tensor:
    """float32 [K]: the largest weight of each channel in all consumers."""
    return torch.stack([m.detach().abs().flatten(0, -2).amax(0).float() for m in pair.matrices()]).amax(0)


def factor_of(pair: Pair, alpha: float) -> Tensor:
    """SmoothQuant's factors, float32 [K]."""
    columns = columns_of(pair)
    seen = pair.amax.to(columns.device)  # type: ignore[union-attr]
    return pair.usable(seen.pow(alpha) / columns.pow(1 - alpha), (seen > 0) & (columns > 0))


def _power_of_two(factor: Tensor) -> Tensor:
    """The nearest one by ratio, to the bit, of float32 above 0."""
    mantissa, exponent = factor.frexp()  # mantissa in [1/2, 1)
    exponent = torch.where(mantissa < 0.5**0.5, exponent - 1, exponent).clamp(-20, 20)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def scale_by(pair: Pair, factor: Tensor) -> float:
    """Divide what the producer makes by the factors, and multiply the columns of the consumers; -> largest / smallest
    factor."""
    producer = pair.modules[0]
    for parameter in producer.parameters(recurse=False):  # weight [N] or [N, K], and bias [N]
        rows = factor if parameter.dim() == 1 else factor[:, None]
        parameter.copy_(parameter.float() / rows)
    for matrix in pair.matrices():
        matrix.copy_(matrix.float() * factor)
    return float(factor.max() / factor.min())
