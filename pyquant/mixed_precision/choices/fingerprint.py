"""A fingerprint of everything that losses depend on: the model in every format, the groups, the batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from pyquant.calibrate.padding import padding_of
from pyquant.io.shards import digest
from pyquant.mixed_precision.choices.switchable import SwitchableModel


def fingerprint(switchable: SwitchableModel, batches: Iterable[Any], *facts: object) -> str:
    """SHA-256 over all weights in all formats, names, groups, batches and further facts (text and numbers).

    batches  tensors, numbers and text, and lists, tuples and mappings of them are distinguished by their content; other
             objects by their class alone.
    ->       64 hexadecimal digits.
    """
    hasher = hashlib.sha256()

    def record(*words: object) -> None:
        hasher.update((" ".join(map(str, words)) + "\n").encode())

    record(type(switchable.model).__name__, *facts)
    for name, tensor in switchable.model.state_dict().items():
        record(name, _text(tensor))
    for i, format in enumerate(switchable.formats):
        record("format", format.name, format.scheme)
        for layer, g in switchable.group_of.items() if i else ():
            record(switchable.groups[g].name, layer)
            for name, tensor in switchable.layer(layer, i).state_dict().items():
                record(name, _text(tensor))
    for batch in batches:
        record("batch", _text(batch))
        if isinstance(batch, Mapping) and (told := padding_of(batch).text()):
            record("padding", told)
    return hasher.hexdigest()


def _text(value: Any) -> str:
    if isinstance(value, Tensor) and value.is_nested:
        value = value.unbind()
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} {digest(value.detach().cpu().contiguous())}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_text(value[key])}" for key in value) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    return type(value).__qualname__
