"""What a model of transformers says about itself, and the files that go with one, for transformers to find.

Nothing here imports transformers: the model at hand has, or the folder needs no library to be read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from pyquant.core.dtypes import dtype_name
from pyquant.errors import ArgumentError
from pyquant.io.atomic import SaveDirectory, read_file
from pyquant.nn.qconv import QConv2d
from pyquant.nn.qembedding import QEmbedding
from pyquant.nn.qlinear import QLinear

MAX_COMPANION_BYTES: Final = 2**30
_EXAMPLES, _TOKENS, _SAMPLES = 2, 8, 4000
GENERATION: Final = "generation_config.json"
# Files of a model's folder that say how its inputs are made and its outputs are used: all but weights and config.json.
_COMPANIONS: Final = re.compile(
    r"(?:tokenizer|vocab|merges|added_tokens|special_tokens_map|generation_config|chat_template|preprocessor_config"
    r"|processor_config|video_preprocessor_config|image_processor_config|feature_extractor_config|spiece|source|target"
    r"|sentencepiece\.bpe|modules|sentence_bert_config|config_sentence_transformers|LICENSE|NOTICE)"
    r"(?:[._][\w.]+)?"
)
_SENTENCE_MODULE: Final = re.compile(r"[1-9]\d*_[A-Za-z]\w*")  # 1_Pooling, 2_Dense ... of sentence-transformers


def is_model(model: nn.Module) -> bool:
    """Whether this is a model of transformers (and not something that contains one)."""
    return any(
        f"{c.__module__}.{c.__name__}" == "transformers.modeling_utils.PreTrainedModel" for c in type(model).__mro__
    )


def config_of(model: Any, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The keys of config.json with which transformers builds this model again, as its own save_pretrained writes them.

    model   of transformers (is_model).
    given   keys that add to or replace those of the model's configuration, such as the whole of `config.to_dict()`.
    Three keys follow from the model whatever is given: its class (where none is named), its type, and that weights
    which were tied and of which one is quantised now are tied no more.
    """
    own = json.loads(model.config.to_json_string())
    if getattr(getattr(model, "hf_quantizer", None), "took_over", False):
        own.pop("quantization_config", None)  # of what was loaded: the layers themselves say how they are quantised
    config: dict[str, Any] = {**own, **(given or {})}
    config["architectures"] = config.get("architectures") or [type(model).__name__]
    dtype = next((m.dtype for m in model.modules() if isinstance(m, (QLinear, QConv2d, QEmbedding))), None)
    if dtype is not None:
        config["dtype"] = dtype_name(dtype)
    if config.get("tie_word_embeddings", False) and has_untied(model):
        config["tie_word_embeddings"] = False
    return config


def has_untied(model: Any) -> bool:
    """Whether the input or output embedding of a model is quantised, which its configuration may still call tied. One
    key of a configuration ties all that is tied: without it a file holds each under every one of its names."""
    try:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
    except NotImplementedError:  # a model of sound or of series has none
        return False
    return ends[1] is not None and any(isinstance(end, (QLinear, QEmbedding)) for end in ends)


def forget_quantization(model: nn.Module, undo: list[Callable[[], Any]]) -> None:
    """Takes another tool's quantization_config out of a model whose layers are pyquant's now: what saves the model
    would describe them by it.

    undo  receives the step that takes it back.
    """
    words = getattr(getattr(model, "config", None), "__dict__", {})
    if is_model(model) and "quantization_config" in words:
        undo.append(partial(words.__setitem__, "quantization_config", words.pop("quantization_config")))


def ignored_names(model: Any) -> Callable[[str], bool]:
    """Which tensors of its files a model of transformers itself passes over, such as DeepSeek-V3's layer 61."""
    patterns = getattr(type(model), "_keys_to_ignore_on_load_unexpected", None) if is_model(model) else None
    found = [re.compile(pattern) for pattern in patterns or ()]
    own = set(model.state_dict(keep_vars=True)) if found else set()
    return lambda name: name not in own and any(pattern.search(name) for pattern in found)


