"""Tensors of a model in a folder, block by block: a file for each block, and a journal of those that are whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import safetensors.torch
from torch import Tensor

from pyquant.errors import CheckpointError
from pyquant.io.atomic import write_file
from pyquant.io.foreign.tensors import Span, TensorFile
from pyquant.io.journal import Journal
from pyquant.ptq.blockwise.saved import JOURNAL

if TYPE_CHECKING:
    from typing_extensions import Self

OUTSIDE: Final = "outside of the blocks"  # the key of what lies there


class BlockFiles:
    """Tensors by name, a file a block.

    folder  made where it is missing; kind: what the files hold; facts: what their contents depend on.
    `in` asks for a block; iterating gives the names of tensors.
    Raises CheckpointError for a folder of something else, and for files that are not as they were written.
    """

    def __init__(self, folder: Path, kind: str, facts: str | Mapping[str, str]) -> None:
        self.directory, self._files = folder, dict[str, TensorFile]()
        self._home: dict[str, str] = {}  # by tensors' names: the block
        self._journal = Journal(folder / JOURNAL, kind, facts)
        try:
            for block, entry in self._journal.entries.items():
                path = self._path(entry["sha256"])
                if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
                    raise CheckpointError(f"{path}: damaged; allowed: the file as it was written")
                self._open(block, path)
        except OSError as error:
            self._journal.close()
            raise CheckpointError(f"{folder}: of a finished block: {error}") from error
        except BaseException:
            self._journal.close()
            raise

    def __contains__(self, block: object) -> bool:
        return block in self._journal.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    @property
    def digest(self) -> str:
        """What all that was added is known by."""
        lines = sorted(f"{block} {entry['sha256']}\n" for block, entry in self._journal.entries.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def add(self, block: str, tensors: Mapping[str, Tensor]) -> None:
        """Keeps the tensors of a block; the disk has them when this returns."""
        data = safetensors.torch.save({k: t.detach().cpu().clone().contiguous() for k, t in tensors.items()})
        sha256 = hashlib.sha256(data).hexdigest()
        write_file(self._path(sha256), data)
        self._journal.add(block, {"sha256": sha256})
        self._open(block, self._path(sha256))

    def within(self, name: str) -> list[str]:
        """The names of tensors in the file of this one."""
        return list(self._files[self._home[name]].spans)

    def span(self, name: str) -> Span:
        """Type and shape of a tensor."""
        return self._files[self._home[name]].spans[name]

    def read(self, name: str) -> Tensor:
        """A tensor, in memory of its own."""
        return self._files[self._home[name]].read(name)

    def _open(self, block: str, path: Path) -> None:
        self._files[block] = TensorFile(path)
        self._home |= dict.fromkeys(self._files[block].spans, block)

    def _path(self, sha256: str) -> Path:
        return self.directory / f"block-{sha256[:16]}.safetensors"
