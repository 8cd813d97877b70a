"""torch.compile of banks of experts: one graph, equal bits, and no compilation that no new shape asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import expert_banks
import pytest
import torch
from compiled import Compiled
from sample import sampled
from torch import Tensor, nn

import pyquant
from pyquant.nn import expert_rules


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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


@pytest.mark.parametrize("scheme", sampled(BANKS, 2, "banks", always=["W8A8Dynamic", "W4A16(group_size=16)"]))
def test_experts_are_part_of_the_graph(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers of rows are read when they run: no break, and no routing or number of tokens compiles again."""
    compiled = Compiled(routed_model(scheme, monkeypatch, bias=scheme in ("W8A16", "W8A8Dynamic")))
    for seed in range(7):
        ids, weights = expert_banks.routing(3 + seed, 5, 2, seed=seed)
        if seed == 2:
            ids[:] = 4  # one expert has all
        if seed == 3:
            ids[0], ids[1, 1] = torch.tensor([7, 9]), -1  # experts elsewhere
        compiled.check(torch.randn(3 + seed, 32), ids, weights)
        assert compiled.graphs == 1


@pytest.mark.parametrize("scheme", sampled(BANKS, 0, always=["W8A8Dynamic", "W4A16(group_size=16)"]))
def test_experts_of_other_types_and_numbers_of_tokens(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled(routed_model(scheme, monkeypatch))
    x, (ids, weights) = torch.randn(10, 32), expert_banks.routing(10, 5, 2, seed=7)
    compiled.check(x, ids, weights)
    compiled.check(x, ids.int(), weights)
    assert compiled.graphs == 2  # int32 is another graph
    for tokens in (0, 1):  # torch takes these two for constants
        compiled.check(x[:tokens], ids[:tokens], weights[:tokens])
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


@pytest.mark.parametrize("mixture", sampled(list(MIXTURES), 0, always=["every"]))
def test_experts_in_different_schemes_with_few_tokens(mixture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = Compiled(routed_model(MIXTURES[mixture], monkeypatch, expose=True))
    for tokens in (3, 0, 1):  # torch takes the last two for constants
        ids, weights = expert_banks.routing(max(tokens, 1), 5, 2)
        compiled.check(torch.randn(tokens, 32), ids[:tokens], weights[:tokens])
    assert compiled.graphs <= 3


@pytest.mark.parametrize(("mixture", "bias"), [("two", False), ("every", True), ("none", False), ("none", True)])
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
