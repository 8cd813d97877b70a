"""What is measured: a float model, the data it is calibrated with and judged by. One class for every kind of model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.lm.text import Cloze, read_cloze
from pyquant.errors import ArgumentError
from pyquant.integrations.transformers.text import (
    config_in,
    longest_of,
    read_text,
    token_ids,
    tokenizer_in,
    windows_of,
)

PERPLEXITY: Final = "perplexity"
_LONGEST: Final = 2048  # tokens of a window where the model would take more


@dataclass(frozen=True)
class Subject:
    """A float model and how it is judged. Losses of two models are compared item by item.

    make     -> a fresh float model in eval mode.
    batches  (draw) -> calibration batches; another draw, other data.
    judge    (model, float model's judgement or None) -> Judgement.
    measure  what the mean of the losses is: 'perplexity' (its exp is told), or a name of its own.
    right    what the share of hits is called; '' where there are none.
    items    what one loss is of: 'window', 'sentence', 'image'.
    alone    layers that stay in floating point, beside output heads.
    """

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[int], list[Any]]
    judge: Callable[[nn.Module, Any], Judgement]
    measure: str
    items: str
    right: str = ""
    alone: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """losses: one an item. hits: 1 or 0 for each item that can be right, possibly of another list, or between them
    for one that was asked more than once. reference: what the float model's judgement hands to that of the others
    (embeddings), never saved."""

    losses: list[float]
    hits: list[float]
    reference: Any = None


@dataclass(frozen=True)
class LmOptions:
    """How a text is cut. length: tokens of a window (None: the model's, at most 2048). windows: judged, None: all.
    batches, rows: of calibration, windows in each."""

    length: int | None = None
    windows: int | None = 128
    batches: int = 8
    rows: int = 4
    device: str = "cpu"


def language_model(
    folder: str | Path,
    text: str | Path,
    *,
    calibration: str | Path | None = None,
    cloze: str | Path | None = None,
    options: LmOptions | None = None,
    name: str = "",
) -> Subject:
    """A local causal language model of transformers and a text.

    calibration  another text; None: the first half of `text`, of which then the second half alone judges.
    Raises ArgumentError naming what is missing: the folder's config.json or tokenizer, a text, a line of it.
    """
    folder, options = Path(folder), options or LmOptions()
    config = _config(folder)
    tokenizer = tokenizer_in(folder, "MODEL_DIR")
    longest = longest_of(config) or _LONGEST
    length = min(longest, _LONGEST) if options.length is None else options.length
    if not 2 <= length <= longest:
        raise ArgumentError("length", length, f"2 to {longest}, the most that the model takes")
    ids = token_ids(tokenizer, read_text(text, "text"), config, "MODEL_DIR")
    if calibration is None:
        data, ids = ids[: ids.numel() // 2], ids[ids.numel() // 2 :]
    else:
        data = token_ids(tokenizer, read_text(calibration, "calibration"), config, "MODEL_DIR")
    if data.numel() <= length:
        raise ArgumentError("calibration", f"a text of {data.numel()} tokens", f"more than one window of {length}")
    judged = windows_of(ids, length, options.windows, "text").to(options.device)
    lines = [] if cloze is None else read_cloze(cloze, tokenizer, length)
    return Subject(
        name or folder.resolve().name,
        partial(_load, folder, options.device),
        partial(_draw, data, length, options),
        partial(_judge_lm, judged, lines),
        PERPLEXITY,
        "window",
        "cloze" if lines else "",
    )


def _config(folder: Path) -> Any:
    file = folder / "config.json"
    if file.is_file() and "quantization_config" in json.loads(file.read_text(encoding="utf-8")):
        raise ArgumentError("MODEL_DIR", f"{folder}: a quantised model", "a float model, which is quantised here")
    return config_in(folder, "MODEL_DIR")


def _load(folder: Path, device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    # fp32 on CPUs, where 16-bit arithmetic would be part of what is measured
    return (model.float() if device == "cpu" else model).to(device).eval()


def _draw(data: Tensor, length: int, options: LmOptions, draw: int) -> list[Any]:
    generator = torch.Generator().manual_seed(draw)
    starts = torch.randint(
        data.numel() - length, (options.batches * options.rows, 1), generator=generator, device="cpu"
    )
    return list((data[starts + torch.arange(length, device="cpu")]).to(options.device).split(options.rows))


@torch.no_grad()
def _judge_lm(judged: Tensor, lines: Sequence[Cloze], model: nn.Module, _: Any) -> Judgement:
    losses: list[float] = []
    for part in judged.split(4):
        logits = model(input_ids=part).logits[:, :-1].float()
        nats = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        losses += nats.view(len(part), -1).double().mean(1).tolist()
    return Judgement(losses, [_is_found(model, line, judged.device) for line in lines])


def _is_found(model: nn.Module, line: Cloze, device: torch.device) -> int:
    """Whether every token of the word is the likeliest one behind those before it."""
    ids = line.ids.to(device)
    logits = model(input_ids=ids[None, :-1]).logits[0, line.begin - 1 :]
    return int(torch.equal(logits.argmax(-1), ids[line.begin :]))
