"""The numbers of a float checkpoint under the names that a model has for them, each read when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pyquant.core.dtypes import describe
from pyquant.core.names import listed
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io.foreign.tensors import Span

Made = Callable[[Callable[[str], Tensor]], Mapping[str, Tensor]]  # (reads a tensor of the file) -> the model's tensors
NEVER_USED = ("rotary_emb.inv_freq",)  # tables that older models saved, and every model computes


class Source(Protocol):
    """Tensors by name, such as those of a folder."""

    directory: Path

    def __iter__(self) -> Iterator[str]: ...

    def span(self, name: str) -> Span:
        """Type and shape of a tensor."""

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""


class FloatWeights:
    """The tensors of a folder for the state_dict of a model.

    model   whose names, shapes and types the tensors get; a model of transformers takes those of the files as its own
            loading does (renamed, experts stacked).
    source  the folder, in floating point.   rename   name in the file -> name in the model.
    mapping   how transformers makes tensors of those in the files; None: as it does by itself.
    is_partial   tensors that are not there, or of another shape or kind, are left out (`in`), not refused.
    unused  names in the file that the model has no place for, and does not pass over itself.
    Raises CheckpointError where the model asks for a tensor that is not there, or of another shape or kind.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        rename: Callable[[str], str] = str,
        *,
        mapping: Sequence[Any] | None = None,
        is_partial: bool = False,
    ) -> None:
        self._source, self._mapping, self._is_partial = source, mapping, is_partial
        self._state: dict[str, Any] = model.state_dict(keep_vars=True)
        self._made: dict[str, Made] = {}  # by every tensor of the model that comes of it
        self._kept: dict[str, Tensor] = {}  # made together with one that was asked for
        self.unused: list[str] = []
        self._plan(model, rename)
        by_tensor = {id(self._state[key]): key for key in self._made}
        homes = {key: key if key in self._made else by_tensor.get(id(own)) for key, own in self._state.items()}
        missing = sorted(key for key, home in homes.items() if home is None)
        if missing and not is_partial:
            raise CheckpointError(f"{source.directory}: no tensors {listed(missing)}, which the model has")
        self._home = {key: home for key, home in homes.items() if home is not None}

    def __contains__(self, key: object) -> bool:
        """Whether the files have a tensor of the model's state_dict, be it under another name."""
        return key in self._home

    def read(self, key: str) -> Tensor:
        """A tensor of the model's state_dict, in the type that it has there; tied ones are read as the one they are."""
        home = self._home[key]
        if home not in self._kept:
            self._kept |= self._made[home](self._source.read)
        return self._kept.pop(home).to(self._state[key].dtype)

    def home(self, key: str) -> str:
        """Under which name of the model a tensor is found in the files; the same for those that are tied."""
        return self._home[key]

    def filled(self, module: nn.Module, name: str) -> nn.Module:
        """A module of the model with its numbers, on the CPU; the one that is given stays empty."""
        real = module.__class__.__new__(module.__class__)
        real.__dict__.update(module.__dict__)
        at = f"{name}." if name else ""
        real.__dict__["_parameters"] = {
            key: None if old is None else nn.Parameter(self.read(at + key), old.requires_grad)
            for key, old in module._parameters.items()
        }
        real.__dict__["_buffers"] = {
            key: old if old is None or key in module._non_persistent_buffers_set else self.read(at + key)
            for key, old in module._buffers.items()
        }
        real.__dict__["_modules"] = {
            key: None if child is None else self.filled(child, at + key) for key, child in module._modules.items()
        }
        return real

    def _plan(self, model: nn.Module, rename: Callable[[str], str]) -> None:
        from pyquant.integrations import transformers  # never at import: it is another library's business

        names = {rename(name): name for name in self._source}
        if len(names) != sum(1 for _ in self._source):
            raise ArgumentError("rename", "a function that gives two tensors one name", "a name for each")
        made: list[tuple[Made, list[str]]]
        if transformers.is_model(model):
            made = transformers.makers_of(model, names, self._mapping)
        else:
            made = [(partial(_renamed, name, theirs), [theirs]) for name, theirs in names.items()]
        ignores = transformers.ignored_names(model)
        for make, theirs in made:
            for name, tensor in make(self._on_meta).items():
                if name in self._state:
                    if why := self._other_than(name, tensor):
                        if self._is_partial:
                            continue
                        raise CheckpointError(why)
                    self._made[name] = make
                elif not ignores(name) and not name.endswith(NEVER_USED):
                    self.unused.extend(theirs)

    def _on_meta(self, name: str) -> Tensor:
        span = self._source.span(name)
        return torch.empty(span.shape, dtype=span.dtype, device="meta")

    def _other_than(self, name: str, tensor: Tensor) -> str:
        """What is wrong with a tensor for its place in the model; '' for nothing."""
        own, where = self._state[name], f"{self._source.directory}: tensor '{name}': {describe(tensor)}; allowed: "
        if not isinstance(own, Tensor) or own.shape != tensor.shape:
            return where + (
                f"{list(own.shape)}, as in the model" if isinstance(own, Tensor) else "nothing, as in the model"
            )
        if own.is_floating_point() != tensor.is_floating_point():
            kind = "real" if own.is_floating_point() else "whole"
            return f"{where}{kind} numbers, as in the model"
        return ""


def _renamed(name: str, theirs: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    return {name: read(theirs)}
