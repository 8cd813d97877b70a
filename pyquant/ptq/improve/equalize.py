"""equalize_: layers that feed each other get channels of equal range, so that one scale fits them all; no data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from pyquant.core import arguments
from pyquant.core.modes import evaluating
from pyquant.errors import ArgumentError, NonFiniteError
from pyquant.nn.flow import call
from pyquant.nn.linear_state import LinearState
from pyquant.nn.undo import Undo, undone_on_error
from pyquant.ptq.improve.equalize_pairs import Link, links_of, magnitudes
from pyquant.ptq.improve.replay import check_unmoved
from pyquant.ptq.improve.writable import check_writable
from pyquant.simulate.kinds import is_simulated

_SWEEPS: Final = 100
_SETTLED: Final = 1e-4  # the furthest from 1 that a factor of the last sweep may be


def equalize_(
    model: nn.Module,
    pairs: Iterable[tuple[str, Iterable[str]]] | None = None,
    *,
    example_inputs: object = None,
) -> dict[str, float]:
    """Give the channels between layers equal ranges of weights on both sides, in place, before quantisation.

    Where a Linear or Conv2d feeds others through nothing, ReLU, LeakyReLU, PReLU, pooling or dropout, its output
    channel i, of largest weight r1[i], is divided by s[i] = sqrt(r1[i] / r2[i]), bias included, and the weights that
    read it, of largest r2[i], are multiplied by s[i]. Then both are sqrt(r1[i] r2[i]). That is done in turn for all
    pairs that layers of theirs connect, until no factor is further than 1e-4 from 1. The function stays what it was but
    for rounding; no data is needed.
    model    float nn.Module in whatever mode; BatchNorms folded before (fold_batch_norm_), else they stand between.
    pairs    [(producer, [consumers]), ...] by full name; None: what the graph of the model shows, where torch.fx can
             trace it, and what smooth_'s rules and register_smoothing name.
    example_inputs   what the model is called with (as in rotate_) to see that its output stays, which given pairs
             should have; None: it is not called.
    ->       {producer: largest factor / smallest factor of its channels}.
    Computed in float32 to find the factors, in float64 to use them, and rounded once. Channels without weights on one
    side are left alone.
    Raises ArgumentError for unknown names, layers that are no such pair, a model that is quantised already or has no
    pair, and where the output moves; NonFiniteError where a number would not be finite in its type. Then everything is
    as before.
    Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721,
    equations 9 to 11.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3))
        >>> list(equalize_(model))
        ['0']
        >>> torch.allclose(model[0].weight.abs().amax(1), model[2].weight.abs().amax(0))
        True
    """
    return equalize_reversibly(model, pairs, example_inputs, [])


@torch.no_grad()
def equalize_reversibly(
    model: nn.Module, pairs: Iterable[Any] | None, example_inputs: object, undo: list[Undo]
) -> dict[str, float]:
    """equalize_ for a caller that may still fail. undo  receives the steps that take it back."""
    arguments.module("model", model)
    if any(is_simulated(m) or isinstance(m, LinearState) for m in model.modules()):
        raise ArgumentError("model", "a model with quantised layers", "a float model: equalize before quantising")
    check_writable(model)
    links = links_of(model, pairs)
    layers = {name: module for link in links for name, module in link.modules.items()}
    if any(p.is_meta for module in layers.values() for p in module.parameters(recurse=False)):
        raise ArgumentError("model", "weights on the meta device", "weights that are loaded")
    before = _outputs(model, example_inputs)
    put_back: list[Undo] = [
        partial(p.detach().copy_, p.detach().clone()) for m in layers.values() for p in m.parameters(recurse=False)
    ]
    with undone_on_error(put_back):
        factors = equalize_links_(links)
        if example_inputs is not None:
            allowed = "pairs whose producer feeds its consumers and nothing else; everything is undone"
            check_unmoved("pairs", before, _outputs(model, example_inputs), allowed)
    undo += put_back
    return {name: float(s.max() / s.min()) for name, s in factors.items()}


def _outputs(model: nn.Module, example_inputs: object) -> Any:
    if example_inputs is None:
        return None
    with evaluating(model):
        return call(model, example_inputs)


def equalize_links_(links: Sequence[Link]) -> dict[str, Tensor]:
    """Equalise the weights of these links in place; -> {producer: float64 [channels] that divided its channels}.

    Links that have no layer in common with others may be given without those. Raises NonFiniteError."""
    found: dict[str, Tensor] = {}
    for connected in _connected(links):
        factors = _factors(connected)
        for link in connected:
            _apply(link, factors[link.producer])
        for name, module in {n: m for link in connected for n, m in link.modules.items()}.items():
            if not all(bool(p.isfinite().all()) for p in module.parameters(recurse=False)):
                raise NonFiniteError(f"{name} after equalisation", "NaN or infinity", "finite values")
        found |= factors
    return {link.producer: found[link.producer] for link in links}


def _connected(links: Sequence[Link]) -> list[list[Link]]:
    """The links in groups that have no layer in common, each in its order."""
    groups: list[tuple[set[str], list[int]]] = []
    for i, link in enumerate(links):
        touched = [group for group in groups if group[0] & set(link.names)]
        groups = [group for group in groups if group not in touched]
        names = set(link.names).union(*(group[0] for group in touched))
        groups.append((names, sorted([i, *(j for group in touched for j in group[1])])))
    return [[links[i] for i in members] for _, members in sorted(groups, key=lambda group: group[1])]


def _factors(links: list[Link]) -> dict[str, Tensor]:
    """{producer: float64 [channels], by which its channels are divided}, from sweeps over these links."""
    known = {name: magnitudes(link, name) for link in links for name in link.consumers}
    known |= {link.producer: magnitudes(link, link.producer) for link in links if link.producer not in known}
    found = {link.producer: torch.ones(link.channels, dtype=torch.float64, device="cpu") for link in links}
    for _ in range(_SWEEPS):
        furthest = 0.0
        for link in links:
            rows = known[link.producer]
            ours = rows.amax(2).flatten()
            theirs = torch.stack([_by_channel(known[name], link.channels).to(ours.device) for name in link.consumers])
            r2 = theirs.amax(0)
            used = (ours > 0) & (r2 > 0) & ours.isfinite() & r2.isfinite()
            factor = torch.where(used, (ours.double() / r2.double()).sqrt(), 1.0)
            known[link.producer] = rows / factor.to(rows.dtype).view(rows.shape[0], -1, 1)
            for name in link.consumers:
                columns = known[name]
                known[name] = columns * _spread(factor, columns).to(columns.device, columns.dtype)
            found[link.producer] *= factor.cpu()
            furthest = max(furthest, float((factor - 1).abs().max()))
        if furthest <= _SETTLED:
            break
    return found


def _by_channel(columns: Tensor, channels: int) -> Tensor:
    """The largest magnitude that reads each channel, of [groups, outputs, channels of a group]."""
    return columns.amax(1).flatten().reshape(channels, -1).amax(1)


def _spread(factor: Tensor, columns: Tensor) -> Tensor:
    """Factors of channels as [groups, 1, channels of a group]."""
    return factor.view(columns.shape[0], 1, -1)


def _apply(link: Link, factor: Tensor) -> None:
    producer: Any = link.modules[link.producer]
    for parameter in producer.parameters(recurse=False):  # weight [N, ...] and bias [N]
        rows = factor.to(parameter.device).view(-1, *[1] * (parameter.dim() - 1))
        parameter.copy_(parameter.double() / rows)
    for name in link.consumers:
        weight: Any = link.modules[name].weight
        groups = getattr(link.modules[name], "groups", 1)
        by_input = factor.to(weight.device).view(groups, 1, -1)
        pixels = weight.shape[1] // by_input.shape[2]  # of channels that were flattened
        by_input = by_input.repeat_interleave(pixels, 2)
        shape = [*by_input.shape, *[1] * (weight.dim() - 2)]
        turned = weight.double().unflatten(0, (groups, -1)) * by_input.view(shape)
        weight.copy_(turned.flatten(0, 1))
