"""The file of `pyquant quantize --config`: a recipe whose missing keys are as in quantize_."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import pyquant
from pyquant.errors import ArgumentError
from pyquant.recipe import Recipe


def written(folder: Path, data: object) -> Path:
    path = folder / "some.json"
    path.write_text(json.dumps(data))
    return path


def test_what_is_not_said_is_as_in_quantize(tmp_path: Path) -> None:
    layers = {"a.*": {"scheme": "W4A16", "group_size": 64}, "b": None}
    recipe = Recipe.load_config(written(tmp_path, {"default": "W8A8Dynamic", "embeddings": True, "layers": layers}))
    assert {key: str(scheme) for key, scheme in recipe.config().entries.items()} == {
        "a.*": "W4A16(group_size=64)",
        "b": "None",
        "_default": "W8A8Dynamic",
    }
    assert recipe.embeddings
    assert recipe.heads is None
    recipe = Recipe.load_config(written(tmp_path, {"layers": {"a": "W8A8"}}))
    assert recipe.default_scheme() is None
    assert recipe.rules()["a"] == pyquant.W8A8()


def test_a_recipe_without_the_keys_is_what_it_was(tmp_path: Path) -> None:
    recipe = Recipe.load(written(tmp_path, {"layers": {"a": "W4A8"}}))
    assert recipe.default.scheme == "W8A8"
    assert (recipe.heads, recipe.embeddings) == ("everything", False)
    assert not {"heads", "embeddings"} & recipe.to_dict().keys()


@pytest.mark.parametrize("form", ["json", "toml", "yaml"])
@pytest.mark.parametrize("heads", [None, True, False, "everything"])
def test_heads_go_through_every_format(heads: object, form: str) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    recipe = Recipe.from_dict({"heads": heads, "embeddings": True})
    assert Recipe.loads(recipe.dumps(form), form) == recipe
    assert recipe.heads == heads


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "list"),
        ({"defualt": "W8A8"}, 'did you mean "default"?'),
        ({"default": "W8A8", "heads": "some"}, "true, false, null (or warn), everything"),
        ({}, "no scheme"),
        ({"layers": {"a": None}}, "no scheme"),
        ({"layers": ["a"]}, "list"),
        ({"default": "W8A8Dynamic", "embeddings": "yes"}, "'yes'"),
        ({"default": 8}, "8"),
        ({"default": "W8A9"}, "W8A9"),
        ({"layers": {"a": "W4A8Dynamc"}}, 'did you mean "W4A8Dynamic"?'),
        ({"default": {"scheme": "W4A16", "groupsize": 3}}, "groupsize"),
        ({"layers": {"a": {"group_size": 3}}}, "group_size"),
    ],
)
def test_errors_name_the_file_and_what_is_wrong(data: object, told: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError) as error:
        Recipe.load_config(written(tmp_path, data))
    assert "some.json" in str(error.value)
    assert told in str(error.value)


def test_json_and_yaml_read_the_same(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    data = {"default": "W8A8Dynamic", "layers": {"head": None}}
    (tmp_path / "c.json").write_text(json.dumps(data))
    (tmp_path / "c.yml").write_text("default: W8A8Dynamic\nlayers: {head: null}\n")
    assert Recipe.load_config(tmp_path / "c.json") == Recipe.load_config(tmp_path / "c.yml")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [("c.json", "{", "a JSON object"), ("c.yaml", "a: [", "valid YAML"), ("c.ini", "", ".yaml, .yml, .toml, .json")],
)
def test_unreadable_files(name: str, text: str, told: str, tmp_path: Path) -> None:
    if name.endswith(".yaml"):
        pytest.importorskip("yaml", reason="PyYAML is not installed")
    (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match=told):
        Recipe.load_config(tmp_path / name)


def test_yaml_cannot_build_objects(tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    marker = tmp_path / "made"
    (tmp_path / "c.yaml").write_text(f"default: !!python/object/apply:pathlib.Path.touch [{marker}]\n")
    with pytest.raises(ArgumentError):
        Recipe.load_config(tmp_path / "c.yaml")
    assert not marker.exists()
