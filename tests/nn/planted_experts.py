"""Bugs in banks of experts: who multiplies which rows, and how results come back to their tokens."""

from __future__ import annotations

import torch
from expert_banks import Bank, Biased, one_by_one, register_banks, routing
from mutants import edit, register
from torch import nn

import pyquant


def check(seed: int) -> None:
    """Two banks against one token at a time."""
    register_banks()
    torch.manual_seed(seed)
    for bank in (Bank(5, 32, 16), Biased(5, 32, 16)):
        scheme = pyquant.W8A8Dynamic()
        names = (("gate_up_proj", "up_bias"), ("down_proj", "down_bias"))
        layers = [tuple(pyquant.QLinear.from_float(bank.layer(e, *n), scheme) for n in names) for e in range(5)]
        model = pyquant.quantize_(nn.ModuleDict({"experts": bank}), scheme, check_speed=False)
        x, (ids, weights) = torch.randn(12, 32), routing(12, 5, 3, seed)
        ids[2, 0] = 7
        want = one_by_one(layers, nn.functional.silu, x, ids, weights)
        assert torch.equal(model["experts"](x, ids, weights), want)  # type: ignore[operator]
        for layer in model["experts"].expert(1):  # type: ignore[operator]
            layer.register_forward_hook(lambda *_: None)  # this one by itself, the others in one call
        assert torch.equal(model["experts"](x, ids, weights), want)  # type: ignore[operator]


for old, new, name in (
    ("y[place]", "y[place[:, :1]]", "the result of the first expert for all"),
    ("weights.unsqueeze(-1)", "weights[:, :1, None]", "the weight of the first slot for all"),
    ("place.clamp(max=present)", "place.clamp(max=present - 1)", "the result of another for an expert elsewhere"),
    ("mine[ends[i] : ends[i + 1]] for i", "mine[: counts[i]] for i", "every expert multiplies the first rows"),
    ("zip(places, y.split(own)", "zip(places[::-1], y.split(own)", "results of one call for several go to others"),
    (
        "_spec, rows, out",
        "_spec, rows if rows is None else rows.flip(0), out",
        "one call for all takes the codes of other tokens",
    ),
    ("torch.tensor(counts, dtype", "torch.tensor(counts[::-1], dtype", "counts of other experts"),
):
    register(edit("nn.expert_rows", old, new), check, name=name, area="experts")
