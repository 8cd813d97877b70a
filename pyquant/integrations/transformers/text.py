"""A text as batches of token ids: what language models are calibrated with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from pyquant.core import arguments
from pyquant.errors import ArgumentError

_USUAL_LENGTH: Final = 512  # tokens of a window where the model would take more
_FOLDER: Final = "the folder of a model of transformers with its tokenizer"
_POSITIONS_BEHIND_PADDING: Final = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet")


def text_batches(
    folder: str | Path, path: str | Path, *, length: int | None = None, windows: int | None = 128, rows: int = 4
) -> list[dict[str, Tensor]]:
    """Windows of a text, cut by a model's own tokenizer: calibration data for quantize_, gptq_, search and others.

    folder   of a model of transformers and its tokenizer; nothing is downloaded, no code of the folder runs.
    path     a text in UTF-8.
    length   tokens of a window; None: 512, or what the model takes at most where that is less.
    windows  at most this many, which do not overlap and lie evenly over the text; None: all.
    rows     windows of a batch.
    ->       keyword arguments of the model, a batch each: input_ids, int64 [rows, length] (the last may have fewer
             rows), and decoder_input_ids, the same, for models of an encoder and a decoder.
    Raises ArgumentError naming the argument: a folder without tokenizer, no text, one shorter than a window.

    Example:
        >>> from pyquant.integrations.transformers import text_batches
        >>> batches = text_batches("llama", "book.txt", windows=64)  # doctest: +SKIP
        >>> pyquant.quantize_(model, "W4A8Dynamic(group_size=128)", data=batches, improve=("gptq",))  # doctest: +SKIP
    """
    arguments.whole("rows", rows, 1)
    if windows is not None:
        arguments.whole("windows", windows, 1)
    config = config_in(folder, "folder")
    ids = token_ids(tokenizer_in(folder, "folder"), read_text(path, "path"), config, "folder")
    longest = longest_of(config)
    if length is None:
        length = min(longest or _USUAL_LENGTH, _USUAL_LENGTH)
    arguments.whole("length", length, 1, longest or 2**31 - 1)
    parts = windows_of(ids, length, windows, "path").split(rows)
    names = ("input_ids", "decoder_input_ids") if getattr(config, "is_encoder_decoder", False) else ("input_ids",)
    return [{name: part.clone() for name in names} for part in parts]


def config_in(folder: str | Path, argument: str) -> Any:
    """The configuration of a folder. Raises ArgumentError naming the argument where transformers finds none."""
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise ArgumentError(argument, f"{folder}: no config.json", _FOLDER)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ArgumentError(argument, f"{folder}: {error}"[:300], _FOLDER) from None


def tokenizer_in(folder: str | Path, argument: str) -> Any:
    """The tokenizer of a folder. Raises ArgumentError naming the argument where transformers finds none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError(argument, f"{folder}: no tokenizer ({told})"[:300], _FOLDER) from None


def longest_of(config: Any) -> int | None:
    """Tokens that a model takes at most; None where its configuration names no limit."""
    found = (getattr(c, "max_position_embeddings", None) for c in (config, getattr(config, "text_config", None)))
    longest = next((n for n in found if n), None)
    # RoBERTa and its kin number positions from behind the padding token's on
    if longest and getattr(config, "model_type", "") in _POSITIONS_BEHIND_PADDING:
        longest -= int(config.pad_token_id) + 1
    return longest


def token_ids(tokenizer: Any, text: str, config: Any, argument: str) -> Tensor:
    """int64 [T]: a text without special tokens. Raises ArgumentError for ids that the model has not."""
    ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False, verbose=False).input_ids[0]
    vocabulary = getattr(config, "vocab_size", None) or getattr(
        getattr(config, "text_config", None), "vocab_size", None
    )
    if ids.numel() and vocabulary and int(ids.max()) >= vocabulary:
        raise ArgumentError(argument, f"a tokenizer with id {int(ids.max())}", f"ids below {vocabulary}, as the model")
    return ids


def read_text(path: str | Path, argument: str) -> str:
    """A text in UTF-8. Raises ArgumentError naming the argument where there is none."""
    path = Path(path)
    if not path.is_file():
        raise ArgumentError(argument, f"{path}: no such file", "a text file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(argument, f"{path}: byte {error.start} is not UTF-8", "a text in UTF-8") from None
    if not text.strip():
        raise ArgumentError(argument, f"{path}: nothing but spaces", "a text")
    return text


def windows_of(ids: Tensor, length: int, count: int | None, argument: str) -> Tensor:
    """int64 [windows, length]: windows of a text [T] that do not overlap; of more than `count`, evenly spread ones.

    Raises ArgumentError naming the argument where the text is shorter than one window.
    """
    whole = ids[: ids.numel() // length * length].view(-1, length)
    if not len(whole):
        raise ArgumentError(argument, f"a text of {ids.numel()} tokens", f"at least one window of {length}")
    if count is None or count >= len(whole):
        return whole
    return whole[torch.arange(count, device=whole.device) * len(whole) // count]
