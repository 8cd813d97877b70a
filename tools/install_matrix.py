"""Installs pyquant as its users do, in clean environments: source distribution -> wheel -> install -> a layer, doctor.

    python tools/install_matrix.py [--python PATH ...] [--torch VERSION ...] [--cuda-builds] [--folder DIR]

Every Python from 3.10 on that is found here (PATH, pyenv) with every build of torch that pip offers for it: the small
`+cpu` ones, for which PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS may name a place, or with --cuda-builds those that
`pip install torch` brings: 3 GB to download, 7 GB of disk while one is in use. A wheel is built once for each Python,
against the torch beside the Python that runs this; the source distribution is built against every torch. Without any
torch a Python builds and installs its wheel and loads the native module, which needs none. CUDA kernels are left out.
Prints one line for each pair and exits with 1 when one fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0")
BUILD_TOOLS = ("setuptools>=77", "wheel", "cmake>=3.24", "ninja", "pybind11>=2.13")

FAILED = "FAILED"

# What an installed package must do, torch included. Run outside the checkout.
USE = """
import importlib.metadata, pathlib, torch, pyquant
from pyquant.ops import native_available, why_not_native
assert importlib.metadata.version("pyquant-gemm") == pyquant.__version__
assert native_available(), why_not_native()
model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 10))
pyquant.quantize_(model, pyquant.W8A8Dynamic())
x = torch.randn(7, 96)
assert torch.equal(model[0](x), model[0].reference(x))
build = lambda: torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 10))
pyquant.save_pretrained(model, "saved")
assert torch.equal(pyquant.load_pretrained("saved", build)(x), model(x))
print(pathlib.Path(pyquant.__file__).parent)
"""
# What it must do without torch: the native module and the library beside it.
LOAD = """
import importlib.machinery, importlib.util, sysconfig
suffix = sysconfig.get_config_var("EXT_SUFFIX")
path = sysconfig.get_path("purelib") + "/pyquant/_native" + suffix
loader = importlib.machinery.ExtensionFileLoader("_native", path)
native = importlib.util.module_from_spec(importlib.util.spec_from_file_location("_native", path, loader=loader))
loader.exec_module(native)
assert len(native.kernel_table()) > 100 and not native.build_info()["cuda"]
print(path)
"""


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


def make_wheel(python: Python, source: Path, folder: Path) -> Path:
    """The wheel of one Python, without isolation: its environment holds the build's tools and nothing else."""
    builder = environment(python, folder / f"build-{python.version}")
    pip(builder, "install", *BUILD_TOOLS)
    out = folder / f"wheel-{python.version}"
    pip(
        builder,
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(out),
        str(source),
        PYQUANT_CUDA="OFF",
        PYQUANT_TORCH_INCLUDE=torch_headers(),
        PYQUANT_BUILD_DIR=str(folder / "cmake"),
        PATH=f"{Path(builder).parent}{os.pathsep}{os.environ['PATH']}",
    )
    (wheel,) = out.glob("*.whl")
    tag = "cp" + python.version.replace(".", "")
    if not re.fullmatch(rf"pyquant_gemm-[\d.]+-{tag}-{tag}-linux_\w+\.whl", wheel.name):
        raise Failed(f"the wheel is called {wheel.name}, and belongs to {tag}")
    return wheel


def offered(python: str) -> set[str]:
    """The versions of torch that pip finds for an environment, `2.13.0+cpu` beside `2.13.0`."""
    try:
        lines = run(python, "-m", "pip", "index", "versions", "torch").splitlines()
    except Failed as failed:
        if "No matching distribution" in str(failed):
            return set()
        raise
    prefix = "Available versions: "
    (line,) = [line for line in lines if line.startswith(prefix)]
    return set(line.removeprefix(prefix).split(", "))


def use(python: str, folder: Path) -> None:
    """A layer runs, is saved and loaded, and nothing warns; doctor finds nothing wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    place = run(python, "-W", "error", "-c", USE, cwd=folder).strip()
    if not Path(place).resolve().is_relative_to(Path(python).parents[1].resolve()):
        raise Failed(f"pyquant was imported from {place}")
    run(str(Path(python).with_name("pyquant")), "doctor", cwd=folder)


def with_torch(here: str, version: str, archives: dict[str, Path], folder: Path) -> Iterator[tuple[str, str]]:
    """(what was tried, what came of it) of one torch in an environment without one. Raises Failed."""
    pip(here, "install", "--only-binary=:all:", f"torch==={version}", "numpy", "safetensors")
    name = run(here, "-c", "import torch; print(torch.__version__)").strip()
    for kind, archive in archives.items():
        pip(here, "install", "--force-reinstall", "--no-deps", str(archive), PYQUANT_CUDA="OFF")
        use(here, folder / f"run-{kind[:5]}")
        yield f"torch {name}, {kind}", "ok"


def cells(python: Python, torches: list[str], sdist: Path, wheel: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """(what was tried, what came of it) of one Python. Each torch has an environment, which goes: it may be large."""
    here = environment(python, folder / "clean")
    there = offered(here)
    archives = {"wheel": wheel, "sdist, isolated": sdist}
    for version in torches:
        if version not in there:
            yield f"torch {version}", "no such build is offered"
            continue
        place = folder / f"use-{version}"
        try:
            yield from with_torch(environment(python, place), version, archives, folder / version)
        except Failed as failed:
            yield f"torch {version}", f"{FAILED}: {failed}"
        shutil.rmtree(place)
    if there.isdisjoint(torches):
        pip(here, "install", "--no-deps", str(wheel))
        run(here, "-c", LOAD, cwd=folder)
        yield "no torch, wheel", "ok: installed, the native module loads"


def main(argv: list[str] | None = None) -> int:
    """Runs the matrix and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", nargs="+", default=[], metavar="PATH", help="interpreters; default: all found here")
    parser.add_argument("--torch", nargs="+", default=list(TORCHES), metavar="VERSION", help="versions of torch")
    parser.add_argument("--cuda-builds", action="store_true", help="what `pip install torch` brings, gigabytes each")
    parser.add_argument("--folder", type=Path, help="where to work, kept; default: a temporary folder")
    args = parser.parse_args(argv)
    torches = args.torch if args.cuda_builds else [f"{version}+cpu" for version in args.torch]
    failures = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        sdist = make_sdist(folder)
        source = unpack(sdist, folder)
        for python in pythons(args.python):
            started = time.monotonic()
            try:
                wheel = make_wheel(python, source, folder)
                print(f"Python {python.version}: {wheel.name}, {time.monotonic() - started:.0f} s", flush=True)
                for what, outcome in cells(python, torches, sdist, wheel, folder / f"python-{python.version}"):
                    failures += outcome.startswith(FAILED)
                    print(f"Python {python.version}, {what}: {outcome}", flush=True)
            except Failed as failed:
                failures += 1
                print(f"Python {python.version}: {FAILED}: {failed}", flush=True)
    print(f"{failures} failed" if failures else "all that could be tried works")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
