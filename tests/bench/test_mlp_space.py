"""The space of the founding experiment has the sizes that are known, and names are read strictly."""

from __future__ import annotations

import pytest

from pyquant.bench.mlp_space import SIZES, all_configs, capacity, parse_config, parse_sizes, scaled
from pyquant.errors import ArgumentError


@pytest.mark.parametrize("of", ["output", "input"])
def test_capacities_of_the_original_sizes(of: str) -> None:
    configs = all_configs()
    found = [capacity(SIZES, config, of) for config in configs]
    assert (len(found), len(set(configs)), len(set(found)), min(found), max(found)) == (729, 729, 184, 258048, 1032192)


def test_input_and_output_capacities_are_the_same_numbers_in_another_order() -> None:
    outputs, inputs = ([capacity(SIZES, c, of) for c in all_configs()] for of in ("output", "input"))
    assert sorted(outputs) == sorted(inputs)
    assert outputs != inputs
    with pytest.raises(ArgumentError, match=r"both.*output, input"):
        capacity(SIZES, all_configs()[0], "both")


def test_scaling_keeps_the_number_of_distinct_capacities() -> None:
    sizes = scaled(SIZES, 32)
    assert len({capacity(sizes, c) for c in all_configs()}) == 184
    assert {32 * capacity(sizes, c) for c in all_configs()} == {capacity(SIZES, c) for c in all_configs()}


def test_both_spellings_of_formats() -> None:
    assert parse_config("float, s8,s4,int8,int4,f16", 6) == ("float", "int8", "int4", "int8", "int4", "float")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (",".join(["float"] * 7), "7 formats.*each of the 6"),  # the original's default listed one too many
        ("float", "1 formats"),
        ("float,float,float,float,float,fp8", "fp8"),
        ("", "''"),
    ],
)
def test_wrong_configurations_are_named(text: str, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        parse_config(text, 6)


@pytest.mark.parametrize("text", ["", "5", "4,x", "4,0", "4,-1", "4,2.5"])
def test_wrong_sizes_are_named(text: str) -> None:
    with pytest.raises(ArgumentError, match="nn-size"):
        parse_sizes(text)


def test_a_divisor_must_divide() -> None:
    for divisor in (0, -1, 3, 2048):
        with pytest.raises(ArgumentError, match="scale"):
            scaled(SIZES, divisor)
