"""search_scales_: how much of each pair's spread moves into the weights, by what rounding costs with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from pyquant.calibrate.padding import counted
from pyquant.calibrate.registry import compute_range, new_statistics
from pyquant.core.scheme import QScheme
from pyquant.errors import ArgumentError
from pyquant.nn.experts import QExperts
from pyquant.nn.fates import carry_out, twins_of
from pyquant.nn.flow import watch_input
from pyquant.nn.forms import expose_reversibly, form_of, has_form
from pyquant.nn.qlinear import QLinear
from pyquant.nn.sites import Config, rules_of
from pyquant.nn.undo import Undo, undone_on_error
from pyquant.ptq.improve.errors import ErrorFunction, error_function, held_out_of
from pyquant.ptq.improve.pairs import Pair, factor_of, find_pairs, scale_by
from pyquant.ptq.improve.replay import BatchToInputs, Replay, check_unmoved
from pyquant.ptq.improve.writable import check_writable
from pyquant.simulate.calibrate import calibrate_
from pyquant.simulate.insert import simulated, simulated_fates
from pyquant.simulate.kinds import is_simulated
from pyquant.simulate.linear import FakeQuantLinear

_ROWS: Final = 512  # of each pair's inputs, on which its factors are judged
_STEPS: Final = 8
NONE, HALF, SEARCHED = "none", "smoothed", "searched"


@dataclass(frozen=True)
class ScaleSearch:
    """What became of a model: which factors it has ('none', 'smoothed': smooth_'s, 'searched': each pair's own), the
    held-out errors of the three, and for each producer what was found for it: ('smooth' or 'mean', alpha), or None."""

    chosen: str
    errors: Mapping[str, float]
    found: Mapping[str, tuple[str, float] | None]


@torch.no_grad()
def search_scales_(
    model: nn.Module,
    config: Config,
    data: Iterable[Any],
    num_batches: int,
    pairs: Iterable[tuple[str, Iterable[str]]] | None = None,
    *,
    error: str | ErrorFunction | None = None,
    num_held_out: int | None = None,
    batch_to_inputs: BatchToInputs | None = None,
) -> ScaleSearch:
    """Divide the inputs of some Linears by factors of each channel and multiply their columns, in place, before
    quantisation, with the factors under which rounding costs least; none where that is best.

    For each pair, factors amax_x^alpha / amax_w^(1 - alpha) (SmoothQuant's) and mean_x^alpha (AWQ's) are tried with
    alpha from 0 to 1 in eighths, beside none: those stay with which the rounded consumers, on 512 held-out rows, are
    nearest to the float ones. Then three models are quantised in simulation: with these factors, with smooth_'s (alpha
    0.5) and with none; the one whose held-out outputs are nearest to the float model's stays.
    model         float nn.Module.
    config        what quantize_ will be given: a scheme, its name, or a mapping.
    data          batches; num_batches of them are used, and num_held_out of these (None: a quarter, at least one) only
                  to judge.
    pairs, batch_to_inputs   as in smooth_.     error   as in gptq_: None is 'both'.
    ->            ScaleSearch. The function of the model is the same but for rounding, which is checked as in smooth_.
    The number of passes does not depend on the depth; rows are kept for all pairs, and their parameters once more.
    Raises as smooth_ and insert_fake_quantize_ do; on any exception the model is as before.
    Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", arXiv
    2306.00978, section 3.2; Xiao et al., arXiv 2211.10438.

    Example:
        >>> from pyquant import W4A8
        >>> model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
        >>> found = search_scales_(model, W4A8(group_size=None), [torch.randn(16, 8) for _ in range(4)], num_batches=4)
        >>> found.chosen in ("none", "smoothed", "searched")
        True
    """
    how: dict[str, Any] = {"error": error, "num_held_out": num_held_out, "batch_to_inputs": batch_to_inputs}
    return search_scales_reversibly(model, config, data, num_batches, [], pairs, **how)


@torch.no_grad()
def search_scales_reversibly(
    model: nn.Module,
    config: Config,
    data: Iterable[Any],
    num_batches: int,
    undo: list[Undo],
    pairs: Iterable[tuple[str, Iterable[str]]] | None = None,
    *,
    error: str | ErrorFunction | None = None,
    num_held_out: int | None = None,
    batch_to_inputs: BatchToInputs | None = None,
) -> ScaleSearch:
    """search_scales_ for a caller that may still fail. undo  receives the steps that take it back."""
    measure = error_function(error)
    replay = Replay(model, data, num_batches, batch_to_inputs)
    held_out = held_out_of(num_held_out, num_batches)
    if any(is_simulated(m) or isinstance(m, QLinear) for m in model.modules()):
        raise ArgumentError("model", "a model with quantised layers", "a float model: search before quantising")
    check_writable(model)
    groups = find_pairs(model, pairs)
    schemes = schemes_by(model, config)
    split = num_batches - held_out
    targets, reads = _watched(replay, groups, split)
    groups = [pair for pair in groups if reads[pair.producer].are_enough]
    found = {pair.producer: reads[pair.producer].factors(schemes) for pair in groups}
    ways: dict[str, dict[str, Tensor]] = {
        NONE: {},
        HALF: {name: factors.half for name, factors in found.items()},
        SEARCHED: {name: factors.best for name, factors in found.items() if factors.best is not None},
    }
    changed = {id(t): t for pair in groups for t in pair.tensors()}
    put_back: list[Undo] = [partial(t.detach().copy_, t.detach().clone()) for t in changed.values()]

    def apply(way: str) -> None:
        for step in put_back:
            step()
        for pair in groups:
            if pair.producer in ways[way]:
                scale_by(pair, ways[way][pair.producer])
        allowed = f"pairs whose producer feeds its consumers and nothing else; undone: {', '.join(ways[way])}"
        check_unmoved("pairs", targets[0], replay.run(replay.batches[split]), allowed)

    errors: dict[str, float] = {}
    with undone_on_error(put_back):
        for way in ways:
            apply(way)
            errors[way] = _rounded_error(replay, config, targets, split, measure)
        chosen = min(errors, key=lambda way: errors[way])  # the first of equals: the simplest
        apply(chosen)
    undo += put_back
    return ScaleSearch(chosen, errors, {name: factors.how for name, factors in found.items()})


def schemes_by(model: nn.Module, config: Config) -> dict[str, QScheme]:
    """What a config gives to each layer."""
    with simulating(model, config):
        return {name: m.scheme for name, m in model.named_modules() if isinstance(m, FakeQuantLinear)}


@contextmanager
def simulating(model: nn.Module, config: Config) -> Iterator[None]:
    """Simulating twins stand in the model inside; afterwards the very modules of before."""
    undo: list[Undo] = []
    try:
        expose_reversibly(model, None, undo)
        fates = simulated_fates(model, rules_of(config, model), None, "per_channel")
        carry_out(model, fates, twins_of(fates, simulated), undo)
        yield
    finally:
        for step in reversed(undo):
            step()


@dataclass(frozen=True)
class Factors:
    """Of one pair: smooth_'s, the best of those tried and how it is made; None: without any is best."""

    half: Tensor
    best: Tensor | None
    how: tuple[str, float] | None


