"""What the fuzzers call: bytes in; out comes nothing, or an error that is not pyquant's, which is a defect.

`python tools/fuzz.py` runs them under coverage guidance; test_targets.py runs the seeds and some random bytes.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from pyquant.core.patterns import Expression, Globs
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import manifest
from pyquant.io.foreign import open_foreign
from pyquant.io.foreign.tensors import TensorFile
from pyquant.io.pretrained import layer_of
from pyquant.ops import tuned
from pyquant.recipe import Recipe

FORMATS = ("yaml", "json", "toml")
SEEDS = Path(__file__).parent / "seeds"
warnings.simplefilter("ignore")


def recipe(data: bytes) -> None:
    """The first byte chooses the format. What is read must survive being written and read again."""
    form = FORMATS[data[0] % 3] if data else "yaml"
    try:
        found = Recipe.loads(data[1:].decode("utf-8", "surrogateescape"), form, "fuzz")
    except ArgumentError:
        return
    assert Recipe.loads(found.dumps(form), form) == found


def config(data: bytes) -> None:
    form = FORMATS[data[0] % 3] if data else "yaml"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"c.{form}"
        path.write_bytes(data[1:])
        try:
            Recipe.load_config(path)
        except ArgumentError:
            return


def manifest_bytes(data: bytes) -> None:
    try:
        found = manifest.parse(data)
    except CheckpointError:
        return
    assert found.to_bytes() == data


def tuned_table(data: bytes) -> None:
    try:
        table = tuned.parse(data, "fuzz")
    except CheckpointError:
        return
    assert tuned.parse(tuned.dumps(table), "fuzz") == table
    tuned.wire(table)


def patterns(data: bytes) -> None:
    """expression, a null, name: where `re` is quick, both must say the same."""
    text, _, name = data.decode("utf-8", "replace").partition("\0")
    name = name[:40].replace("\n", " ") or "a"  # no layer has an empty name; `re` has answered "\\B" for it in two ways
    try:
        found = Expression(text).matches(name)
    except ArgumentError:
        return
    Globs([text or "a"]).matching(name)
    if not re.search(r"[*+{?|]", text):  # no repetition: `re` takes no time either
        assert found == (re.fullmatch(text, name) is not None), (text, name)


def foreign(data: bytes) -> None:
    """Another tool's folder: words, a null, the header of the tensors, a null, their bytes. Beginning with '[', the
    words are those of quantize_config.json; config.json says nothing then. The length of the header is put before it:
    bytes that do not know it reach what lies behind. (safetensors, below, has its own.)"""
    words, _, rest = data.partition(b"\0")
    header, _, body = rest.partition(b"\0")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        beside = words[:1] == b"["
        (home / "config.json").write_bytes(b"{}" if beside else words)
        if beside:
            (home / "quantize_config.json").write_bytes(words[1:])
        (home / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + body)
        read_all(home)


def foreign_index(data: bytes) -> None:
    """model.safetensors.index.json beside two shards, which hold a GPTQ layer."""
    shard = (SEEDS / "safetensors" / "a_layer").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
        (home / "model.safetensors.index.json").write_bytes(data)
        (home / "a.safetensors").write_bytes(shard)
        (home / "b.safetensors").write_bytes(shard.replace(b"fc.", b"gc."))
        read_all(home)


def gguf(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        path.write_bytes(data)
        read_all(path)


def safetensors_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(data)
        try:
            file = TensorFile(path)
            for name in file.spans:
                file.read(name)
        except CheckpointError:
            return


def read_all(path: Path) -> None:
    """Every layer and tensor of another tool's files; a layer that is read can be built."""
    for activations in ("file", "float"):
        try:
            found = open_foreign(path, activations=activations, drop_kv_cache_scheme=True)
            for layer in found.read_layers():
                layer_of(layer.record)
            for _ in found.read_tensors():
                pass
        except CheckpointError:
            continue


TARGETS: dict[str, Callable[[bytes], None]] = {
    "recipe": recipe,
    "config": config,
    "manifest": manifest_bytes,
    "tuned": tuned_table,
    "patterns": patterns,
    "foreign": foreign,
    "foreign_index": foreign_index,
    "gguf": gguf,
    "safetensors": safetensors_file,
}
