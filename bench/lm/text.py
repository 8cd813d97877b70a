"""What a language model is judged on beside windows of a text: cloze lines (a context and the word that ends it)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from pyquant.errors import ArgumentError
from pyquant.integrations.transformers.text import read_text

_CLOZE: Final = 'lines such as {"context": "I poured the tea into the", "word": "cup"} or {"text": "... into the cup"}'


@dataclass(frozen=True)
class Cloze:
    """ids [T] of a context and the word that ends it; the word's are those from `begin` on."""

    ids: Tensor
    begin: int


def read_cloze(path: str | Path, tokenizer: Any, length: int) -> list[Cloze]:
    """The lines of a JSON-lines file as tokens; of a line longer than `length` its end.

    Lines hold 'context' and 'word', between which a space stands where the context ends with a letter or digit, or
    'text', whose last word is the one to be found (LAMBADA's form).
    Raises ArgumentError naming the file and the line.
    """
    lines = read_text(path, "cloze").splitlines()
    return [
        _cloze(line, tokenizer, length, f"{path}: line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _cloze(line: str, tokenizer: Any, length: int, where: str) -> Cloze:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ArgumentError("cloze", f"{where}: {error}"[:200], _CLOZE) from None
    if not isinstance(entry, dict):
        raise ArgumentError("cloze", f"{where}: a {type(entry).__name__}", _CLOZE)
    context, word, between = entry.get("context"), entry.get("word"), ""
    if context is None and isinstance(entry.get("text"), str):
        context, between, word = entry["text"].rstrip().rpartition(" ")
    if not isinstance(context, str) or not isinstance(word, str) or not context.strip() or not word.strip():
        raise ArgumentError("cloze", f"{where}: keys {', '.join(map(repr, entry))}"[:200], _CLOZE)
    between = " " if context[-1].isalnum() else between
    before = tokenizer(context, return_tensors="pt", verbose=False).input_ids[0]
    ids = tokenizer(context + between + word, return_tensors="pt", verbose=False).input_ids[0]
    shared = min(len(before), len(ids) - 1)
    begin = next((i for i in range(shared) if before[i] != ids[i]), shared)  # the border may be one token
    cut = max(0, len(ids) - length)
    if begin - cut < 1:
        raise ArgumentError(
            "cloze", f"{where}: a word of {len(ids) - begin} tokens", f"fewer than the window's {length}"
        )
    return Cloze(ids[cut:], begin - cut)