def head_prefix(model: Any) -> str:
    """What transformers puts before, or takes from, a layer's name when it builds the model with or without a head."""
    return str(getattr(model, "base_model_prefix", "") or "")


def unreadable_layers(model: Any, layers: Mapping[str, str]) -> dict[str, str]:
    """{name: class} of the layers that transformers would read wrongly: compressed-tensors knows Linears and
    embeddings, and the model that transformers builds holds something else there (GPT-2's Conv1D, whose weight is
    stored [in, out]; nn.MultiheadAttention, which has no layers inside; convolutions).

    layers  {name: 'linear', 'embedding' or 'conv2d'} of the quantised layers that are about to be saved; Linears that
            stand in the place of other classes in floating point are found in the model.
    """
    try:
        with torch.device("meta"):
            fresh = dict(type(model)(model.config).named_modules(remove_duplicate=False))
    except Exception:  # a class that is built in another way: what can be seen of the model itself decides
        fresh = {}
    found = {name: "Conv2d" for name, kind in layers.items() if kind == "conv2d"}
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for name in (*layers, *linears):
        parts = name.split(".")
        holder = next((h for i in range(len(parts), 0, -1) if (h := ".".join(parts[:i])) in fresh), None)
        if holder is not None and not isinstance(fresh[holder], (torch.nn.Linear, torch.nn.Embedding)):
            found[name] = type(fresh[holder]).__name__
    return found


def generation_files(model: Any) -> dict[str, bytes]:
    """The generation_config.json of a model that generates text, by its name; else nothing."""
    config = getattr(model, "generation_config", None)
    return {} if config is None else {GENERATION: config.to_json_string().encode()}


