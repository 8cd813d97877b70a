"""Saves that are killed or fail at any moment: a whole checkpoint is there afterwards, and the next save works."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accept
import checkpoints
import problems
import pytest
import torch
from children import Interrupter, die, die_half_way, fork, wait
from sample import sampled

from pyquant.errors import CheckpointError
from pyquant.io import load_checkpoint, read_manifest, save_checkpoint

# Few for every change, besides those at each call, which find what is wrong at any one place.
KILLS = [30, pytest.param(200, marks=pytest.mark.nightly)]
# Every other call, from the first or the second on; at night both.
EVERY_OTHER = pytest.mark.parametrize("first", sampled(range(2), 1, "calls"))
MODELS = [checkpoints.sample(seed) for seed in (0, 1)]
WHOLE = [checkpoints.contents(*model) for model in MODELS]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Children are forked without starting Python again; a pool of threads would not survive that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _save(directory: Path, which: int) -> None:
    layers, tensors, extra = MODELS[which]
    save_checkpoint(directory, layers, tensors, extra=extra, max_shard_bytes=300, model_config={"model": which})


def _state(directory: Path) -> int:
    """Which of the two models is there, exactly. Raises CheckpointError for none."""
    return WHOLE.index(checkpoints.fingerprint(load_checkpoint(directory)))


def _check_for_other_readers(directory: Path) -> str:
    """What a reader that knows no manifest finds: a whole old model, a whole new one, or loudly nothing."""
    if not (directory / "config.json").exists() or not (directory / "model.safetensors.index.json").exists():
        return "nothing"
    model = json.loads((directory / "config.json").read_bytes())["model"]
    weight_map = json.loads((directory / "model.safetensors.index.json").read_bytes())["weight_map"]
    accept.t0(weight_map, json.loads(_clean(model)["model.safetensors.index.json"])["weight_map"])
    for name in set(weight_map.values()):
        accept.t0((directory / name).read_bytes(), _clean(model)[name])
    return "old or new"


@functools.cache
def _clean(which: int) -> dict[str, bytes]:
    """The files of a model that was saved without a fault."""
    with tempfile.TemporaryDirectory() as name:
        _save(Path(name), which)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


def _check_next_save(directory: Path, which: int) -> None:
    _save(directory, which)
    accept.t0(_state(directory), which)
    ours = {"manifest.json", "config.json", "model.safetensors.index.json", *read_manifest(directory).files}
    accept.t0({p.name for p in directory.iterdir()}, ours)


@pytest.mark.parametrize("wanted", KILLS)
def test_killed_at_random_instants_while_overwriting(wanted: int, tmp_path: Path) -> None:
    rng = random.Random(problems.BASE_SEED)
    _save(tmp_path, 0)
    start = time.monotonic()
    accept.t0(wait(fork(lambda: _save(tmp_path, 0))), 0)
    longest = time.monotonic() - start
    state, found = 0, {"old": 0, "new": 0, "too late": 0, "with leftovers": 0}
    while found["old"] + found["new"] < wanted:
        pid = fork(lambda which=1 - state: _save(tmp_path, which))  # type: ignore[misc]
        time.sleep(rng.uniform(0, longest))
        os.kill(pid, signal.SIGKILL)
        was_killed = wait(pid) == -signal.SIGKILL
        # the time a save takes follows the load of the machine: aim at its whole length, a little beyond
        longest *= 1.02 if was_killed else 0.9
        found["with leftovers"] += any(p.name.endswith(".tmp") for p in tmp_path.iterdir())
        after = _state(tmp_path)  # raises if nothing loads, or something that is neither model
        if was_killed:
            found["old" if after == state else "new"] += 1
        else:
            found["too late"] += 1
            accept.t0(after, 1 - state)
        state = after
    _check_next_save(tmp_path, 1 - state)
    # between the last change of the disk and the end of the process no kill may fall; the test below aims there
    assert min(found["old"], found["new"] + found["too late"], found["with leftovers"]) > 0, found


def _count_calls(directory: Path, which: int) -> int:
    counter = Interrupter(None, lambda name, real, args, kwargs: real(*args, **kwargs))
    with counter:
        _save(directory, which)
    return counter.calls


@EVERY_OTHER
@pytest.mark.parametrize("act", [die, die_half_way], ids=["before", "half way"])
def test_killed_at_each_call_while_overwriting(act: Callable[..., Any], first: int, tmp_path: Path) -> None:
    template = tmp_path / "template"
    _save(template, 0)
    shutil.copytree(template, tmp_path / "count")
    calls = _count_calls(tmp_path / "count", 1)
    assert calls > 30
    states, others = [], set()
    for k in range(first, calls, 2):
        directory = tmp_path / f"at{k}"
        shutil.copytree(template, directory)

        def work(directory: Path = directory, k: int = k) -> None:
            with Interrupter(k, act):
                _save(directory, 1)

        accept.t0(wait(fork(work)), -signal.SIGKILL)
        states.append(_state(directory))
        others.add(_check_for_other_readers(directory))
        _check_next_save(directory, k // 2 % 2)
        shutil.rmtree(directory)
    accept.t0(states, sorted(states))  # old up to one instant, new from then on
    accept.t0((set(states), others), ({0, 1}, {"old or new", "nothing"}))


@EVERY_OTHER
def test_killed_at_each_call_of_the_first_save(first: int, tmp_path: Path) -> None:
    calls = _count_calls(tmp_path / "count", 1)
    states = []
    for k in range(first, calls, 2):
        directory = tmp_path / f"at{k}"

        def work(directory: Path = directory, k: int = k) -> None:
            with Interrupter(k, die_half_way):
                _save(directory, 1)

        accept.t0(wait(fork(work)), -signal.SIGKILL)
        if (directory / "manifest.json").exists():
            states.append(_state(directory))
        else:
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                load_checkpoint(directory)
            states.append(-1)
        _check_for_other_readers(directory)
        _check_next_save(directory, 0)
        shutil.rmtree(directory)
    accept.t0((states, set(states)), (sorted(states), {-1, 1}))


@pytest.mark.parametrize(
    "number", sampled([errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT], 1, "errors", always=[errno.ENOSPC])
)
def test_every_failing_call_is_our_error_and_leaves_a_whole_checkpoint(number: int, tmp_path: Path) -> None:
    def fail(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise OSError(number, os.strerror(number))

    template = tmp_path / "template"
    _save(template, 0)
    shutil.copytree(template, tmp_path / "count")
    states = []
    for k in range(0, _count_calls(tmp_path / "count", 1), 1 if number == errno.ENOSPC else 4):
        directory = tmp_path / f"at{k}"
        shutil.copytree(template, directory)
        interrupter = Interrupter(k, fail)
        with interrupter, pytest.raises(CheckpointError, match=os.strerror(number)):
            _save(directory, 1)
        states.append(_state(directory))
        _check_for_other_readers(directory)
        if interrupter.name != "unlink":
            assert not [p.name for p in directory.iterdir() if p.name.endswith(".tmp")]
        _check_next_save(directory, 1)
        shutil.rmtree(directory)
    accept.t0((states, set(states)), (sorted(states), {0, 1}))


@pytest.mark.parametrize("error", sampled([KeyboardInterrupt, MemoryError, SystemExit], 1, "exceptions"))
def test_an_exception_at_any_call_passes_through_and_is_tidied_up(error: type[BaseException], tmp_path: Path) -> None:
    def fail(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise error

    template = tmp_path / "template"
    _save(template, 0)
    shutil.copytree(template, tmp_path / "count")
    for k in range(0, _count_calls(tmp_path / "count", 1), 5):
        directory = tmp_path / f"at{k}"
        shutil.copytree(template, directory)
        with Interrupter(k, fail), pytest.raises(error):
            _save(directory, 1)
        _state(directory)
        assert not [p.name for p in directory.iterdir() if p.name.endswith(".tmp")]
        _check_next_save(directory, 1)
        shutil.rmtree(directory)


def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small tmpfs cannot be mounted here (needs root); the failing calls above cover ENOSPC")
    try:
        _save(disk, 0)
        big = {"big": torch.arange(50_000, dtype=torch.int32)}
        with pytest.raises(CheckpointError, match="No space left"):
            save_checkpoint(disk, [], big, extra={})
        accept.t0(_state(disk), 0)
        _check_next_save(disk, 1)
        (disk / "filler").write_bytes(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        with pytest.raises(CheckpointError, match="No space left"):
            _save(disk, 0)
        accept.t0(_state(disk), 1)
        assert not [p.name for p in disk.iterdir() if p.name.endswith(".tmp")]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    _save(tmp_path, 0)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        with pytest.raises(CheckpointError, match="File too large"):
            _save(tmp_path, 1)

    accept.t0(wait(fork(work)), 0)
    accept.t0(_state(tmp_path), 0)
    assert not [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_a_directory_that_may_not_be_written() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        _save(directory, 0)
        directory.chmod(0o555)

        def work() -> None:
            if os.geteuid() == 0:
                os.seteuid(65534)  # root may write anywhere
            with pytest.raises(CheckpointError, match="Permission denied"):
                _save(directory, 1)
            accept.t0(_state(directory), 0)  # reading needs no permission to write

        accept.t0(wait(fork(work)), 0)
        directory.chmod(0o755)
        accept.t0(_state(directory), 0)


def test_a_directory_that_vanishes_during_the_save(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    _save(directory, 0)

    def vanish(name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shutil.rmtree(directory)
        return real(*args, **kwargs)

    calls = _count_calls(directory, 1)
    for k in range(3, calls - 12, 4):  # later calls may find nothing left to fail at
        _save(directory, 0)
        interrupter = Interrupter(k, vanish)
        with interrupter, pytest.raises(CheckpointError, match="No such file"):
            _save(directory, 1)
        accept.t0(directory.exists(), False)
    _check_next_save(directory, 1)


def test_several_savers_at_once_leave_one_of_their_models(tmp_path: Path) -> None:
    _save(tmp_path, 0)

    def work(which: int) -> None:
        for _ in range(4):
            try:
                _save(tmp_path, which)
            except CheckpointError as error:
                if "another process is saving" not in str(error):
                    raise

    pids = [fork(lambda which=i % 2: work(which)) for i in range(4)]  # type: ignore[misc]
    accept.t0([wait(pid) for pid in pids], [0] * 4)
    _check_next_save(tmp_path, 1 - _state(tmp_path))


def test_a_reader_beside_a_writer_always_gets_a_whole_model(tmp_path: Path) -> None:
    _save(tmp_path, 0)

    def work() -> None:
        for i in range(20):
            _save(tmp_path, (i + 1) % 2)

    pid = fork(work)
    seen = set()
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        seen.add(_state(tmp_path))
    accept.t0(seen, {0, 1})
