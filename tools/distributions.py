"""Source distributions and wheels, made in clean environments: what the tools of packaging share."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
BUILD_TOOLS = ("setuptools>=77", "wheel", "cmake>=3.24", "ninja", "pybind11>=2.13")


@dataclass(frozen=True)
class Python:
    """An interpreter and its version, '3.11'."""

    path: str
    version: str


class Failed(Exception):
    """A command that did not do what it should; the end of what it printed."""


def run(*words: str, cwd: Path | None = None, **environment: str) -> str:
    """Runs a command. -> its standard output. Raises Failed."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(words, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(words)[:200]}\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def pythons(paths: list[str]) -> Iterator[Python]:
    """The interpreters named, or those of PATH and pyenv, one a version."""
    seen: set[str] = set()
    pyenv = sorted((Path.home() / ".pyenv/versions").glob("*/bin/python"))
    candidates = paths or [sys.executable, *(f"python{v}" for v in PYTHONS), *map(str, pyenv)]
    for candidate in candidates:
        try:
            version = run(candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
        except (Failed, OSError):
            continue
        if version not in seen and (paths or version in PYTHONS):
            seen.add(version)
            yield Python(candidate, version)


def make_sdist(folder: Path) -> Path:
    """A source distribution of the checkout's tracked files, so that nothing else can slip in."""
    copy = folder / "checkout"
    names = run("git", "ls-files", cwd=ROOT).splitlines()
    for name in filter(lambda n: (ROOT / n).exists(), names):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    name = run(sys.executable, "-c", "import setuptools.build_meta as b; print(b.build_sdist('..'))", cwd=copy).split()[
        -1
    ]
    shutil.rmtree(copy)
    return folder / name


def unpack(sdist: Path, folder: Path) -> Path:
    """The source distribution's folder: all wheels are built in it, so that only the first compiles everything."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / sdist.name.removesuffix(".tar.gz")


def torch_headers() -> str:
    """torch's include folder beside the Python that runs this."""
    return str(Path(sysconfig.get_path("purelib")) / "torch/include")


def environment(python: Python, folder: Path) -> str:
    """A clean virtual environment. -> its python."""
    run(python.path, "-m", "venv", str(folder))
    return str(folder / "bin/python")


def pip(python: str, *words: str, **more: str) -> str:
    """pip of an environment."""
    return run(python, "-m", "pip", "--disable-pip-version-check", "-q", *words, **more)


def builder(python: Python, folder: Path) -> Path:
    """Where the environment is that make_wheel builds a Python's wheel in; it is kept."""
    return folder / f"build-{python.version}"


def installed(python: str, package: str) -> str:
    """The version of a package in an environment. Raises Failed where it is not there."""
    return run(python, "-c", f"import importlib.metadata as m; print(m.version({package!r}))").strip()


def make_wheel(python: Python, source: Path, folder: Path, **options: str) -> Path:
    """The wheel of one Python, without isolation: its environment holds the build's tools and nothing else.

    options  environment variables of the build (docs/install.md); without any, CUDA kernels are left out.
    """
    tools = environment(python, builder(python, folder))
    pip(tools, "install", *BUILD_TOOLS)
    out = folder / f"wheel-{python.version}"
    pip(
        tools,
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(out),
        str(source),
        **{
            "PYQUANT_CUDA": "OFF",
            "PYQUANT_TORCH_INCLUDE": torch_headers(),
            "PYQUANT_BUILD_DIR": str(folder / "cmake"),
            "PATH": f"{Path(tools).parent}{os.pathsep}{os.environ['PATH']}",
            **options,
        },
    )
    (wheel,) = out.glob("*.whl")
    tag = "cp" + python.version.replace(".", "")
    if not re.fullmatch(rf"pyquant_gemm-[\d.]+-{tag}-{tag}-linux_\w+\.whl", wheel.name):
        raise Failed(f"the wheel is called {wheel.name}, and belongs to {tag}")
    return wheel
