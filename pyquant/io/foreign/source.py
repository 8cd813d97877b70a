"""A directory that another tool wrote: its words and its tensors, found by name and read one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from pyquant.core.dtypes import describe, dtype_name
from pyquant.core.names import listed
from pyquant.errors import CheckpointError
from pyquant.io.atomic import at_most, read_file, reason_of
from pyquant.io.foreign.tensors import Span, TensorFile, words_of
from pyquant.io.manifest import CONFIG, FILE, INDEX
from pyquant.io.strict_json import MAX_BYTES

WEIGHTS: Final = "model.safetensors"
QUANTIZE_CONFIG: Final = "quantize_config.json"  # of AutoGPTQ and GPTQModel, in older files the only one
_SHARD: Final = re.compile(r"[\w-][\w.-]{0,200}\.safetensors", re.ASCII)
_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Tensors:
    """The tensors of safetensors files under their names; of a name that is in several, that of the last.

    Raises CheckpointError naming file, what was found and what is allowed; nothing else.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {str(path): TensorFile(path) for path in files}
        self._home = {name: key for key, file in self._files.items() for name in file.spans}
        self.directory = Path(next(iter(self._files), ".")).parent

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def span(self, name: str) -> Span:
        """Type and shape of a tensor. Raises CheckpointError where there is none of that name."""
        if name not in self._home:
            raise CheckpointError(f"{self.directory}: no tensor '{name}'")
        return self._files[self._home[name]].spans[name]

    def read(self, name: str, *dtypes: torch.dtype, shape: tuple[int | None, ...] | None = None) -> torch.Tensor:
        """A tensor, of one of these types (none given: any) and of this shape (None in it: any size)."""
        span = self.span(name)
        sizes = span.shape if shape is None else tuple(g if w is None else w for g, w in zip(span.shape, shape))
        fits = span.shape == sizes and (shape is None or len(shape) == len(span.shape))
        if not fits or (dtypes and span.dtype not in dtypes):
            types = " or ".join(map(dtype_name, dtypes)) or "any type"
            wanted = "" if shape is None else f" {['any' if size is None else size for size in shape]}"
            got = describe(torch.empty(span.shape, dtype=span.dtype, device="meta"))
            raise CheckpointError(f"{self.directory}: tensor '{name}': got {got}; allowed: {types}{wanted}")
        return self._files[self._home[name]].read(name)


class Source(Tensors):
    """The tensors of a directory under their names, and what its config.json says.

    is_float  whether the directory is to hold a model in floating point, or codes.
    files     safetensors files of it, of which some other reader has found that they are the model; None: they are
              looked for in transformers' order.
    config    contents of config.json without `quantization_config`.
    method    `quantization_config`, or the contents of quantize_config.json; of floats nothing.
    metadata  what the safetensors files carry beside their tensors, of all of them.
    Raises CheckpointError naming file, what was found and what is allowed; nothing else.
    """

    def __init__(self, directory: Path, *, is_float: bool = False, files: Sequence[str] | None = None) -> None:
        self.directory = directory
        names = _names(directory)
        if FILE in names:
            raise CheckpointError(f"{directory}: a checkpoint of pyquant; load_pretrained reads it")
        if CONFIG not in names:
            raise CheckpointError(f"{directory}: no {CONFIG}; allowed: a folder of a transformers model")
        self.config = read_words(directory / CONFIG)
        method = self.config.pop("quantization_config", None)
        if method is None and QUANTIZE_CONFIG in names:
            method = {"quant_method": "gptq", **read_words(directory / QUANTIZE_CONFIG)}
        if is_float and method is not None:
            kind = str(method.get("quant_method"))[:80] if isinstance(method, dict) else "another tool"
            got = f"a model that {kind} quantised"
            raise CheckpointError(f"{directory / CONFIG}: {got}; allowed: floating point. load_quantized_ reads codes")
        if not is_float and not isinstance(method, dict):
            got = "no quantization_config" if method is None else f"quantization_config is a {type(method).__name__}"
            raise CheckpointError(
                f"{directory / CONFIG}: {got}; a model in floating point needs quantize_checkpoint_, or --scheme"
            )
        self.method: dict[str, Any] = method or {}
        self._home = _homes(directory, names) if files is None else _homes_in(directory, files)
        self._files: dict[str, TensorFile] = {}
        self.metadata: dict[str, str] = {}
        for file in dict.fromkeys(self._home.values()):
            self._files[file] = TensorFile(directory / file)
            self.metadata |= self._files[file].metadata
        self._check_index()

    def _check_index(self) -> None:
        """Refuses an index and shards that name different tensors."""
        for file, opened in self._files.items():
            listed_there = {name for name, home in self._home.items() if home == file}
            if different := sorted(listed_there ^ set(opened.spans)):
                state = "is not in the index" if different[0] in opened.spans else "is in the index and not there"
                raise CheckpointError(f"{self.directory / file}: tensor '{different[0][:80]}' {state}")


def read_words(path: Path) -> dict[str, Any]:
    """A bounded JSON object. Raises CheckpointError; nothing else."""
    try:
        return words_of(read_file(path, check=at_most(MAX_BYTES, path)), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {reason_of(error)}") from None


def _names(directory: Path) -> set[str]:
    try:
        return {entry.name for entry in directory.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{directory}: {reason_of(error)}") from None


def _homes(directory: Path, names: set[str]) -> dict[str, str]:
    """{tensor: file}: of model.safetensors, else as the index says, else of the one safetensors file that there is.
    Folders hold others beside: an adapter, a copy in another format, the index of a save before the last one."""
    if WEIGHTS in names:
        return _homes_in(directory, [WEIGHTS])
    if INDEX in names:
        homes = read_words(directory / INDEX).get("weight_map")
        if not isinstance(homes, Mapping) or not homes:
            raise CheckpointError(f"{directory / INDEX}: no weight_map; allowed: {{tensor: file}}")
        for file in homes.values():
            if not isinstance(file, str) or not _SHARD.fullmatch(file):
                raise CheckpointError(f"{directory / INDEX}: file {str(file)[:80]!r}; allowed: a name without a folder")
        return dict(homes)
    files = sorted(name for name in names if _SHARD.fullmatch(name))
    if len(files) != 1:
        pickles = sorted(name for name in names if name.endswith(_PICKLES))
        hint = f" ({pickles[0]} is a pickle, which can run any code: it is never read)" if pickles and not files else ""
        got = listed(files) or "no safetensors file"
        raise CheckpointError(f"{directory}: {got}{hint}; allowed: {WEIGHTS}, {INDEX}, or one file of any name")
    return _homes_in(directory, files)


def _homes_in(directory: Path, files: Sequence[str]) -> dict[str, str]:
    for file in files:
        if not _SHARD.fullmatch(file):
            raise CheckpointError(f"{directory / file}: no safetensors file; allowed: these alone")
    return {name: file for file in files for name in TensorFile(directory / file).spans}
