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


TARGETS: dict[str, Callable[[bytes], None]] = {
    "recipe": recipe,
    "config": config,
    "manifest": manifest_bytes,
    "tuned": tuned_table,
    "patterns": patterns,
}