class Reads:
    """What a pair reads: rows of the batches that are held out, channels' mean and largest magnitudes in the others."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self._rows = pair, list[Tensor]()
        self._total: Tensor | None = None
        self._count = 0

    def see(self, x: Tensor, is_held_out: bool) -> None:
        """One call of its first consumer."""
        flat = counted(x.detach()).reshape(-1, x.shape[-1])
        if is_held_out:
            room = _ROWS - sum(len(part) for part in self._rows)
            if room > 0 and len(flat):
                self._rows.append(flat[:: max(1, len(flat) // room)][:room].clone())
            return
        self.pair.observe(x)
        total = flat.abs().double().sum(0)
        self._total = total if self._total is None else self._total + total
        self._count += len(flat)

    @property
    def are_enough(self) -> bool:
        """Whether factors can be found: experts may never be called."""
        return self.pair.amax is not None and bool(self._rows)

    def factors(self, schemes: Mapping[str, QScheme]) -> Factors:
        """Those of the pair, whose weights are as they were when it read; schemes: by the names of layers."""
        total = cast(Tensor, self._total)
        how, best = _best(self.pair, torch.cat(self._rows), (total / max(self._count, 1)).float(), schemes)
        return Factors(factor_of(self.pair, 0.5), best, how)


def _watched(replay: Replay, groups: list[Pair], split: int) -> tuple[list[Any], dict[str, Reads]]:
    """Float outputs of held-out batches, and what each pair reads."""
    reads = {pair.producer: Reads(pair) for pair in groups}
    is_held_out = False

    def see(pair: Pair, x: Tensor) -> None:
        reads[pair.producer].see(x, is_held_out)

    targets = []
    with ExitStack() as hooks:
        for pair in groups:
            hooks.callback(watch_input(pair.modules[1][0], partial(see, pair)).remove)
        for i, batch in enumerate(replay.batches):
            is_held_out = i >= split
            output = replay.run(batch)
            if is_held_out:
                targets.append(output)
    return targets, reads


def _best(
    pair: Pair, rows: Tensor, mean: Tensor, schemes: Mapping[str, QScheme]
) -> tuple[tuple[str, float] | None, Tensor | None]:
    """The factors with which a pair's rounded consumers are nearest to the float ones; None: without any."""
    parts = ((n, m) for name, reader in zip(pair.consumers, pair.modules[1], strict=True) for n, m in _of(name, reader))
    linears = [(m, schemes[name]) for name, m in parts if name in schemes]
    if not linears:
        return None, None
    mean = mean.to(linears[0][0].weight.device)
    candidates: list[tuple[tuple[str, float] | None, Tensor | None]] = [(None, None)]
    for step in range(_STEPS + 1):
        alpha = step / _STEPS
        candidates.append((("smooth", alpha), factor_of(pair, alpha)))
        if step > 0:
            scaled = mean.pow(alpha)
            middle = (scaled[mean > 0].max() * scaled[mean > 0].min()).sqrt() if bool((mean > 0).any()) else 1.0
            candidates.append((("mean", alpha), pair.usable(scaled / middle, mean > 0)))
    costs = [sum(_cost(m, scheme, rows, factor) for m, scheme in linears) for _, factor in candidates]
    return candidates[min(range(len(costs)), key=costs.__getitem__)]


