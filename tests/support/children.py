"""Forked children, and calls of the operating system that kill or fail on the k-th change of the disk."""

from __future__ import annotations

import datetime
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# every way in which a save changes the disk goes through one of these
CALLS = ("open", "write", "fsync", "rename", "unlink", "ftruncate")


def fork(work: Callable[[], object]) -> int:
    """work() in a forked child, on one thread: a fork has none of the threads of its parent's pool, and would wait for
    them for ever (torch alone does)."""
    pid = os.fork()
    if pid == 0:
        try:
            import torch

            torch.set_num_threads(1)
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return pid


def ranks(work: Callable[..., object], *args: object, world: int = 2, first: Sequence[str] = ()) -> None:
    """work(rank, *args) in `world` processes that form a gloo group, one thread each; raises what one raised. A rank
    that waits for another for more than three minutes fails.

    One fresh process imports the module of `work` and the modules that `first` names, and the ranks are its forks:
    importing torch costs more than most of what they do.
    """
    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Under pytest the module of `work` is called tests.<folder>.<file>, which fresh processes must find by that name.
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.append(root)
    mp.spawn(_group, (work, port, world, args, tuple(first)), nprocs=1)


def _group(
    _: int, work: Callable[..., object], port: int, world: int, args: tuple[object, ...], first: tuple[str, ...]
) -> None:
    """Forks the ranks before anything has run here that would have started a thread; the first that fails ends all."""
    for name in first:
        importlib.import_module(name)
    said, writes = os.pipe()
    os.set_blocking(said, False)
    at_work = {fork(partial(_rank, rank, work, port, world, args, writes)): rank for rank in range(world)}
    os.close(writes)
    why = ""
    try:
        while at_work:
            pid, status = os.wait()
            rank, code = at_work.pop(pid), os.waitstatus_to_exitcode(status)
            if code:
                with suppress(BlockingIOError):  # one that was killed says nothing
                    why = os.read(said, 1 << 16).decode()
                raise RuntimeError(f"rank {rank} ended with {code}: {why}")
    finally:
        for pid in at_work:
            os.kill(pid, signal.SIGKILL)


def _rank(rank: int, work: Callable[..., object], port: int, world: int, args: tuple[object, ...], writes: int) -> None:
    """Leaves without Python's own end. torch keeps gloo's threads alive behind DDP and FSDP, also when the group is
    destroyed (/proc/self/task still shows pt_gloo_runloop); one that asks for the interpreter's lock while it ends is
    unwound through C++ frames that cannot be: "terminate called without an active exception", now and then, after all
    work is done."""
    import torch.distributed as dist

    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(minutes=3),
        )
        try:
            work(rank, *args)
            dist.barrier()
        finally:
            dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(writes, traceback.format_exc()[-4000:].encode())  # less than a pipe writes at once
        raise


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
