"""--formats, the same in every command."""

from __future__ import annotations

import argparse

import pytest

from pyquant.cli.options import DEFAULT, add_formats, formats_of


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], DEFAULT),
        (["--formats", "fp32", "int8"], ("fp32", "int8")),
        (["--formats", "int8,int4"], ("int8", "int4")),
        (
            ["--formats", "fp32,", "W4A8(group_size=64, symmetric_inputs=False)"],
            ("fp32", "W4A8(group_size=64, symmetric_inputs=False)"),
        ),
    ],
)
def test_names_apart_and_between_commas(words: list[str], names: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    add_formats(parser)
    assert formats_of(parser.parse_args(words).formats) == names
