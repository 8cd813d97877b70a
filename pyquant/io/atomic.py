"""Files that appear whole or not at all: exclusive temporary, fsync, rename, fsync of the directory, one saver at once.

Everything goes through one directory descriptor, so a directory that is replaced meanwhile is never mixed up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from pyquant.errors import CheckpointError

_TEMPORARY: Final = re.compile(r"\.pyquant-[0-9a-f]{32}\.tmp")


class SaveDirectory:
    """A directory under an exclusive lock of this process, made if it is missing.

    Raises CheckpointError on entry when another process is saving there or the path is not a directory; OSError from
    the file system otherwise.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd, self._owner = -1, os.getpid()
        self._made: list[Path] = []

    def __enter__(self) -> SaveDirectory:
        self._made = _make_directory(self.path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise CheckpointError(f"{self.path}: another process is saving here; allowed: one at a time") from None
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if os.getpid() == self._owner:  # a child may hold it open; a killed process releases it too
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)
        if failed is not None:
            with contextlib.suppress(OSError):  # somebody else's files are in it by now
                for folder in reversed(self._made):
                    folder.rmdir()

    def names(self) -> list[str]:
        """Names of the entries, sorted."""
        return sorted(os.listdir(self._fd))

    def stage(self, data: bytes) -> str:
        """Writes data to a new temporary of this directory and flushes it to the disk. -> its name."""
        name = f".pyquant-{secrets.token_hex(16)}.tmp"
        _write_new(name, data, self._fd)
        return name

    def publish(self, temporary: str, name: str) -> None:
        """Gives a staged file its name, replacing what had it, in one step."""
        os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Removes a file; one that is gone already is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def read(self, name: str, limit: int) -> bytes | None:
        """The bytes of a regular file of at most `limit` bytes, or None where there is none of that name."""
        try:
            return read_file(name, dir_fd=self._fd, check=at_most(limit, name))
        except FileNotFoundError:
            return None

    def sync(self) -> None:
        """Makes renames and removals so far survive a power loss."""
        os.fsync(self._fd)

    def sweep(self, is_stale: Callable[[str], bool]) -> None:
        """Removes files that is_stale(name) picks and temporaries of killed saves: under the lock none is in use."""
        for name in self.names():
            if _TEMPORARY.fullmatch(name) or is_stale(name):
                self.remove(name)


def write_file(path: str | os.PathLike[str], data: bytes) -> Path:
    """Writes one file on its own, whole or not at all; parent folders are made. -> the path.

    It survives a power loss when this returns. Several processes may write into a folder at once, and the last one to
    end wins; a SaveDirectory, which sweeps, leaves the temporary alone. A link under `path` is replaced, not followed.
    Raises OSError from the file system, with what was there unchanged and nothing left behind.
    """
    path = Path(path)
    try:
        _make_directory(path.parent)
        with opened(path.parent) as folder:
            name = f".pyquant-{secrets.token_hex(16)}.file.tmp"
            try:
                _write_new(name, data, folder)
                os.rename(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:  # belongs to another process
                raise
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                raise
            os.fsync(folder)
    except OSError as error:  # of the file that was asked for, not of the temporary
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    return path


def put_beside(directory: str | os.PathLike[str], files: Mapping[str, bytes]) -> None:
    """Writes files into a directory, each whole or not at all, replacing those of their names.

    Raises CheckpointError as SaveDirectory does, and where writing fails.
    """
    if not files:
        return
    try:
        with SaveDirectory(directory) as out:
            try:
                for name, data in files.items():
                    out.publish(out.stage(data), name)
                out.sync()
            except BaseException:
                out.sweep(lambda _: False)
                raise
    except OSError as error:
        raise CheckpointError(f"{os.fspath(directory)}: {', '.join(files)} not saved: {reason_of(error)}") from error


def read_file(path: str | Path, *, check: Callable[[int], None], dir_fd: int | None = None) -> bytes:
    """All bytes of a regular file, after check(size), which raises to refuse, and before anything is allocated.

    Raises CheckpointError for what is no regular file or changes its size meanwhile; OSError from the file system.
    """
    # O_NONBLOCK: opening a FIFO placed there by an attacker must not block
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(f"{Path(path).name}: not a regular file; allowed: a regular file")
        check(info.st_size)
        try:
            data = _read_exactly(fd, info.st_size)
        except (MemoryError, OverflowError):  # a sparse file of any size is cheap to make
            problem = f"{Path(path).name}: {info.st_size} bytes, for which there is no memory"
            raise CheckpointError(f"{problem}; allowed: files that fit") from None
    finally:
        os.close(fd)
    if len(data) != info.st_size:
        raise CheckpointError(f"{Path(path).name}: changed while being read; allowed: a file at rest")
    return data


def _write_new(name: str, data: bytes, folder: int) -> None:
    """A new file of an open folder, flushed to the disk."""
    # O_EXCL and an unpredictable name: a file or link placed there by an attacker is never followed or overwritten
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Writes data to an open file and flushes it to the disk."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.fsync(fd)


def _read_exactly(fd: int, size: int) -> bytes:
    data = os.read(fd, size)
    if len(data) == size:
        return data
    pieces = [data]  # a read may be short, above 2 GiB it always is
    missing = size - len(data)
    while missing and pieces[-1]:
        pieces.append(os.read(fd, missing))
        missing -= len(pieces[-1])
    return b"".join(pieces)


def at_most(limit: int, file: str | Path) -> Callable[[int], None]:
    """A check for read_file that refuses larger files. Raises CheckpointError."""

    def check(size: int) -> None:
        if size > limit:
            raise CheckpointError(f"{file}: {size} bytes; allowed: at most {limit}")

    return check


def reason_of(error: OSError) -> str:
    """What the file system says, for a message."""
    return f"{error.strerror} (errno {error.errno})"


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Makes names that were given or taken in a folder survive a power loss."""
    with opened(folder) as fd:
        os.fsync(fd)


def _make_directory(path: Path) -> list[Path]:
    """Makes a folder and its parents. -> those that were missing, outermost first."""
    missing = []
    parent = path.absolute()
    while not parent.exists():
        missing.append(parent)
        parent = parent.parent
    missing.reverse()
    for directory in missing:
        directory.mkdir(exist_ok=True)
        sync_folder(directory.parent)
    return missing
