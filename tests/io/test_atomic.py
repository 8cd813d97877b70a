"""Exclusive temporaries, order of flushes and renames, the lock, and reading of what is not a plain file."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import accept
import checkpoints
import pytest

from pyquant.errors import CheckpointError
from pyquant.io import save_checkpoint
from pyquant.io.atomic import SaveDirectory, read_file, write_file


def _any_size(size: int) -> None:
    return None


def test_stage_then_publish_makes_the_whole_file_appear(tmp_path: Path) -> None:
    with SaveDirectory(tmp_path) as out:
        temporary = out.stage(b"new")
        (tmp_path / "a").write_bytes(b"old")
        accept.t0((tmp_path / temporary).read_bytes(), b"new")
        out.publish(temporary, "a")
        accept.t0(out.names(), ["a"])
    accept.t0((tmp_path / "a").read_bytes(), b"new")


def test_stage_never_writes_through_a_planted_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 32)
    (tmp_path / f".pyquant-{'0' * 32}.tmp").symlink_to(victim)
    with SaveDirectory(tmp_path) as out, pytest.raises(FileExistsError):
        out.stage(b"evil")
    accept.t0(victim.read_bytes(), b"precious")


def test_a_single_file_is_flushed_before_and_after_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    kind = {True: "folder", False: "file"}
    monkeypatch.setattr(os, "fsync", lambda fd: steps.append(kind[stat.S_ISDIR(os.fstat(fd).st_mode)]))
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *names, **folders: (steps.append("rename"), rename(*names, **folders)))
    write_file(tmp_path / "a", b"new")
    accept.t0(steps, ["file", "rename", "folder"])
    accept.t0((tmp_path / "a").read_bytes(), b"new")


def test_a_single_file_is_written_while_another_saves_and_sweeps_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename
    with SaveDirectory(tmp_path) as out:

        def meanwhile(*names: str, **folders: int) -> None:
            out.sweep(lambda name: False)
            rename(*names, **folders)

        monkeypatch.setattr(os, "rename", meanwhile)
        write_file(tmp_path / "a", b"new")
    accept.t0((tmp_path / "a").read_bytes(), b"new")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, bytes(data[:3])))
    with SaveDirectory(tmp_path) as out:
        out.publish(out.stage(b"0123456789"), "a")
    accept.t0((tmp_path / "a").read_bytes(), b"0123456789")


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    whole = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: whole(fd, min(size, 3)))
    accept.t0(read_file(tmp_path / "a", check=_any_size), b"0123456789")


def test_a_file_that_shrinks_while_being_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"0123456789")
    with pytest.raises(CheckpointError, match="changed while being read"):
        read_file(file, check=lambda size: os.truncate(file, 4))


def test_the_size_is_checked_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    monkeypatch.setattr(os, "read", lambda fd, size: pytest.fail("read before the check"))

    def refuse(size: int) -> None:
        raise CheckpointError(f"{size} is too much")

    with pytest.raises(CheckpointError, match="10 is too much"):
        read_file(tmp_path / "a", check=refuse)


def test_pipes_directories_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_file(tmp_path / "pipe", check=_any_size)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_file(tmp_path, check=_any_size)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_file("/dev/zero", check=_any_size)


def test_one_saver_at_a_time_and_the_lock_ends_with_it(tmp_path: Path) -> None:
    with SaveDirectory(tmp_path), pytest.raises(CheckpointError, match="another process is saving"):
        SaveDirectory(tmp_path).__enter__()
    with SaveDirectory(tmp_path) as out:
        accept.t0(out.names(), [])


def test_sweep_takes_own_temporaries_and_nothing_else(tmp_path: Path) -> None:
    mine = f".pyquant-{'a' * 32}.tmp"
    others = [".pyquant-abc.tmp", "pyquant.tmp", f"x{mine}", f"{mine}.bak", "notes.txt", "model.bin"]
    for name in (mine, "stale", *others):
        (tmp_path / name).touch()
    with SaveDirectory(tmp_path) as out:
        out.sweep(lambda name: name == "stale")
        accept.t0(out.names(), sorted(others))


def test_missing_parents_are_made(tmp_path: Path) -> None:
    with SaveDirectory(tmp_path / "a" / "b") as out:
        accept.t0(out.names(), [])


def test_a_file_in_place_of_the_directory_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="not saved"):
            save_checkpoint(path, [], {}, extra={})


def test_every_file_is_flushed_before_its_name_and_every_name_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power loss cannot be had in a test; the order that protects against it can."""
    log: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    real = {name: getattr(os, name) for name in ("open", "fsync", "rename", "unlink")}

    def opened(path: object, *args: object, **kwargs: object) -> int:
        fd = real["open"](path, *args, **kwargs)
        names[fd] = str(path)
        return int(fd)

    def synced(fd: int) -> None:
        log.append(("sync", names[fd]))
        real["fsync"](fd)

    def renamed(source: str, target: str, **kwargs: int) -> None:
        log.append((f"rename {source}", target))
        real["rename"](source, target, **kwargs)

    def unlinked(name: str, **kwargs: int) -> None:
        log.append(("unlink", name))
        real["unlink"](name, **kwargs)

    for seed in (0, 1):
        layers, tensors, extra = checkpoints.sample(seed)
        log.clear()
        with monkeypatch.context() as patch:
            for name, fake in (("open", opened), ("fsync", synced), ("rename", renamed), ("unlink", unlinked)):
                patch.setattr(os, name, fake)
            save_checkpoint(tmp_path, layers, tensors, extra=extra)

    for position, (kind, _) in enumerate(log):
        if kind.startswith("rename"):
            assert ("sync", kind.removeprefix("rename ")) in log[:position]
    steps = ["dir" if (k, w) == ("sync", str(tmp_path)) else w for k, w in log if k != "sync" or w == str(tmp_path)]
    shard = [s for s in steps if s.startswith("model-")]
    index, config, manifest = "model.safetensors.index.json", "config.json", "manifest.json"
    wanted = [shard[0], "dir", manifest, "dir", config, "dir", index, "dir", config, "dir", manifest, "dir", shard[1]]
    accept.t0(steps, wanted)
    accept.t0(log[-1], ("unlink", shard[1]))


def test_an_error_is_about_the_file_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pyquant.io.atomic._write_new", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/made/file.json'"):
        write_file(tmp_path / "made" / "file.json", b"x")
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"'/proc/c.json'"):
        write_file("/proc/c.json", b"x")


def test_a_save_that_fails_leaves_no_folder_that_it_made(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "there", tmp_path / "new/inner"):
        with pytest.raises(ZeroDivisionError), SaveDirectory(path):
            raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["there"]

    def fails_late() -> None:
        with SaveDirectory(tmp_path / "kept"):
            (tmp_path / "kept/file").write_text("")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails_late()
    assert (tmp_path / "kept/file").exists()
