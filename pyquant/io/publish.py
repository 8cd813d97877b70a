"""One file, whole or not at all, where nothing else is saved with it: reports, pictures, tables."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_file(path: str | os.PathLike[str], data: bytes) -> Path:
    """Writes a file through a temporary beside it and a rename; parent folders are made. -> the path.

    The temporary has a name that nobody can predict and must not exist yet, and both names are looked up in one open
    folder: a link planted under either of them is never followed (a link under `path` itself is replaced).
    Raises OSError from the file system.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as d:
        ...     write_file(f"{d}/a/b.txt", b"text").read_bytes()
        b'text'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = f".pyquant-{secrets.token_hex(16)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o666, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.rename(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(name, dir_fd=folder)
            raise
    finally:
        os.close(folder)
    return path
