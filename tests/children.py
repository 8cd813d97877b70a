"""Forked children, and calls of the operating system that kill or fail on the k-th change of the disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

# every way in which a save changes the disk goes through one of these
CALLS = ("open", "write", "fsync", "rename", "unlink", "ftruncate")


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Interrupter:
    """Puts `act` in the place of the k-th call (from 0) of the operating system that changes the disk."""

    def __init__(self, k: int | None, act: Callable[..., Any]) -> None:
        self.k, self.act, self.calls, self.name = k, act, 0, ""
        self.real = {name: getattr(os, name) for name in CALLS}

    def __enter__(self) -> Interrupter:
        for name in CALLS:
            setattr(os, name, self._wrap(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self.real.items():
            setattr(os, name, real)

    def _wrap(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number, self.calls = self.calls, self.calls + 1
            if number == self.k:
                self.name = name
                return self.act(name, self.real[name], args, kwargs)
            return self.real[name](*args, **kwargs)

        return call


def die(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_half_way(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        real(*((args[0], bytes(args[1])[: len(args[1]) // 2]) if name == "write" else args), **kwargs)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
