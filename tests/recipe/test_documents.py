"""Reading untrusted YAML, TOML and JSON: bounds, repeated keys, aliases, and that nothing but plain data is built."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from pyquant.errors import ArgumentError
from pyquant.recipe import Recipe
from pyquant.recipe.documents import MAX_BYTES, MAX_DEPTH, parse

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")


def deep(levels: int) -> str:
    return '{"a": ' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("text", "form", "told"),
    [
        ("a: [", "yaml", "valid YAML"),
        ("- a", "yaml", "a mapping at the top"),
        ("a: 1\nb: 2\na: 3", "yaml", "'a' is repeated in line 3"),
        ("a: {b: 1, b: 2}", "yaml", "'b' is repeated"),
        ("a: &x 1\nb: *x", "yaml", "anchor or alias in line 1"),
        ("a: !!python/object/apply:os.getcwd []", "yaml", "valid YAML"),
        ("a: 1\n---\nb: 1", "yaml", "valid YAML"),
        (deep(MAX_DEPTH + 1), "yaml", "nested too deeply"),
        ("[" * 5000, "yaml", "nested too deeply"),
        (deep(MAX_DEPTH + 1), "json", "nested too deeply"),
        ('{"a": 1, "a": 2}', "json", "repeated"),
        ('{"a": NaN}', "json", "not a finite number"),
        ("[1]", "json", "a list"),
        ("{", "json", "not the JSON"),
        ("a = ", "toml", "valid TOML"),
        ("a = 1\na = 2", "toml", "valid TOML"),
        ("x", "ini", "format 'ini'"),
    ],
)
def test_refused(text: str, form: str, told: str) -> None:
    if form == "toml":
        pytest.importorskip("tomllib", reason="needs Python 3.11")
    with pytest.raises(ArgumentError) as error:
        parse(text, form, "some file")
    assert told in str(error.value)
    assert "some file" in str(error.value)


def test_depth_and_size_at_the_limit() -> None:
    assert parse(deep(MAX_DEPTH), "json", "x")
    assert parse(deep(MAX_DEPTH), "yaml", "x")
    with pytest.raises(ArgumentError, match="at most"):
        parse("a: " + "x" * MAX_BYTES, "yaml", "x")


def test_files_are_refused_by_ending_existence_size_and_coding(tmp_path: Path) -> None:
    for name, data, told in [
        ("r.txt", b"{}", "ending '.txt'"),
        ("gone.yaml", None, "no such file"),
        ("big.json", b" " * (MAX_BYTES + 1), "at most"),
        ("latin.yaml", b"a: \xe9", "not UTF-8"),
    ]:
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(ArgumentError, match=told):
            Recipe.load(tmp_path / name)


def test_yaml_without_pyyaml_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ArgumentError, match="pip install pyyaml"):
        Recipe.loads("ptq_only: true")
    assert Recipe.loads(json.dumps({"ptq_only": True}), "json").ptq_only
