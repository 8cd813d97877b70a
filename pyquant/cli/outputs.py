"""Options that say where something is written, checked before the work that it is to hold."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pyquant.errors import ArgumentError


def check_file(option: str, path: str | None, endings: Sequence[str]) -> None:
    """Raise ArgumentError naming the option where no file of this name can be written: another ending, a folder, a
    place that is not there and cannot be made, or is not ours to write."""
    if path is None:
        return
    if Path(path).suffix not in endings or Path(path).is_dir():
        raise ArgumentError(option, path, f"a file that ends in {' or '.join(endings)}")
    _check_parent(option, path, Path(path).absolute().parent)


def check_folder(option: str, path: str | None) -> None:
    """The same for a folder, new or existing."""
    if path is None:
        return
    allowed = "a folder, new or existing"
    if not path:
        raise ArgumentError(option, "nothing", allowed)
    place = Path(path)
    if place.is_symlink() and not place.exists():
        raise ArgumentError(option, f"{path}: a link to nothing", allowed)
    if place.exists() and not place.is_dir():
        raise ArgumentError(option, f"{path}: a file", allowed)
    _check_parent(option, path, place.absolute())


def check_checkpoint(option: str, path: str) -> None:
    """And for one that a checkpoint is saved in: CheckpointError too, where weights lie there that are not ours."""
    from pyquant.io.checkpoint import refuse_foreign

    check_folder(option, path)
    if Path(path).is_dir():
        refuse_foreign(Path(path), os.listdir(path))


def _check_parent(option: str, path: str, folder: Path) -> None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise ArgumentError(option, f"{folder}: a file", "a folder, new or existing")
    try:  # tried, not asked: an administrator may do everything, and still nothing can be made in /proc
        os.rmdir(tempfile.mkdtemp(prefix=".pyquant-", dir=folder))
    except OSError:
        allowed = "a place that can be written to"
        raise ArgumentError(option, f"{path}: {folder} cannot be written to", allowed) from None
