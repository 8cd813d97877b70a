"""Bugs in merged layers: whose rows, of which tensor, and when a kept result may be given."""

from __future__ import annotations

import copy

import torch
from mutants import edit, patch, register
from torch import nn

import pyquant
from pyquant.nn.merged_linear import Group


def check(seed: int) -> None:
    """Two merged layers against themselves apart, after other tensors and writes."""
    torch.manual_seed(seed)
    layers = nn.ModuleDict({"gate_proj": nn.Linear(32, 24), "up_proj": nn.Linear(32, 40)}).eval()
    apart = pyquant.quantize_(layers, pyquant.W8A8Dynamic(), check_speed=False)
    model = pyquant.merge_(copy.deepcopy(apart))
    x, y = torch.randn(3, 32), torch.randn(3, 32)
    with torch.no_grad():
        for name, given in (("gate_proj", x), ("up_proj", x), ("gate_proj", x), ("up_proj", y)):
            assert torch.equal(model[name](given), apart[name](given))
        model["gate_proj"](x)
        x.mul_(-3)
        assert torch.equal(model["up_proj"](x), apart["up_proj"](x))
        model["gate_proj"](y)
        apart["up_proj"].bias = model["up_proj"].bias = torch.ones(40)
        assert torch.equal(model["up_proj"](y), apart["up_proj"](y))
    with torch.inference_mode():
        z = torch.randn(3, 32)
        model["gate_proj"](z)
        z.mul_(-3)
        assert torch.equal(model["up_proj"](z), apart["up_proj"](z))
    assert all(torch.equal(t, apart.state_dict()[name]) for name, t in model.state_dict().items())


for old, new, name in (
    ("seen.x() is x and ", "", "the result of another tensor"),
    ("return x._version, *mode\n", "return mode\n", "a tensor that was written to"),
    ("return x.clone() if", "return x if", "a tensor of inference mode that was written to"),
):
    register(edit("nn.merged_linear", old, new), check, name=name, area="merge")
register(
    patch(Group, "rows", lambda self, place: slice(0, self.sizes[place])),
    check,
    name="the rows of the first member for all",
    area="merge",
)
register(patch(Group, "forget", lambda self: None), check, name="results of old weights", area="merge")
