"""Manifests that lie: every digest in them fits, so that each rule must find its own lie."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accept
import checkpoints
import pytest
from checkpoints import Forger
from hypothesis import given, settings
from hypothesis import strategies as st

from pyquant.errors import CheckpointError
from pyquant.io import load_checkpoint, manifest, save_checkpoint
from pyquant.io.strict_json import lines

Edit = Callable[[dict[str, Any]], object]

T, FC1, FC2 = "tensors", "blocks.0.fc1", "blocks.0.fc2"


def _set(*path: Any) -> Edit:
    """The edit document[path[0]][path[1]]... = path[-1]."""

    def edit(document: dict[str, Any]) -> None:
        node: Any = document
        for key in path[:-2]:
            node = node[key]
        node[path[-2]] = path[-1]

    return edit


def _del(*path: Any) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        node: Any = document
        for key in path[:-1]:
            node = node[key]
        del node[path[-1]]

    return edit


def _rename(table: str, old: str, new: str) -> Edit:
    return lambda d: d[table].__setitem__(new, d[table].pop(old))


def _swap(table: str, a: str, b: str) -> Edit:
    return lambda d: d[table].update({a: d[table][b], b: d[table][a]})


def _swap_field(field: str, a: str, b: str) -> Edit:
    def edit(d: dict[str, Any]) -> None:
        d[T][a][field], d[T][b][field] = d[T][b][field], d[T][a][field]

    return edit


def _shard_of(d: dict[str, Any]) -> str:
    return next(name for name in d["files"] if name.startswith("model-"))


def _set_shard(key: str, value: Any) -> Edit:
    return lambda d: d["files"][_shard_of(d)].__setitem__(key, value)


def _rename_shard(new: str) -> Edit:
    def edit(d: dict[str, Any]) -> None:
        old = _shard_of(d)
        d["files"][new] = d["files"].pop(old)
        for body in d[T].values():
            body["file"] = new

    return edit


SCHEME = ("layers", FC1, "scheme")
# name -> (edit, words that the message must hold). Tensors that follow from a scheme are named by the scheme's check.
CRAFTED: dict[str, tuple[Edit, str]] = {
    "other format": (_set("format", "torchquant"), "format"),
    "no format": (_del("format"), "format"),
    "future version": (_set("version", 4), "newer pyquant"),
    "a version that no layer needs": (_set("version", 2), "first version that knows"),
    "far future version": (_set("version", 10**12), "newer pyquant"),
    "version 0": (_set("version", 0), "version"),
    "version true": (_set("version", True), "version"),
    "version text": (_set("version", "1"), "version"),
    "version 1.0": (_set("version", 1.0), "version"),
    "no version": (_del("version"), "version"),
    "unknown key": (_set("hooks", {}), "unknown key 'hooks'"),
    "missing key": (_del("pending"), "'pending' is missing"),
    "config no object": (_set("config", []), "config"),
    "extra no object": (_set("extra", "x"), "extra"),
    "files no object": (_set("files", []), "files"),
    "tensors no object": (_set(T, None), "tensors"),
    "pending names a shard": (_set("pending", {"model-0000000000000000.safetensors": None}), "pending"),
    "pending no digest": (_set("pending", {"config.json": "abc"}), "pending"),
    "path escape": (_rename_shard("../model-0123456789abcdef.safetensors"), "file name"),
    "absolute path": (_rename_shard("/etc/passwd"), "file name"),
    "shard in a folder": (_rename_shard("a/model-0123456789abcdef.safetensors"), "file name"),
    "shard of another name": (_rename_shard("model.safetensors"), "file name"),
    "a pickle among the files": (_set("files", "model.bin", {"bytes": 1, "sha256": "0" * 64}), "file name"),
    "the manifest among the files": (_set("files", "manifest.json", {"bytes": 1, "sha256": "0" * 64}), "file name"),
    "no config.json": (_del("files", "config.json"), "config.json"),
    "another config.json": (_set("files", "config.json", "sha256", "0" * 64), "config.json"),
    "config and config.json differ": (_set("config", "hidden_size", 7), "config.json"),
    "no index": (_del("files", "model.safetensors.index.json"), "index"),
    "file without size": (lambda d: d["files"][_shard_of(d)].pop("bytes"), "'bytes' is missing"),
    "file of negative size": (_set_shard("bytes", -1), "bytes"),
    "file of 2^63 bytes": (_set_shard("bytes", 2**63 - 1), "bytes"),
    "file of fractional size": (_set_shard("bytes", 2076.0), "bytes"),
    "file with short digest": (_set_shard("sha256", "0" * 63), "sha256"),
    "file with upper-case digest": (_set_shard("sha256", "A" * 64), "sha256"),
    "file with foreign digest": (_set_shard("sha256", "0" * 64), "SHA-256"),
    "file with extra key": (_set_shard("url", "http://x"), "unknown key 'url'"),
    "shard too small for its tensors": (_set_shard("bytes", 3), "at most"),
    "unknown shard": (_set("files", "model-0123456789abcdef.safetensors", {"bytes": 9, "sha256": "0" * 64}), "errno 2"),
    "tensor in no shard": (_set(T, "scalar", "file", "config.json"), "file"),
    "tensor in an unlisted shard": (_set(T, "scalar", "file", "model-0123456789abcdef.safetensors"), "file"),
    "tensor file no text": (_set(T, "scalar", "file", ["x"]), "file"),
    "tensor name with a line break": (_rename(T, "scalar", "a\nb"), "tensor name"),
    "tensor name with two dots": (_rename(T, "scalar", "a..b"), "tensor name"),
    "tensor name empty": (_rename(T, "scalar", ""), "tensor name"),
    "tensor name too long": (_rename(T, "scalar", "x" * 257), "tensor name"),
    "tensor name reserved": (_rename(T, "scalar", "__metadata__"), "tensor name"),
    "tensor renamed": (_rename(T, "scalar", "scaler"), "is not in the manifest|not in the file"),
    "tensor dropped": (_del(T, "scalar"), "is not in the manifest"),
    "tensor invented": (lambda d: d[T].update({"new": d[T]["scalar"]}), "not in the file"),
    "tensor of a layer dropped": (_del(T, f"{FC1}.weight_scale"), "is missing"),
    "tensor swap": (_swap(T, "norm.weight", "position.weight"), "norm.weight"),
    "digest swap": (_swap_field("sha256", f"{FC1}.bias", "blocks.0.fc2.bias"), "SHA-256"),
    "dtype swap": (_swap_field("dtype", "norm.weight", "mask"), "mask|norm.weight"),
    "retype": (_set(T, "norm.weight", "dtype", "I32"), "norm.weight"),
    "retype codes": (_set(T, f"{FC1}.weight", "dtype", "U8"), "U8"),
    "unknown type": (_set(T, "norm.weight", "dtype", "F8_E4M3"), "dtype"),
    "type no text": (_set(T, "norm.weight", "dtype", 1), "dtype"),
    "reshape": (_set(T, "norm.weight", "shape", [2, 2]), "norm.weight"),
    "reshape codes": (_set(T, f"{FC1}.weight", "shape", [16, 6]), "by its layer's scheme"),
    "shape no list": (_set(T, "norm.weight", "shape", 4), "shape"),
    "shape negative": (_set(T, "norm.weight", "shape", [-4]), "shape"),
    "shape true": (_set(T, "norm.weight", "shape", [True]), "shape"),
    "shape fractional": (_set(T, "norm.weight", "shape", [4.0]), "shape"),
    "shape of 2^63": (_set(T, "norm.weight", "shape", [2**63 - 1]), "at most"),
    "shape whose product overflows 64 bits": (_set(T, "norm.weight", "shape", [2**33, 2**33]), "at most"),
    "shape whose product wraps to 16 bytes": (_set(T, "norm.weight", "shape", [2**62 + 1, 4]), "at most"),
    "shape of zero times 2^63": (_set(T, "norm.weight", "shape", [0, 2**63 - 1]), "norm.weight"),
    "shape of 33 dimensions": (_set(T, "norm.weight", "shape", [1] * 32 + [4]), "shape"),
    "tensor with extra key": (_set(T, "norm.weight", "strides", [1]), "unknown key 'strides'"),
    "tensor no object": (_set(T, "norm.weight", 5), "an object"),
    "layer with extra key": (_set("layers", FC1, "code", "x"), "unknown key 'code'"),
    "layer without kind": (_del("layers", FC1, "kind"), "'kind' is missing"),
    "layer dropped": (_del("layers", "head"), ""),  # its weights become an ordinary tensor; see the test below
    "layer renamed": (_rename("layers", FC1, "x"), "is missing"),
    "layer of an unsafe name": (_rename("layers", FC1, "../x"), "name"),
    "layer schemes swapped": (_swap("layers", FC1, FC2), "by its layer's scheme|is missing"),
    "layer of unknown activation": (_set("layers", FC1, "activation", "exec"), "activation"),
    "layer of unknown kind": (_set("layers", FC1, "kind", []), "kind"),
    "clamp without clamp": (_set("layers", FC1, "clamp", [0.0, 1.0]), "clamp"),
    "clamp upside down": (_set("layers", "blocks.1.fc1", "clamp", [6.0, 0.0]), "clamp"),
    "clamp of text": (_set("layers", "blocks.1.fc1", "clamp", ["nan", 0.0]), "clamp"),
    "clamp of integers": (_set("layers", "blocks.1.fc1", "clamp", [0, 6]), "clamp"),
    "clamp of three": (_set("layers", "blocks.1.fc1", "clamp", [0.0, 1.0, 2.0]), "clamp"),
    "bias of integers": (_set("layers", FC1, "bias", "I32"), "bias"),
    "bias of nothing known": (_set("layers", FC1, "bias", {}), "bias"),
    "bias that is not there": (_set("layers", "blocks.1.fc1", "bias", "F32"), "is missing"),
    "in_features changed": (_set("layers", FC1, "in_features", 15), "by its layer's scheme"),
    "in_features negative": (_set("layers", FC1, "in_features", -16), "in_features"),
    "in_features beyond the int32 bound": (_set("layers", FC1, "in_features", 133145), "int32"),
    "in_features of 2^63": (_set("layers", FC1, "in_features", 2**63 - 1), "in_features"),
    "scheme of another version": (_set(*SCHEME, "version", 2), "version"),
    "scheme with unknown field": (_set(*SCHEME, "seed", 1), "seed"),
    "scheme no object": (_set(*SCHEME, "W8A8"), "QScheme"),
    "scheme of 3 bits": (_set(*SCHEME, "weights", "bits", 3), "bits"),
    "scheme of fewer bits": (_set(*SCHEME, "weights", "bits", 4), "is missing"),
    "scheme of affine weights": (_set(*SCHEME, "weights", "symmetric", False), "symmetric"),
    "scheme of static inputs": (_set(*SCHEME, "inputs", "dynamic", False), "granularity"),
    "group that does not divide K": (_set("layers", FC2, "scheme", "weights", "group_size", 7), "divisor"),
    "group of 0": (_set("layers", FC2, "scheme", "weights", "group_size", 0), "group_size"),
    "group of -1": (_set("layers", FC2, "scheme", "weights", "group_size", -1), "group_size"),
    "other group that divides K": (_set("layers", FC2, "scheme", "weights", "group_size", 6), "by its layer's scheme"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    layers, tensors, extra = checkpoints.sample(1)
    save_checkpoint(directory, layers, tensors, extra=extra)
    return directory


@pytest.fixture
def forger(saved: Path, tmp_path: Path) -> Forger:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return Forger(tmp_path)


def test_an_unchanged_forgery_loads(forger: Forger) -> None:
    forger.sign()
    accept.t0(checkpoints.fingerprint(load_checkpoint(forger.directory)), checkpoints.contents(*checkpoints.sample(1)))


@pytest.mark.parametrize("name", [n for n in CRAFTED if n != "layer dropped"])
def test_crafted_manifests_are_refused_for_their_own_reason(name: str, forger: Forger) -> None:
    edit, words = CRAFTED[name]
    before = repr(forger.document)
    edit(forger.document)
    assert repr(forger.document) != before
    lies_about_what_follows = name in {
        "no config.json",
        "another config.json",
        "config and config.json differ",
        "no index",
    }
    derivable = isinstance(forger.document.get(T), dict) and isinstance(forger.document.get("files"), dict)
    derivable = derivable and all(isinstance(t, dict) for t in forger.document[T].values())
    forger.sign(derive=derivable and not lies_about_what_follows)
    with pytest.raises(CheckpointError, match=words) as error:
        load_checkpoint(forger.directory)
    assert str(error.value).startswith(("manifest.json: ", str(forger.directory)))


def test_a_dropped_layer_is_an_ordinary_tensor(forger: Forger) -> None:
    """Nothing in the file says otherwise; only a pinned manifest can tell that somebody signed another one."""
    pin = load_checkpoint(forger.directory).manifest_sha256
    CRAFTED["layer dropped"][0](forger.document)
    forger.sign()
    assert "head.weight" in load_checkpoint(forger.directory).tensors
    with pytest.raises(CheckpointError, match="pinned"):
        load_checkpoint(forger.directory, manifest_sha256=pin)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b'"bytes":', b'"bytes": ', 1),
        lambda data: data.replace(b"\n", b"", 1),
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data + b"\n",
        lambda data: b" " + data,
        lambda data: data.replace(b'"format"', b'"form\\u0061t"'),
        lambda data: json.dumps(json.loads(data)).encode(),
        lambda data: json.dumps(json.loads(data), sort_keys=True, indent=1).encode(),
    ],
)
def test_one_form_only_even_where_the_meaning_is_the_same(change: Callable[[bytes], bytes], forger: Forger) -> None:
    path = forger.directory / "manifest.json"
    changed = change(path.read_bytes())
    accept.t0(json.loads(changed), json.loads(path.read_bytes()))
    path.write_bytes(changed)
    with pytest.raises(CheckpointError, match="one allowed form"):
        load_checkpoint(forger.directory)


def test_a_manifest_says_itself_that_it_was_changed(forger: Forger) -> None:
    path = forger.directory / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"seed":1', b'"seed":2'))
    with pytest.raises(CheckpointError, match="do not have the SHA-256"):
        load_checkpoint(forger.directory)


@pytest.mark.parametrize("name", ["file of 2^63 bytes", "shape of 2^63", "shape whose product overflows 64 bits"])
def test_length_bombs_are_refused_within_ten_milliseconds(name: str, forger: Forger) -> None:
    CRAFTED[name][0](forger.document)
    forger.sign()
    times = []
    for _ in range(5):
        start = time.process_time()
        with pytest.raises(CheckpointError):
            load_checkpoint(forger.directory)
        times.append(time.process_time() - start)
    assert min(times) < 0.010


def test_infinite_clamp_limits_survive(tmp_path: Path) -> None:
    scheme = checkpoints.SCHEMES["W8A8Dynamic"]
    for clamp in ((-math.inf, 3.5), (-0.0, math.inf), (1e-300, 1e300)):
        layer = checkpoints.layer("fc", scheme, 2, 4, 1, activation="clamp", clamp=clamp)
        save_checkpoint(tmp_path, [layer], {}, extra={})
        accept.t0(repr(load_checkpoint(tmp_path).layers[0].clamp), repr(clamp))


@pytest.fixture(scope="module")
def document(saved: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((saved / "manifest.json").read_bytes())
    return found


JUNK = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.lists(st.integers(-2, 2**40), max_size=3)
    | st.dictionaries(st.text(max_size=5), st.integers(), max_size=2)
    | st.sampled_from(
        ["F32", "I8", "config.json", "per_group", "0" * 64, "inf", "relu", "clamp", 4, 8, 16, [0.0, 1.0], {}]
    )
)


@given(data=st.data())
@settings(max_examples=2000, deadline=None)
def test_no_junk_anywhere_in_a_signed_manifest_raises_anything_but_our_error(
    document: dict[str, Any], data: Any
) -> None:
    forged = copy.deepcopy(document)
    for _ in range(data.draw(st.integers(1, 3))):
        node: Any = forged
        while True:
            keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
            key = data.draw(st.sampled_from(keys))
            if isinstance(node[key], (dict, list)) and node[key] and data.draw(st.integers(0, 3)):
                node = node[key]
                continue
            if isinstance(node, dict) and data.draw(st.integers(0, 4)) == 0:
                del node[key]
            else:
                node[key] = copy.deepcopy(data.draw(JUNK))  # the next edit may go into it
            break
        if not forged:
            break
    forged.pop("sha256", None)
    forged["sha256"] = manifest.hashlib.sha256(lines(forged)).hexdigest()
    try:
        parsed = manifest.parse(lines(forged))
    except CheckpointError:
        return
    accept.t0(manifest.parse(parsed.to_bytes()) == parsed, True)


@given(st.binary(max_size=300))
@settings(max_examples=1000, deadline=None)
def test_parse_raises_nothing_but_our_error_for_any_bytes(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        manifest.parse(data)
