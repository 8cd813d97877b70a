"""What several test files need and is dear to make: made once a run, by the first of its processes that asks."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def made_once(root: Path, name: str, make: Callable[[Path], object]) -> Path:
    """root/name, which make(folder) filled, in this process or another one of the run; one that makes it is waited for.

    root is the fixture `folder_of_the_run`.
    """
    root.mkdir(exist_ok=True)
    folder, done = root / name, root / f"{name}.done"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a make that failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder
