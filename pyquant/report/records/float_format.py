"""What the floating-point format is called: it has the name of the layers' dtype, fp32, fp16 or bf16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

FLOAT: Final = "float"  # as the model has it: what users may say, and the name where layers differ in dtype
FLOAT_FORMATS: Final = (FLOAT, "fp32", "fp16", "bf16")
_OLD_WORDS: Final = ": the layer as the model has it"
_OLD_NOTE: Final = "written by an older pyquant, which counted floating point as 16 bits a weight whatever its dtype"


def is_float(name: str) -> bool:
    """Whether this is a name of the floating-point format."""
    return name in FLOAT_FORMATS


def alike(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether two lists of formats are the same, whatever they call the floating-point one."""
    return [_one(name) for name in one] == [_one(name) for name in other]


def renamed(data: Mapping[str, Any], name: str = FLOAT) -> dict[str, Any]:
    """Plain data of a record of version 1, in which the first format was called fp16 whatever its dtype was.

    name  what it is called now.
    ->    the same with that name wherever the format occurs: in lists of formats, as a key, in configurations.
    """
    formats = data.get("formats")
    if not isinstance(formats, list) or not formats or formats[0] not in FLOAT_FORMATS:
        return dict(data)
    return _replace(dict(data), formats[0], name)


def with_note(data: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data of a search of version 1: its note on the float format gives way to one on counting bits."""
    notes = data.get("notes", [])
    if not isinstance(notes, list):
        return dict(data)
    others = [note for note in notes if not (isinstance(note, str) and _OLD_WORDS in note)]
    return {**data, "notes": [_OLD_NOTE, *others]}


def _one(name: str) -> str:
    return FLOAT if is_float(name) else name


def _replace(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {new if key == old else key: _replace(held, old, new) for key, held in value.items()}
    if isinstance(value, list):
        return [_replace(held, old, new) for held in value]
    return new if isinstance(value, str) and value == old else value
