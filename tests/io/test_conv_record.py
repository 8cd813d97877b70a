"""Convolutions in a checkpoint: format version 2, every lie about a geometry refused, the released fixture for ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import accept
import checkpoints
import pytest
from checkpoints import SCHEMES, Forger

from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import load_checkpoint, save_checkpoint
from pyquant.io.record import LayerRecord, check_layer

GEOMETRY = {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0, 2, 3), "dilation": (1, 2)}
FIXTURE = Path(__file__).parent / "fixtures" / "version_2"
FIXTURE_PIN = "443763b2bb81e9cc7b5e8c9925c08ceac3eaccdf90dc9063e3b3bd70e879a850"


def conv(name: str, scheme: str = "W8A8 affine", **changes: Any) -> LayerRecord:
    named = SCHEMES[scheme]  # with ranges by the maximum, which presets had when the fixture was made
    named = replace(named, weights=named.weights and replace(named.weights, calibrator="max"))
    made = checkpoints.layer(name, named, 4, 24, 7, kind="conv2d", geometry=dict(GEOMETRY))
    return replace(made, **changes)


def layers() -> list[LayerRecord]:
    return [
        conv("stem"),
        conv("body.0", "W4A8 g8", activation="relu"),
        conv("body.1", "affine codes out"),
        conv("body.2", "W4A16 affine g8"),
        conv("body.3", "FP16"),
        checkpoints.layer("head", SCHEMES["W8A8Dynamic"], 5, 4, 9),
    ]


def test_round_trip(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, layers(), {}, extra={})
    loaded = load_checkpoint(tmp_path)
    accept.t0(checkpoints.fingerprint(loaded), checkpoints.contents(layers(), {}, {}))
    document = json.loads((tmp_path / "manifest.json").read_bytes())
    assert document["version"] == 2
    assert document["layers"]["stem"]["geometry"]["padding"] == [1, 0, 2, 3]
    assert "geometry" not in document["layers"]["head"]
    told = loaded.config["quantization_config"]
    assert [t for g in told["config_groups"].values() for t in g["targets"]] == ["head"]
    assert set(told["ignore"]) >= {"stem", "body.0", "body.1"}
    save_checkpoint(tmp_path, [conv("stem")], {}, extra={})
    assert load_checkpoint(tmp_path).config == {}


def test_groups_travel_and_one_is_no_key(tmp_path: Path) -> None:
    given = [conv(f"conv{groups}", geometry={**GEOMETRY, "groups": groups}) for groups in (1, 2, 4)]
    save_checkpoint(tmp_path, given, {}, extra={})
    found = {layer.name: layer.geometry for layer in load_checkpoint(tmp_path).layers}
    assert found == {"conv1": GEOMETRY, "conv2": GEOMETRY | {"groups": 2}, "conv4": GEOMETRY | {"groups": 4}}


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"geometry": None}, "stem.geometry"),
        ({"geometry": [3, 3]}, "stem.geometry"),
        ({"geometry": {"kernel_size": (3, 2)}}, "stem.geometry"),
        ({"geometry": {**GEOMETRY, "depth": 2}}, "stem.geometry"),
        ({"geometry": {**GEOMETRY, "groups": 5}}, "stem.geometry.groups"),
        ({"geometry": {**GEOMETRY, "groups": -1}}, "stem.geometry.groups"),
        ({"geometry": {**GEOMETRY, "groups": True}}, "stem.geometry.groups"),
        ({"geometry": {**GEOMETRY, "groups": (2, 2)}}, "stem.geometry.groups"),
        ({"geometry": {**GEOMETRY, "kernel_size": (0, 2)}}, "stem.geometry.kernel_size"),
        ({"geometry": {**GEOMETRY, "kernel_size": (3, 2, 1)}}, "stem.geometry.kernel_size"),
        ({"geometry": {**GEOMETRY, "kernel_size": (5, 1)}}, "stem.in_features"),
        ({"geometry": {**GEOMETRY, "stride": (0, 1)}}, "stem.geometry.stride"),
        ({"geometry": {**GEOMETRY, "stride": (True, 1)}}, "stem.geometry.stride"),
        ({"geometry": {**GEOMETRY, "padding": (1, 1)}}, "stem.geometry.padding"),
        ({"geometry": {**GEOMETRY, "padding": (-1, 0, 0, 0)}}, "stem.geometry.padding"),
        ({"geometry": {**GEOMETRY, "dilation": (1.0, 1)}}, "stem.geometry.dilation"),
        ({"geometry": {**GEOMETRY, "dilation": (2**31, 1)}}, "stem.geometry.dilation"),
        ({"kind": "linear"}, "stem.geometry"),
    ],
)
def test_wrong_records_are_refused(changes: dict[str, Any], argument: str) -> None:
    check_layer(conv("stem"))
    with pytest.raises(ArgumentError, match=rf"^argument '{argument}'"):
        check_layer(conv("stem", **changes))


def _layer(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda d: d["layers"]["stem"].__setitem__(key, value)


def _shape(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda d: d["layers"]["stem"]["geometry"].__setitem__(key, value)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d.__setitem__("version", 1), "version.*first version that knows"),
        (lambda d: d.__setitem__("version", 4), "newer pyquant"),
        (lambda d: d["layers"]["stem"].pop("geometry"), "'geometry' is missing"),
        (lambda d: d["layers"]["head"].__setitem__("geometry", None), "unknown key 'geometry'"),
        (_layer("geometry", []), "an object"),
        (_layer("kind", "linear"), "unknown key 'geometry'"),
        (_shape("groups", 1), "groups"),
        (_shape("groups", [2]), "groups"),
        (_shape("groups", 5), "groups"),
        (_shape("kernel_size", 3), "lists of integers"),
        (_shape("kernel_size", [3, 3]), "in_features"),
        (_shape("kernel_size", [2**40, 2**40]), "kernel_size"),
        (_shape("stride", [1, "1"]), "stride"),
        (_shape("padding", [0, 0, 0]), "padding"),
    ],
)
def test_crafted_manifests_are_refused(tmp_path: Path, edit: Callable[[dict[str, Any]], object], words: str) -> None:
    save_checkpoint(tmp_path, layers(), {}, extra={})
    forger = Forger(tmp_path)
    edit(forger.document)
    forger.sign()
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path)


def test_the_released_fixture_of_version_2_loads_for_ever_and_is_still_written(tmp_path: Path) -> None:
    loaded = load_checkpoint(FIXTURE, manifest_sha256=FIXTURE_PIN)
    accept.t0(checkpoints.fingerprint(loaded), checkpoints.contents(layers(), {}, {}))
    save_checkpoint(tmp_path, loaded.layers, loaded.tensors, extra=loaded.extra)
    accept.t0(*({p.name: p.read_bytes() for p in d.iterdir()} for d in (tmp_path, FIXTURE)))
