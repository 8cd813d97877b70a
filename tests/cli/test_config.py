"""The configuration file of `pyquant quantize`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyquant.cli.config import parse_config, read_config
from pyquant.errors import ArgumentError


def test_patterns_come_before_the_default() -> None:
    layers = {"a.*": {"scheme": "W4A16", "group_size": 64}, "b": None}
    config = parse_config({"default": "W8A8Dynamic", "embeddings": True, "layers": layers}, "f")
    assert {key: str(scheme) for key, scheme in config.schemes.items()} == {
        "a.*": "W4A16(group_size=64)", "b": "None", "_default": "W8A8Dynamic",
    }  # fmt: skip
    assert config.embeddings


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "list"),
        ({"defualt": "W8A8"}, 'defualt\'; allowed: default, embeddings, layers; did you mean "default"?'),
        ({}, "no scheme"),
        ({"layers": {"a": None}}, "no scheme"),
        ({"layers": ["a"]}, "list"),
        ({"default": "W8A8Dynamic", "embeddings": "yes"}, "'yes'"),
        ({"default": 8}, "8"),
        ({"default": "W8A9"}, "W8A9"),
        ({"layers": {"a": "W4A8Dynamc"}}, 'did you mean "W4A8Dynamic"?'),
        ({"default": {"scheme": "W4A16", "groupsize": 3}}, "groupsize"),
        ({"layers": {"a": {"group_size": 3}}}, "None"),
    ],
)
def test_errors_name_the_file_and_what_is_wrong(data: object, told: str) -> None:
    with pytest.raises(ArgumentError) as error:
        parse_config(data, "some.yaml")
    assert "some.yaml" in str(error.value)
    assert told in str(error.value)


def test_json_and_yaml_read_the_same(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    data = {"default": "W8A8Dynamic", "layers": {"head": None}}
    (tmp_path / "c.json").write_text(json.dumps(data))
    (tmp_path / "c.yml").write_text("default: W8A8Dynamic\nlayers: {head: null}\n")
    assert read_config(tmp_path / "c.json") == read_config(tmp_path / "c.yml")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [("c.json", "{", "a JSON object"), ("c.yaml", "a: [", "valid YAML"), ("c.ini", "", ".yaml, .yml, .toml, .json")],
)
def test_unreadable_files(name: str, text: str, told: str, tmp_path: Path) -> None:
    if name.endswith(".yaml"):
        pytest.importorskip("yaml", reason="PyYAML is not installed")
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match=told):
        read_config(tmp_path / name)


def test_yaml_cannot_build_objects(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    marker = tmp_path / "made"
    (tmp_path / "c.yaml").write_text(f"default: !!python/object/apply:pathlib.Path.touch [{marker}]\n")
    with pytest.raises(ArgumentError):
        read_config(tmp_path / "c.yaml")
    assert not marker.exists()
