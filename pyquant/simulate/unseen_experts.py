"""Experts to which the router gave no token of the calibration data: whose ranges they get, and that it is told."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pyquant.calibrate import Range
from pyquant.core.names import listed
from pyquant.errors import QuantizationWarning
from pyquant.nn.experts import QExperts
from pyquant.simulate.fake_quantize import FakeQuantize
from pyquant.simulate.kinds import is_simulated

Peers = dict[str, list[str]]


def peers_of(model: nn.Module, fakes: Mapping[str, FakeQuantize]) -> Peers:
    """{name of a fake quantiser in an expert: those of the same tensor of all experts of its bank}."""
    names = {id(fake): name for name, fake in fakes.items()}
    found: Peers = {}
    for bank in (m for m in model.modules() if isinstance(m, QExperts)):
        for place in range(2):
            for tensor in ("input", "output"):
                held = (_fake(pair[place], tensor) for pair in bank.experts())
                group = [names[id(fake)] for fake in held if id(fake) in names]
                found.update(dict.fromkeys(group, group))
    return found


def widest(names: Sequence[str], ranges: Mapping[str, Range]) -> Range | None:
    """The range that covers those of all of these that have one; None where none has."""
    known = [ranges[name] for name in names if name in ranges]
    if not known:
        return None
    return Range(torch.stack([r.low for r in known]).amin(0), torch.stack([r.high for r in known]).amax(0))


def count_tokens(model: nn.Module, fakes: Mapping[str, FakeQuantize], counts: Mapping[str, int]) -> None:
    """Write down how many tokens each expert saw, in `tokens_seen` of its bank; warn of those that saw none.

    counts  {name of a fake quantiser: how many numbers it saw}.
    """
    names = {id(fake): name for name, fake in fakes.items()}
    for place, bank in model.named_modules():
        if not isinstance(bank, QExperts):
            continue
        inputs = [(pair, _fake(pair[0], "input")) for pair in bank.experts()]
        if not all(id(fake) in names for _, fake in inputs):
            continue
        bank.tokens_seen = [counts[names[id(fake)]] // max(bank.hidden_size, 1) for _, fake in inputs]
        unseen = [e for e, count in enumerate(bank.tokens_seen) if count == 0]
        for e in unseen:
            for layer in bank.expert(e):
                layer.__dict__["note"] = "its expert saw no token in calibration: the widest range of the others"
        if unseen:
            which = listed([str(e) for e in unseen], 6)
            said = f"{len(unseen)} of {bank.num_experts} experts of {place} saw no token of the calibration data"
            warnings.warn(
                f"{said} ({which}): their inputs get the widest range of the other experts; more batches help",
                QuantizationWarning,
                stacklevel=2,
            )


def tell_of_untouched(model: nn.Module, layers: Mapping[str, nn.Module], touched: Collection[str]) -> None:
    """Warn of experts that an improver left as they were, as none of its data reached them; those that calibration
    has named already are not named again.

    layers  those that it was to change, by name; touched: the names of those that it has judged.
    """
    untouched = {id(layer) for name, layer in layers.items() if name not in touched}
    for place, bank in model.named_modules():
        if not isinstance(bank, QExperts):
            continue
        known = bank.tokens_seen or [1] * bank.num_experts
        unseen = [e for e, pair in enumerate(bank.experts()) if known[e] and any(id(m) in untouched for m in pair)]
        for e in unseen:
            for layer in (layer for layer in bank.expert(e) if id(layer) in untouched):
                layer.__dict__["note"] = "its expert saw no token of the data: every weight has its nearest code"
        if unseen:
            said = f"{len(unseen)} of {bank.num_experts} experts of {place} saw no token of the data"
            warnings.warn(
                f"{said} ({listed([str(e) for e in unseen], 6)}): their weights keep their nearest codes; more batches "
                "help",
                QuantizationWarning,
                stacklevel=2,
            )


def _fake(layer: Any, tensor: str) -> FakeQuantize | None:
    return layer.fake_quantizers().get(tensor) if is_simulated(layer) else None
