"""A journal: one line for each finished piece of work, on the disk before the next one begins; a killed run goes on.

Lines are JSON with a checksum over themselves and everything before them. The first one says of what the journal is; a
line that was being written when the process died is dropped, any other damage is an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import zlib
from collections.abc import Mapping
from typing import Any, Final

from pyquant.core.paths import file_path
from pyquant.errors import ArgumentError, CheckpointError
from pyquant.io import strict_json
from pyquant.io.atomic import at_most, sync_folder, write_all

VERSION: Final = 1
MAX_BYTES: Final = 2**30


class Journal:
    """Keys and values that survive SIGKILL and power loss, in the order in which they were added.

    path         the file; made with its folder where it is missing.
    kind         what the entries are, such as 'evaluations'.
    facts        what the values depend on, {'model': digest, ...}, or one text, their fingerprint: only journals of
                 equal facts go together.
    Raises CheckpointError: another kind or version, a fact that differs, damage before the last line, a file that is
    no journal or that another process is writing; the file is left as it is then. OSError from the file system.

    Attributes: path; entries, {key: value}, those of earlier runs included.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, facts: str | Mapping[str, str]) -> None:
        self.path = file_path("path", path)
        self.entries: dict[str, Any] = {}
        self._owner = os.getpid()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a FIFO placed there by an attacker must not block, nor a link lead to another file
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(self.path, flags, 0o666)
        except OSError as error:
            what = {errno.ELOOP: "a link", errno.EISDIR: "a folder"}.get(error.errno or 0)
            if what is None:
                raise
            raise CheckpointError(f"{self.path}: {what}; allowed: a regular file, or a new one") from None
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise CheckpointError(f"{self.path}: not a regular file; allowed: a regular file")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            identity = {"fingerprint": facts} if isinstance(facts, str) else {str(k): str(v) for k, v in facts.items()}
            self._check = 0  # of the lines so far
            self._begin({"journal": VERSION, "kind": kind, **{f"of {name}": value for name, value in identity.items()}})
        except BlockingIOError:
            os.close(self._fd)
            raise CheckpointError(f"{self.path}: another process is writing it; allowed: one at a time") from None
        except BaseException:
            os.close(self._fd)
            raise

    def add(self, key: str, value: Any) -> None:
        """A finished piece; the disk has it when this returns.

        value  what JSON holds: finite numbers (floats come back exactly), text, bool, None, lists, {text: value}.
        Raises ArgumentError for a key that is there already and for values that JSON cannot hold.
        """
        if not isinstance(key, str) or key in self.entries:
            raise ArgumentError("key", repr(key), "a text that is not in the journal yet")
        try:
            line = _line({"key": key, "value": value}, self._check)
        except (TypeError, ValueError) as error:
            allowed = "finite numbers, text, bool, None, lists, {text: value}"
            raise ArgumentError("value", f"{key}: {error}", allowed) from None
        self._append(line)
        self.entries[key] = json.loads(line)["value"]  # as a later run will read it

    def close(self) -> None:
        """Gives the file back; a killed process gives it back too."""
        if self._fd >= 0:
            if os.getpid() == self._owner:  # a child holds the file open too: the lock is not its own to give back
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, header: dict[str, Any]) -> None:
        data = self._read()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].split(b"\n")[:-1]
        first = _line(header, 0)
        if lines:
            self._check_header(lines[0], header)
        elif not first.startswith(data):
            raise CheckpointError(f"{self.path}: not a journal; allowed: a journal, or a new file")
        for number, line in enumerate(lines[1:], 2):
            where = f"{self.path}: line {number}"
            entry = self._parsed(line, where)
            if set(entry) != {"key", "value"} or not isinstance(entry["key"], str) or entry["key"] in self.entries:
                raise CheckpointError(f"{where}: not an entry with a new key; allowed: a journal as it was written")
            self.entries[entry["key"]] = entry["value"]
        if whole < len(data):  # the line that was being written when the process died
            os.ftruncate(self._fd, whole)
            os.fsync(self._fd)
        if not lines:
            self._append(first)
            sync_folder(self.path.parent)

    def _check_header(self, line: bytes, expected: dict[str, Any]) -> None:
        header = self._parsed(line, f"{self.path}: line 1")
        if header.get("journal") != VERSION:
            raise CheckpointError(f"{self.path}: journal version {header.get('journal')!r}; allowed: {VERSION}")
        for name in sorted({*header, *expected}, key=lambda name: (name != "kind", name)):
            if header.get(name) != expected.get(name):
                got, allowed = (repr(d.get(name, "nothing"))[:200] for d in (header, expected))
                why = "It belongs to another model, data or settings: name another file, or delete it"
                found = f"a journal with {name.removeprefix('of ')} {got}"
                raise CheckpointError(f"{self.path}: {found}; allowed: {allowed}. {why}")

    def _parsed(self, line: bytes, where: str) -> dict[str, Any]:
        content = strict_json.loads(line, where)
        content.pop("crc32", None)
        if _line(content, self._check) != line + b"\n":
            raise CheckpointError(f"{where}: damaged; allowed: a journal as it was written (delete it to begin again)")
        self._check = zlib.crc32(line + b"\n", self._check)
        return content

    def _read(self) -> bytes:
        at_most(MAX_BYTES, self.path)(os.fstat(self._fd).st_size)
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            return file.read()

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._fd).st_size
        try:
            write_all(self._fd, line)
        except BaseException:  # what is there of it would damage the next line
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise
        self._check = zlib.crc32(line, self._check)


def _line(content: dict[str, Any], before: int) -> bytes:
    """The line of an object: its checksum comes first, over the lines before it and everything else in it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f'{{"crc32":"{zlib.crc32(text.encode("ascii"), before):08x}",{text[1:]}\n'.encode("ascii")
