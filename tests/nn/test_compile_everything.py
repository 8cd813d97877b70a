"""torch.compile of every scheme and layer: one graph, equal bits, and no compilation that no new shape asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled import Compiled
from qlayers import ALL, CODES_OUT, layer
from sample import sampled
from torch import Tensor, nn

import pyquant

EVERY = [*ALL, *CODES_OUT]
# Inputs in static codes, in codes of each row, in floating point: of these strides and few rows as well.
STRIDED = {"W8A8", "W8A8Dynamic(symmetric_inputs=False)", "W4A16(group_size=16)"}
QUICK = {*STRIDED, "W4A8Dynamic(group_size=16)", "FP16"}
# in this order: rows that are free, then what torch itself compiles again for: another rank, strides, no row, one row
FORMS: dict[str, Callable[[int], Tensor]] = {
    "2-D": lambda m: torch.randn(m, 32),
    "3-D": lambda m: torch.randn(2, m, 32),
    "strided": lambda m: torch.randn(m, 64)[:, ::2],
    "transposed": lambda m: torch.randn(32, m).t(),
}
ROWS = (3, 2, 17, 64, 129, 5)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def every(names: set[str]) -> list[Any]:
    return sampled(EVERY, 0, always=[scheme for scheme in EVERY if str(scheme) in names])


@pytest.mark.parametrize("scheme", every(QUICK))
def test_every_scheme_and_rank_of_input(scheme: pyquant.QScheme) -> None:
    compiled = Compiled(layer(scheme).eval())
    for graphs, name in enumerate(("2-D", "3-D"), 1):
        for rows in ROWS:
            compiled.check(FORMS[name](rows))
        assert compiled.graphs <= graphs, name  # a rank: one more, whatever the rows


@pytest.mark.parametrize("scheme", every(STRIDED))
def test_strides_and_numbers_of_rows(scheme: pyquant.QScheme) -> None:
    compiled, graphs = Compiled(layer(scheme).eval()), 0
    for name in ("2-D", "strided", "transposed"):
        for rows in ROWS:
            compiled.check(FORMS[name](rows))
        assert compiled.graphs <= graphs + 1, name
        graphs = compiled.graphs
    for rows in (0, 1):  # torch takes these two for constants
        compiled.check(FORMS["2-D"](rows))
    assert compiled.graphs <= graphs + 2


def test_quick_schemes_are_among_them() -> None:
    assert set(map(str, EVERY)) >= QUICK


class Attending(nn.Module):
    """Self-attention with one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def quantised(model: nn.Module) -> nn.Module:
    return pyquant.quantize_(model.eval(), pyquant.W8A8Dynamic(), check_speed=False)


# name -> (the module, what makes an input of a size)
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "embedding": (lambda: pyquant.QEmbedding.from_float(nn.Embedding(50, 32)), lambda m: torch.randint(0, 50, (m, 5))),
    "convolution": (lambda: quantised(nn.Sequential(nn.Conv2d(4, 8, 3))), lambda m: torch.randn(m, 4, 9, 9)),
    "convolution of sizes": (
        lambda: quantised(nn.Sequential(nn.Conv2d(4, 8, 3))),
        lambda m: torch.randn(2, 4, m + 4, 9),
    ),
    "attention": (lambda: quantised(nn.Sequential(Attending())), lambda m: torch.randn(2, m, 32)),
    "encoder": (
        lambda: pyquant.fuse_(quantised(nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)))),
        lambda m: torch.randn(2, m, 32),
    ),
    "LSTM": (lambda: quantised(nn.Sequential(nn.LSTM(32, 16, batch_first=True))), lambda m: torch.randn(m, 5, 32)),
    "GRU": (lambda: quantised(nn.Sequential(nn.GRU(32, 16, batch_first=True))), lambda m: torch.randn(m, 5, 32)),
}


SLOW = {"LSTM", "GRU", "encoder"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.nightly if n in SLOW else ()) for n in LAYERS])
def test_every_layer(name: str) -> None:
    make, form = LAYERS[name]
    module = make()
    if name in ("LSTM", "GRU"):
        module = FirstResult(module)
    compiled = Compiled(module)
    for size in (3, 5, 8, 17, 2):
        compiled.check(form(size))
    assert compiled.graphs == 1
    compiled.check(form(1))
    assert compiled.graphs <= 2


class FirstResult(nn.Module):
    """The results of a recurrent layer without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]
