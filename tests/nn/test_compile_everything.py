"""torch.compile of every scheme and layer: one graph, equal bits, and no compilation that no new shape asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import expert_banks
import pytest
import torch
from qlayers import ALL, CODES_OUT, layer
from torch import Tensor, nn

import pyquant
from pyquant.core.qtensor import QTensor
from pyquant.nn import expert_rules

EVERY = [*ALL, *CODES_OUT]
QUICK = {"W8A8", "W8A8Dynamic(symmetric_inputs=False)", "W4A8Dynamic(group_size=16)", "W4A16(group_size=16)", "FP16"}
# in this order: rows that are free, then what torch itself compiles again for: another rank, strides, no row, one row
FORMS: dict[str, Callable[[int], Tensor]] = {
    "2-D": lambda m: torch.randn(m, 32),
    "3-D": lambda m: torch.randn(2, m, 32),
    "strided": lambda m: torch.randn(m, 64)[:, ::2],
    "transposed": lambda m: torch.randn(32, m).t(),
}
ROWS = (3, 2, 17, 64, 129, 5)


class Compiled:
    """A module through torch.compile without graph breaks; counts the graphs."""

    def __init__(self, module: nn.Module, fullgraph: bool = True) -> None:
        self.graphs, self.module = 0, module
        self._call = torch.compile(module, fullgraph=fullgraph, dynamic=True, backend=self._backend)

    def _backend(self, graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

    def check(self, *inputs: Any) -> None:
        """Equal bits."""
        with torch.no_grad():
            got, want = self._call(*inputs), self.module(*inputs)
        for a, b in [(got, want)] if isinstance(got, Tensor) else zip(_tensors(got), _tensors(want), strict=True):
            assert torch.equal(a, b)


def _tensors(value: Any) -> list[Tensor]:
    return [value.data, value.scale] if isinstance(value, QTensor) else list(value)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "scheme", [pytest.param(s, id=str(s), marks=() if str(s) in QUICK else pytest.mark.nightly) for s in EVERY]
)
def test_every_scheme_and_form_of_input(scheme: pyquant.QScheme) -> None:
    compiled, graphs = Compiled(layer(scheme).eval()), 0
    for name, form in FORMS.items():
        for rows in ROWS:
            compiled.check(form(rows))
        assert compiled.graphs <= graphs + 1, name  # a rank or strides: one more, whatever the rows
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


# ---- experts


class Routed(nn.Module):
    """A layer, experts, a layer."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.experts: nn.Module = (expert_banks.Biased if bias else expert_banks.Bank)(5, 32, 48)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return self.last(self.experts(self.first(x), ids, weights))  # type: ignore[no-any-return]


BANKS = [
    "W8A8Dynamic",
    "W4A8Dynamic(group_size=16)",
    "W8A8",
    "W4A16(group_size=16)",
    "W4A16(group_size=16, symmetric=False)",
    "W8A16",
    "FP16",
]


def routed_model(scheme: Any, monkeypatch: pytest.MonkeyPatch, bias: bool = False, expose: bool = False) -> Routed:
    monkeypatch.setattr(expert_rules, "_RULES", dict(expert_rules._RULES))
    expert_banks.register_banks()
    torch.manual_seed(3)
    model = Routed(bias).eval()
    data = [(torch.randn(40, 32), *expert_banks.routing(40, 5, 2))] if scheme == "W8A8" else None
    feed = None if data is None else tuple
    if expose:  # so that a bank whose layers all stay floats is one of layers, too
        pyquant.expose_linears_(model)
    pyquant.quantize_(model, scheme, data=data, batch_to_inputs=feed, check_speed=False)
    assert isinstance(model.experts, pyquant.QExperts)
    return model


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> Routed:
    return routed_model("W8A8Dynamic", monkeypatch)