def _of(name: str, reader: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The Linears of a consumer: itself, or the first ones of experts, under the names that they have or will have."""
    if type(reader) is nn.Linear:
        yield name, reader
    elif isinstance(reader, QExperts) or has_form(reader):
        bank = reader if isinstance(reader, QExperts) else form_of(reader)
        if isinstance(bank, QExperts):
            for e, (up, _) in enumerate(bank.experts()):
                yield f"{name}.{e}.{bank.rule.up}", cast(nn.Linear, up)


def _cost(linear: nn.Linear, scheme: QScheme, rows: Tensor, factor: Tensor | None) -> float:
    """The squared error of one Linear's results on rows, rounded as the scheme says with its inputs divided."""
    twin = nn.Linear(linear.in_features, linear.out_features, bias=False, device="meta")
    weight = linear.weight.detach()
    scaled = weight if factor is None else (weight.float() * factor).to(weight.dtype)
    twin.weight = nn.Parameter(scaled, requires_grad=False)
    x = rows if factor is None else (rows.float() / factor.to(rows.device)).to(rows.dtype)
    layer = FakeQuantLinear.from_float(twin, scheme)
    layer.output_fake_quant = None
    fake = layer.input_fake_quant
    if fake is not None and not fake.follows:
        statistics = new_statistics(fake.scheme)
        statistics.observe(x)
        fake.set_range(compute_range(statistics, fake.scheme))
    return float((layer(x).double() - nn.functional.linear(rows, weight).double()).square().sum())


def _rounded_error(replay: Replay, config: Config, targets: list[Any], split: int, measure: ErrorFunction) -> float:
    model = replay.module
    with simulating(model, config):
        calibrate_(model, replay.batches[:split], split, batch_to_inputs=replay.batch_to_inputs)
        losses = [replay.error(measure, floats, replay.batches[split + i]) for i, floats in enumerate(targets)]
    return sum(losses) / len(losses)
