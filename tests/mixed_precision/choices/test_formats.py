"""Formats by name: what they stand for, and what a recipe says for them."""

from __future__ import annotations

import warnings

import pytest
import torch

from pyquant.core.presets import W4A4, W4A8Dynamic
from pyquant.errors import ArgumentError
from pyquant.mixed_precision.choices.formats import NAMED, formats_of
from pyquant.recipe import LayerRule


def test_the_named_formats_are_the_founding_ones() -> None:
    float_, int8, int4 = formats_of(("float", "int8", "int4"))
    assert float_.is_float
    assert (float_.name, float_.weight_bits, float_.input_bits) == ("fp32", 32, 32)
    assert not float_.needs_data
    assert (int8.weight_bits, int8.input_bits, int8.needs_data) == (8, 8, True)
    assert (int4.weight_bits, int4.input_bits, int4.needs_data) == (4, 4, True)
    assert int8.scheme is not None
    assert int8.scheme.inputs.calibrator == "mse"
    assert int4.scheme is not None
    assert not int4.scheme.inputs.symmetric
    assert set(NAMED) == {"int8", "int4"}


def test_the_float_format_comes_first_and_presets_are_formats() -> None:
    found = formats_of(("W4A8Dynamic(group_size=64)", "W4A4", "bf16"), {torch.bfloat16})
    assert [f.name for f in found] == ["bf16", "W4A8Dynamic(group_size=64)", "W4A4"]
    assert found[1].scheme == W4A8Dynamic(64)
    assert not found[1].needs_data
    assert found[2].scheme.weights == W4A4().weights  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["int8", "int4", "W8A8", "W4A8", "W4A8Dynamic(group_size=64)", "W4A16", "W8A16"])
def test_a_rule_survives_its_file_and_means_the_same_scheme(name: str) -> None:
    format = formats_of(("fp32", name))[1]
    again = LayerRule.from_plain(format.rule.to_plain(), "here")
    assert again == format.rule
    from pyquant.recipe import Recipe

    recipe = Recipe(layers={"a": again}, default=LayerRule("float"))
    assert recipe.rules()["a"] == format.scheme


@pytest.mark.parametrize(
    "names",
    [
        ("fp32",),
        ("fp32", "bf16", "int8"),
        ("fp32", "int9"),
        "fp32",
        ("fp32", "int8", "int8"),
        ("fp32", "FP16"),
        (),
        ("fp32", 8),
    ],
)
def test_wrong_names_are_refused(names: object) -> None:
    with pytest.raises(ArgumentError, match="formats"):
        formats_of(names)  # type: ignore[arg-type]


def test_an_unknown_name_is_told_every_known_one() -> None:
    with pytest.raises(ArgumentError, match="argument 'formats': got 'fp8'") as raised:
        formats_of(("fp32", "fp8"))
    for name in ("fp32", "bf16", "int8", "int4", "W4A8Dynamic"):
        assert name in str(raised.value)


def test_recipes_know_the_same_names() -> None:
    from pyquant.mixed_precision.choices.formats import FLOATS
    from pyquant.recipe.sections import FORMATS

    assert set(FORMATS) == {*FLOATS, *NAMED}


def test_the_float_format_is_always_a_choice() -> None:
    assert [f.name for f in formats_of(("int8", "int4"))] == ["fp32", "int8", "int4"]


@pytest.mark.parametrize(
    ("dtypes", "name", "bits"),
    [
        ({torch.float32}, "fp32", 32),
        ({torch.float16}, "fp16", 16),
        ({torch.bfloat16}, "bf16", 16),
        ({torch.bfloat16, torch.float32}, "float", 32),
    ],
    ids=["fp32", "fp16", "bf16", "both"],
)
def test_the_float_format_is_called_what_the_layers_are(dtypes: set[torch.dtype], name: str, bits: int) -> None:
    for said in ("float", name):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = formats_of((said, "W4A16", "int8"), dtypes)
        assert [(f.name, f.weight_bits, f.input_bits) for f in found] == [
            (name, bits, bits),
            ("W4A16", 4, bits),
            ("int8", 8, 8),
        ]
    wrong = next(other for other in ("fp16", "fp32") if other != name)
    with pytest.warns(UserWarning, match=f"'{wrong}' stands for the model as it is.*called '{name}'"):
        assert formats_of((wrong, "int8"), dtypes)[0].name == name