@pytest.mark.parametrize("scheme", BANKS)
def test_experts_are_part_of_the_graph(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers of rows are read when they run: no break, and no routing or number of tokens compiles again."""
    compiled = Compiled(routed_model(scheme, monkeypatch, bias=scheme in ("W8A16", "W8A8Dynamic")))
    for seed in range(8):
        ids, weights = expert_banks.routing(3 + seed, 5, 2, seed=seed)
        if seed == 2:
            ids[:] = 4  # one expert has all
        if seed == 3:
            ids[0], ids[1, 1] = torch.tensor([7, 9]), -1  # experts elsewhere
        compiled.check(torch.randn(3 + seed, 32), ids.int() if seed == 7 else ids, weights)
        assert compiled.graphs == (2 if seed == 7 else 1)  # int32 is another graph
    for tokens in (0, 1):  # torch takes these two for constants
        ids, weights = expert_banks.routing(max(tokens, 1), 5, 2)
        compiled.check(torch.randn(tokens, 32), ids[:tokens], weights[:tokens])
    assert compiled.graphs <= 4


def test_compiled_experts_by_inductor(routed: Routed) -> None:
    call = torch.compile(routed, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (6, 17):
            x, (ids, weights) = torch.randn(tokens, 32), expert_banks.routing(tokens, 5, 2, seed=tokens)
            assert torch.equal(call(x, ids, weights), routed(x, ids, weights))


def test_a_node_of_a_graph_is_one_native_call(routed: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in eager mode: two calls of the library a bank, not one an expert."""
    if not pyquant.ops.native_available():
        pytest.skip("the grouped product is compiled")
    x, (ids, weights) = torch.randn(9, 32), expert_banks.routing(9, 5, 2)
    compiled = Compiled(routed)
    compiled.check(x, ids, weights)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled._call(x, ids, weights)
    calls = {event.key: event.count for event in profile.key_averages() if event.key.startswith("pyquant::")}
    assert calls["pyquant::_grouped_linear"] == calls["pyquant::_routed_linear"] == 2
    assert calls["pyquant::qlinear"] == 2  # those before and behind the bank


MIXTURES: dict[str, dict[str, Any]] = {
    "two": {"experts.2.*": pyquant.W8A16(), "_default": pyquant.W8A8Dynamic()},
    "every": {
        "experts.0.*": pyquant.W8A16(16),
        "experts.1.*": pyquant.W4A8Dynamic(16),
        "experts.2.gate_up_proj": pyquant.FP16(),
        "experts.2.down_proj": None,
        "experts.3.down_proj": pyquant.W4A16(16, symmetric=False),
        "_default": pyquant.W8A8Dynamic(symmetric_inputs=False),
    },
    "none": {"experts.*": None, "_default": pyquant.W8A8Dynamic()},
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mixture", list(MIXTURES))
def test_experts_in_different_schemes_are_part_of_the_graph(
    mixture: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node for the layers of each scheme, those in floating point included; nothing compiles again."""
    compiled = Compiled(routed_model(MIXTURES[mixture], monkeypatch, bias, expose=True))
    for seed in range(8):
        ids, weights = expert_banks.routing(3 + seed, 5, 2, seed=seed)
        if seed in (2, 3):
            ids[:] = seed  # one expert has all
        if seed == 4:
            ids[0], ids[1, 1] = torch.tensor([7, 9]), -1  # experts elsewhere
        compiled.check(torch.randn(3 + seed, 32), ids, weights)
        assert compiled.graphs == 1
    for tokens in (0, 1):  # torch takes these two for constants
        ids, weights = expert_banks.routing(max(tokens, 1), 5, 2)
        compiled.check(torch.randn(tokens, 32), ids[:tokens], weights[:tokens])
    assert compiled.graphs <= 3


def test_mixed_experts_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    model = routed_model(MIXTURES["every"], monkeypatch, expose=True)
    call = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (6, 17):
            x, (ids, weights) = torch.randn(tokens, 32), expert_banks.routing(tokens, 5, 2, seed=tokens)
            assert torch.equal(call(x, ids, weights), model(x, ids, weights))


def test_watched_experts_break_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own calls run between two graphs, hooks and all, and the bits are the same."""
    model: Any = routed_model("W8A8Dynamic", monkeypatch)
    model.experts.expert(2)[0].register_forward_hook(lambda _, inputs, y: y * 2)
    compiled, graphs = Compiled(model, fullgraph=False), []
    for seed in range(12):
        compiled.check(torch.randn(3 + seed, 32), *expert_banks.routing(3 + seed, 5, 2, seed=seed))
        graphs.append(compiled.graphs)
    assert graphs[0] >= 2
    assert len(set(graphs[2:])) == 1, graphs


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(expert_banks.FAMILIES))
def test_mixtures_of_transformers_are_one_graph(family: str) -> None:
    """The mixture block as the family writes it, its router included."""
    pytest.importorskip("transformers")
    model = expert_banks.model_of(family)
    name = next(n for n, _ in expert_banks.experts_of(model).items()).rpartition(".")[0]
    block = model.get_submodule(name)
    pyquant.quantize_(block, pyquant.W8A8Dynamic(), check_speed=False)
    compiled = Compiled(block)
    for tokens in (3, 8, 21):
        compiled.check(torch.randn(1, tokens, 64))
    assert compiled.graphs == 1


def test_exported_experts_take_every_token(routed: Routed) -> None:
    x, (ids, weights) = torch.randn(6, 32), expert_banks.routing(6, 5, 2)
    rows = torch.export.Dim("rows", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(routed, (x, ids, weights), dynamic_shapes=({0: rows},) * 3).module()
        for tokens in (2, 6, 33):
            x, (ids, weights) = torch.randn(tokens, 32), expert_banks.routing(tokens, 5, 2, seed=tokens)
            assert torch.equal(program(x, ids, weights), routed(x, ids, weights))
