"""Checkpoints that other tools wrote: read into the records of pyquant's layers, exactly, or refused with the reason.

One file a format: what its tensors and words mean. It knows no module and imports none of those tools.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from pyquant.core import arguments
from pyquant.core.names import listed
from pyquant.core.paths import file_path
from pyquant.errors import CheckpointError
from pyquant.io.foreign import awq, bitsandbytes, compressed, gguf, gptq, torchao
from pyquant.io.foreign.record import ACTIVATIONS_AS, ForeignLayer, Options, Reader
from pyquant.io.foreign.source import Source

READERS: Final[dict[str, Callable[[Source, Options], Reader]]] = {
    "compressed-tensors": compressed.Reader,
    "gptq": gptq.Reader,
    "awq": awq.Reader,
    "bitsandbytes": bitsandbytes.Reader,
    "torchao": torchao.Reader,
}

__all__ = ["ACTIVATIONS_AS", "ForeignCheckpoint", "ForeignLayer", "open_foreign"]


class ForeignCheckpoint:
    """Layers and tensors of another tool's files, each read when it is asked for.

    config   what config.json says of the model.
    method   quant_method, the name of the format.
    layers   names of the layers that are held as codes.
    """

    def __init__(self, source: Source | gguf.Source, method: str, reader: Reader) -> None:
        self.config: Mapping[str, Any] = source.config
        self.method = method
        self._source, self._reader = source, reader
        owned = reader.layers()
        self.layers = tuple(sorted(owned))
        taken = {key for keys in owned.values() for key in keys} | reader.dropped()
        self._others = sorted(key for key in source if key not in taken)

    def check_rules(self) -> None:
        """Raise CheckpointError, or warn, where names alone do not say what a tensor is in the model."""
        if isinstance(self._source, gguf.Source):
            self._source.check_rules()

    def read_layers(self, names: Iterable[str] | None = None) -> Iterator[ForeignLayer]:
        """One layer after the other, of these names (None: all); nothing of one that was given is kept."""
        return map(self._reader.read, self.layers if names is None else names)

    def read_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that belong to no layer, one after the other."""
        for name in self._others:
            yield name, self._source.read(name)


def open_foreign(
    path: str | os.PathLike[str],
    *,
    activations: str = "file",
    drop_kv_cache_scheme: bool = False,
    files: Sequence[str] | None = None,
) -> ForeignCheckpoint:
    """A directory that another tool wrote, or a GGUF file; its tensors are not read yet.

    activations, drop_kv_cache_scheme   as in load_quantized_.
    files   names of the safetensors files that are the model, where another reader has found them.
    Raises CheckpointError naming file, what was found and what is allowed; ArgumentError for wrong arguments.
    """
    arguments.one_of("activations", activations, ACTIVATIONS_AS)
    options = Options(activations, arguments.flag("drop_kv_cache_scheme", drop_kv_cache_scheme))
    where = file_path("path", path)
    if where.is_file() or where.suffix == ".gguf":  # a link into a cache of blobs has no name that tells
        blocks = gguf.Source(where)
        return ForeignCheckpoint(blocks, "gguf", gguf.Reader(blocks, options))
    source = Source(where, files=files)
    method = source.method.get("quant_method")
    if not isinstance(method, str) or method not in READERS:
        raise CheckpointError(
            f"{source.directory}: quant_method {str(method)[:80]!r}; allowed: {listed(list(READERS), most=20)}"
        )
    return ForeignCheckpoint(source, method, READERS[method](source, options))
