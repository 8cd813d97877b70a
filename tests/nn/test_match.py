"""FqnConfig: precedence, and keys that match nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import pyquant
from pyquant.core.presets import W8A8, W8A16, W4A8Dynamic, W8A8Dynamic
from pyquant.nn.match import FqnConfig

A, B, C, D, E = W8A8(), W8A8Dynamic(), W4A8Dynamic(16), W8A16(), W4A8Dynamic(32)


class Special(nn.Linear):
    pass


LINEAR, SPECIAL = nn.Linear(2, 2), Special(2, 2)


def chosen(entries: dict[Any, Any], name: str, module: nn.Module = LINEAR) -> Any:
    decision = FqnConfig(entries).decide(name, module)
    return "no decision" if decision is None else decision.scheme


def test_precedence_is_exact_re_glob_type_default() -> None:
    entries: dict[Any, Any] = {"_default": E, nn.Linear: D, "a.*": C, "re:a\\..": B, "a.b": A}
    for key, scheme in (("a.b", A), ("re:a\\..", B), ("a.*", C), (nn.Linear, D), ("_default", E)):
        assert chosen(entries, "a.b") == scheme
        del entries[key]
        entries["zz"] = None
    assert chosen(entries, "a.b") == "no decision"


@pytest.mark.parametrize(
    ("key", "name", "matches"),
    [
        ("encoder.*.query", "encoder.0.query", True),
        ("encoder.*.query", "encoder.0.attention.query", True),
        ("encoder.*.query", "encoder.query", False),
        ("encoder.*.query", "my.encoder.0.query", False),
        ("layer.?", "layer.1", True),
        ("layer.?", "layer.10", False),
        ("layer.[02]", "layer.2", True),
        ("layer.[02]", "layer.1", False),
        ("re:blocks\\.\\d+\\.mlp\\..*", "blocks.12.mlp.fc1", True),
        ("re:blocks\\.\\d+", "blocks.1.mlp", False),
        ("re:.*gate$", "x.gate", True),
        ("re:gate", "x.gate", False),
        ("head", "head", True),
        ("head", "head.0", False),
    ],
)
def test_patterns(key: str, name: str, matches: bool) -> None:
    assert (chosen({key: A}, name) == A) is matches


def test_the_closest_type_wins_and_none_leaves_alone() -> None:
    entries = {nn.Module: C, nn.Linear: A, Special: B}
    assert chosen(entries, "x", SPECIAL) == B
    assert chosen(entries, "x") == A
    assert chosen({nn.Linear: None, "_default": A}, "x") is None
    assert chosen({"re:x": None, "*": A}, "x") is None


def test_the_first_of_equals_wins() -> None:
    assert chosen({"re:a.*": A, "re:.*b": B}, "ab") == A
    assert chosen({"re:.*b": B, "re:a.*": A}, "ab") == B


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        (None, "NoneType"),
        ({}, "{}"),
        ([("a", A)], "list"),
        ({"a": "W9A9"}, "'a': 'W9A9'"),
        ({"a": print}, "builtin_function"),
        ({"": A}, "key ''"),
        ({3: A}, "key 3"),
        ({int: A}, "int"),
        ({"re:(": A}, "regular expression"),
    ],
)
def test_what_is_not_a_config_is_refused(entries: Any, match: str) -> None:
    with pytest.raises(pyquant.ArgumentError, match=r"argument 'config'.*" + re.escape(match)):
        FqnConfig(entries)


def model() -> nn.Module:
    block = nn.ModuleDict({"fc1": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    return nn.ModuleDict({"block": block, "head": nn.Sequential(nn.Linear(4, 2)), "embed": nn.Embedding(3, 4)})


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"block.fc2": B}, ["'block.fc2'", "block.fc1"]),
        ({"re:block\\.fc3": B, "block.fc1": B}, ["'re:block"]),
        ({"head": None, "_default": B}, ["'head' (matches 'head', a Sequential", "'head.*' means the layers inside"]),
        ({"block.norm": B, "_default": B}, ["'block.norm'", "LayerNorm", "not converted"]),
        ({nn.Conv2d: None, "_default": B}, ["Conv2d"]),
        ({nn.Embedding: B, "_default": B}, ["Embedding"]),
        ({nn.Sequential: None, "_default": B}, ["Sequential"]),
        ({"a.*": B, "b.*": B}, ["'a.*'", "'b.*'"]),
    ],
)
def test_keys_that_match_no_layer_are_named(entries: dict[Any, Any], told: list[str]) -> None:
    m = model()
    before = {name: id(child) for name, child in m.named_modules()}
    with pytest.raises(pyquant.ArgumentError, match=r"argument 'config'") as caught:
        pyquant.quantize_(m, FqnConfig(entries))
    for words in told:
        assert words in str(caught.value)
    assert {name: id(child) for name, child in m.named_modules()} == before


def test_a_key_that_a_stronger_one_shadows_is_used() -> None:
    pyquant.quantize_(model(), FqnConfig({"block.fc1": B, "re:block.*": None, "head.0": B}))


def test_leaving_alone_what_is_never_converted_is_fine() -> None:
    m = pyquant.quantize_(
        model(), FqnConfig({nn.Embedding: None, "re:.*norm": None, "block.norm": None, "_default": B})
    )
    assert sum(isinstance(child, pyquant.QLinear) for child in m.modules()) == 2


class Bracketed(nn.Module):
    """Names that read like globs, and what they would match."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("a[0]", "a0", "b?", "bc", "c*", "cd")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.h.values():
            x = layer(x)
        return x


@pytest.mark.parametrize("name", ["a[0]", "b?", "c*"])
def test_the_exact_name_of_a_layer_is_no_glob(name: str) -> None:
    """For quantize_, a plan that was searched, and a quantizer that skips; globs of no layer's name are globs."""
    scheme, key = pyquant.W8A8Dynamic(), f"h.{name}"

    def quantised(model: nn.Module) -> list[str]:
        return [n for n, m in model.named_modules() if isinstance(m, pyquant.QLinear)]

    names = [n for n, m in Bracketed().named_modules() if isinstance(m, nn.Linear)]
    others = [n for n in names if n != key]
    assert quantised(pyquant.quantize_(Bracketed(), {key: scheme}, check_speed=False)) == [key]
    assert quantised(pyquant.quantize_(Bracketed(), {key: None, "_default": scheme}, check_speed=False)) == others
    skipping = pyquant.SelectiveQuantizer(scheme=scheme, mode="hybrid")
    skipping.register_skip_quantization(layer_names={key})
    simulated = skipping.quantize_module(Bracketed()).named_modules()
    assert [n for n, m in simulated if hasattr(m, "weight_fake_quant")] == others
    assert quantised(pyquant.quantize_(Bracketed(), {"h.?[0-9]": scheme}, check_speed=False)) == ["h.a0"]