def example_of(model: Any) -> dict[str, Any]:
    """Keyword arguments that a model of transformers takes: token ids, images, spectra or waves, as it says itself.

    model   is_model. Sizes come from its configuration; ids lie inside of its vocabulary.
    Raises ArgumentError for a model of which the principal input is something else.
    """
    generator, main = torch.Generator().manual_seed(0), str(getattr(model, "main_input_name", ""))
    home = next(
        (t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()),
        torch.empty(0, dtype=torch.float32, device="cpu"),
    )

    def ids(length: int) -> torch.Tensor:
        vocabulary = int(_setting(model.config, "vocab_size") or 1)
        return torch.randint(vocabulary, (_EXAMPLES, length), generator=generator, device="cpu").to(home.device)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(_EXAMPLES, *shape, generator=generator, dtype=torch.float32, device="cpu").to(
            home.device, home.dtype
        )

    frames = _setting(model.config, "max_source_positions") or 16
    sizes: dict[str, Callable[[], torch.Tensor]] = {
        "input_ids": lambda: ids(_TOKENS),
        "pixel_values": lambda: real(_setting(model.config, "num_channels") or 3, *_image_size(model.config)),
        "input_features": lambda: real(_setting(model.config, "num_mel_bins") or 80, 2 * frames),
        "input_values": lambda: real(_SAMPLES),
    }
    if main not in sizes:
        got = f"none, and a {type(model).__name__} takes {main or 'an input without a name'}"
        raise ArgumentError("example_inputs", got, "a mapping of the keyword arguments that the model takes")
    found = {main: sizes[main]()}
    if main == "input_ids" and getattr(model.config, "vision_config", None) is not None:
        found["pixel_values"] = sizes["pixel_values"]()
    if getattr(model.config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = ids(_TOKENS)
    return found


def _setting(config: Any, name: str) -> Any:
    """A setting of a configuration, or of the first configuration inside of it that has it."""
    inner = (getattr(config, part, None) for part in ("text_config", "vision_config", "encoder", "decoder"))
    return next((getattr(c, name) for c in (config, *inner) if getattr(c, name, None) is not None), None)


def _image_size(config: Any) -> tuple[int, int]:
    size = _setting(config, "image_size") or 64
    return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else (int(size), int(size))


_FLOATS: Final = ((QLinear, nn.Linear), (QConv2d, nn.Conv2d), (QEmbedding, nn.Embedding))


def refill_buffers(model: Any, undo: list[Callable[[], Any]]) -> None:
    """Gives buffers that are on the meta device, which no file holds, the numbers that a new model has in them.

    model  of transformers, whose _init_weights fills the buffers of one module: rotary tables, position numbers.
    undo   receives the steps that take it back.
    A buffer that _init_weights leaves alone stays on the meta device, and parameters stay as they are.
    """
    for module in model.modules():
        old = {name: t for name, t in module._buffers.items() if t is not None and t.is_meta}
        if not old:
            continue
        blank = {name: torch.full(t.shape, _blank(t.dtype), dtype=t.dtype, device="cpu") for name, t in old.items()}
        undo.append(partial(module._buffers.update, old))
        new = _beside(module, {name: t.clone() for name, t in blank.items()})
        with torch.no_grad():
            model._init_weights(new)
        same = [name for name, t in blank.items() if torch.equal(t.nan_to_num(), new._buffers[name].nan_to_num())]
        module._buffers.update({name: new._buffers[name] for name in blank if name not in same})


def _beside(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> Any:
    """A twin of a module with these buffers, its weights and those of all modules in it on the meta device: filling it
    leaves the module's own. Quantised layers have float twins, which may be filled."""
    kind = next((floats for quantised, floats in _FLOATS if isinstance(module, quantised)), type(module))
    kind = getattr(module, "_kind", kind)  # of a quantised embedding of a class of its own: that class
    twin = kind.__new__(kind)
    twin.__dict__.update(module.__dict__)
    held = dict(module._parameters)
    if isinstance(module, (QLinear, QConv2d, QEmbedding)):
        held["weight"] = cast(nn.Parameter, module.weight)
        held["bias"] = cast("nn.Parameter | None", getattr(module, "bias", None))
    empty = {
        name: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), False)
        for name, p in held.items()
    }
    twin.__dict__["_parameters"] = empty
    twin.__dict__["_buffers"] = {**module._buffers, **buffers}
    twin.__dict__["_modules"] = {
        name: None if child is None else _beside(child, {}) for name, child in module._modules.items()
    }
    return twin


def _blank(dtype: torch.dtype) -> float:
    """A number that nothing fills a buffer with."""
    return float("nan") if dtype.is_floating_point else -77


def copy_companions(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[str]:
    """Copies the files of tokenizer, generation and sentence-transformers from a model's folder beside a checkpoint.

    source   folder of a model; its weights and its config.json stay where they are.
    target   an existing folder; each file appears whole or not at all, replacing one of its name.
    ->       names of what was copied, relative to the folder.
    Raises CheckpointError for what is no regular file; OSError from the file system.
    """
    folder, copied = Path(source), []
    with SaveDirectory(target) as out:
        for file in sorted(folder.iterdir()):
            if file.is_file() and _COMPANIONS.fullmatch(file.name):
                _copy(file, out)
                copied.append(file.name)
    for module in sorted(folder.iterdir()):
        if module.is_dir() and _SENTENCE_MODULE.fullmatch(module.name):
            with SaveDirectory(Path(target) / module.name) as out:
                for file in sorted(module.iterdir()):
                    if file.is_file():
                        _copy(file, out)
                        copied.append(f"{module.name}/{file.name}")
    return copied


def _copy(file: Path, out: SaveDirectory) -> None:
    out.publish(out.stage(read_file(file, check=_check_size)), file.name)


def _check_size(size: int) -> None:
    if size > MAX_COMPANION_BYTES:
        raise OSError(27, f"larger than {MAX_COMPANION_BYTES} bytes")
