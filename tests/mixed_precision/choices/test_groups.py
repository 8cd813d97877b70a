"""Every layer with a choice is in exactly one group; layers of one input stay together."""

from __future__ import annotations

import pytest
from expert_banks import Bank, register_banks
from torch import Tensor, nn

import pyquant
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.choices.groups import find_groups
from pyquant.nn import expert_rules


def _block(*names: str) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (("q_proj", "k_proj", "v_proj", "o_proj"), ["q_proj+k_proj+v_proj", "o_proj"]),
        (("query", "key", "value", "dense"), ["query+key+value", "dense"]),
        (("gate_proj", "up_proj", "down_proj"), ["gate_proj+up_proj", "down_proj"]),
        (("w1", "w2", "w3"), ["w1+w3", "w2"]),
        (("q_proj", "v_proj"), ["q_proj+v_proj"]),
        (("fc1", "fc2"), ["fc1", "fc2"]),
    ],
)
def test_projections_of_one_input_share(names: tuple[str, ...], groups: list[str]) -> None:
    assert [g.name for g in find_groups(_block(*names))] == groups
    two = nn.ModuleList([_block(*names), _block(*names)])
    assert [g.name for g in find_groups(two)] == [f"{i}.{g}" for i in range(2) for g in groups]
    assert [g.layers for g in find_groups(two, "none")] == [(f"{i}.{n}",) for i in range(2) for n in names]


def test_all_experts_of_a_bank_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_rules, "_RULES", dict(expert_rules._RULES))
    register_banks()
    model = pyquant.expose_linears_(nn.ModuleDict({"fc": nn.Linear(4, 4), "experts": Bank(3, 8, 4)}))
    names = ["experts.*.gate_up_proj", "experts.*.down_proj"]
    found = {g.name: g.layers for g in find_groups(model)}
    assert found == {"fc": ("fc",)} | {n: tuple(n.replace("*", str(e)) for e in range(3)) for n in names}
    assert len(find_groups(model, "none")) == 7


def test_a_mapping_groups_as_it_says_and_leaves_the_rest_alone() -> None:
    model = nn.ModuleList([_block("fc1", "fc2"), _block("fc1", "fc2"), nn.Linear(4, 2)])
    found = find_groups(model, {"first": "0.*", "late": ["1.fc1", "2"]})
    assert {g.name: g.layers for g in found} == {
        "first": ("0.fc1", "0.fc2"),
        "late": ("1.fc1", "2"),
        "1.fc2": ("1.fc2",),
    }
    with pytest.raises(ArgumentError, match="one group"):
        find_groups(model, {"a": "0.*", "b": "0.fc1"})
    with pytest.raises(ArgumentError, match=r"'9\.\*'"):
        find_groups(model, {"a": "9.*"})


def test_what_cannot_be_quantised_or_is_filtered_is_in_no_group() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "m": nn.MultiheadAttention(4, 2), "b": nn.Linear(4, 4)})
    assert [g.name for g in find_groups(model)] == ["a", "b"]
    assert [g.name for g in find_groups(model, filter_fn=lambda m, name: name != "a")] == ["b"]
    with pytest.raises(ArgumentError, match=r"simulates its quantised layers.*remove_fake_quantize_"):
        find_groups(pyquant.prepare_qat_(nn.Sequential(nn.Linear(4, 4)), "W8A8Dynamic"))
    with pytest.raises(ArgumentError, match="layers to quantise"):
        find_groups(nn.Sequential(nn.ReLU()))
    with pytest.raises(ArgumentError, match="itself"):
        find_groups(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="grouping"):
        find_groups(model, "pairs")


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x @ self.fc.weight.mT)


def test_what_another_module_multiplies_by_is_in_no_group() -> None:
    assert [g.name for g in find_groups(Reader())] == ["out"]


def test_a_shared_layer_is_one_layer() -> None:
    layer = nn.Linear(4, 4)
    assert [g.layers for g in find_groups(nn.Sequential(layer, nn.ReLU(), layer))] == [("0",)]


class _Shared(nn.Module):
    """Three layers, of which the first and the last have one weight; four in two blocks, likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.a.weight


def test_layers_of_one_weight_share_a_group_whatever_the_grouping() -> None:
    """Apart, one of them in floating point would keep the floats, and no table of bytes a group says so."""
    model = _Shared()
    for grouping in ("auto", "none", {"mine": ["b"]}, {"b": ["b"], "x": ["a"]}):
        assert {g.layers for g in find_groups(model, grouping)} == {("a", "c"), ("b",)}
    assert {g.name: g.layers for g in find_groups(model, {"mine": ["c", "b"]})} == {"mine": ("a", "b", "c")}
    with pytest.raises(ArgumentError, match="one weight"):
        find_groups(model, {"one": "a", "two": "c"})
    blocks = nn.ModuleList([_block("q_proj", "k_proj", "o_proj"), _block("q_proj", "k_proj", "o_proj")])
    blocks[1]["k_proj"].weight = blocks[0]["k_proj"].weight
    assert {g.layers for g in find_groups(blocks)} == {
        ("0.q_proj", "0.k_proj", "1.q_proj", "1.k_proj"),
        ("0.o_proj",),
        ("1.o_proj",),
    }
